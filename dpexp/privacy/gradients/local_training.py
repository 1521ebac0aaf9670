"""User-level vectors by local training: v = θ_0 - θ_K, where θ_{k+1} = θ_k - η ∇ℓ(θ_k; batch k) on the user's examples.

Source: algorithm 1 of McMahan et al. 2018 (arXiv 1710.06963) and of Reddi et al. 2021 (arXiv 2003.00295). v is clipped,
summed and noised as a gradient is. The average takes the place of `p.grad`; the optimizer is the server's: SGD with
learning rate 1 is FedAvg, Adam is FedAdam.

The local weights are tensors of one user, which replace the module's parameters while the loss is computed. Users are
trained one at a time: in a batch, rounding would differ, many steps would amplify the difference without limit, and a
user's vector would depend on the other users.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._torch_compat import parameters_replaced, tree_unflatten
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.chunk import Chunk, copied
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import ONE_LOSS, backward, no_seeds
from dpexp.privacy.gradients.torch_functions import OutOfRangeRefused
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.sampling.privacy_unit import LocalTraining


class LocalTrainer:
    """Trains the model on one user's examples at a time."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values, local: LocalTraining) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values
        self._local = local

    def vector_of(self, copy: nn.Module, chunk: Chunk, i: int) -> tuple[dict[str, Tensor], Tensor]:
        """θ_0 - θ_K of user i by parameter, with the means over its steps of released values and of the loss.

        Args:
            copy: of the module, on which the step runs.

        Raises:
            RecordError: the user has no scalar loss, or its examples cannot be divided into batches.
            ConfigError: a parameter is used otherwise than as an attribute of its module.
        """
        leaves = [leaf[i] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        losses: list[Tensor] = []
        with self._values.marked(weighted=False) as given:
            for batch in self._batches(chunk, leaves):
                weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
                with parameters_replaced(self._module, weights), parameters_replaced(copy, weights):
                    with no_seeds(), OutOfRangeRefused():
                        loss = chunk.loss_of(copy, batch)
                    if loss.dim():
                        raise RecordError(ONE_LOSS)
                    backward(loss)
                self._refuse_untrained()
                losses.append(loss.detach())
                with torch.no_grad(), full_precision(loss.device):
                    weights = {n: w if w.grad is None else w - self._local.lr * w.grad for n, w in weights.items()}
            released = {key: value.clone() for key, value in given().items()}
        with torch.no_grad():
            vectors = {name: _at_least_float32(p) - _at_least_float32(weights[name])
                       for name, p in self._parameters.items()}  # fmt: skip
        return vectors | released, torch.stack(losses).mean()

    def _batches(self, chunk: Chunk, leaves: list[Any]) -> Iterator[Any]:
        """The batch of each step, copied from a user's leaves [examples, ...]."""
        present = [leaf for leaf in leaves if leaf is not None]
        tensors = [leaf for leaf in present if isinstance(leaf, Tensor)]
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors}
        examples = sizes.pop() if len(sizes) == 1 else 0
        for rows in self._local.batches(max(examples, 1)):
            if not examples or (self._local.batch_size is not None and len(tensors) < len(present)):
                raise RecordError(
                    "privacy_unit.local_training divides a user's examples into batches, so that its batch must hold "
                    "tensors whose first dimension runs over the examples, and nothing else."
                )
            some = [copied(leaf[rows.start : rows.stop] if isinstance(leaf, Tensor) else leaf) for leaf in leaves]
            yield tree_unflatten(some, chunk.structure)

    def _refuse_untrained(self) -> None:
        """Refuses a step that uses a parameter itself, not the weight that replaces it."""
        if any(p.grad is not None for p in self._parameters.values()):
            for parameter in self._parameters.values():
                parameter.grad = None
            raise ConfigError(
                "privacy_unit.local_training trains weights in place of the module's parameters, and one of them is "
                "used otherwise than as an attribute of its module; use it so, or choose "
                "privacy_unit.local_training=null."
            )


def _at_least_float32(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.promote_types(torch.float32, weight.dtype))
