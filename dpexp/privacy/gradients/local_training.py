"""A user's vector by training: v = θ_0 - θ_K, with θ_0 the current weights and θ_{k+1} = θ_k - η ∇ℓ(θ_k; batch k) on
the user's examples (algorithm 1 of McMahan et al. 2018, arXiv 1710.06963, and of Reddi et al. 2021, arXiv 2003.00295).

v is clipped, summed and noised as a gradient is; the average takes the place of `p.grad`, where the optimizer is the
server's: SGD with rate 1 adds the average change to the weights (FedAvg), Adam gives FedAdam.

Weights that are trained are tensors of the user's own, which the module has in the place of its parameters while its
loss is computed. One user is trained after another: several at once would round otherwise than each alone, and many
steps amplify that without limit, so that one user's vector would depend on who else was there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._torch_compat import parameters_replaced, tree_unflatten
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.chunk import Chunk, copied
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import ONE_LOSS, backward, no_seeds
from dpexp.privacy.gradients.torch_functions import Refusing
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.sampling.privacy_unit import LocalTraining


class Training:
    """Users' training."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values, local: LocalTraining) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values
        self._local = local

    def one(self, chunk: Chunk, i: int) -> tuple[dict[str, Tensor], Tensor]:
        """A record's vectors, the values that it gave for release (their means over its steps), and the mean of its
        losses.

        Raises:
            RecordError: it has none, or its examples cannot be told apart.
        """
        leaves = [leaf[i] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
        weights = self._weights()
        losses: list[Tensor] = []
        with self._values.given(weighed=False) as given:
            for batch in self._batches(chunk, leaves):
                weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
                with self._having(weights):
                    with no_seeds(), Refusing(indices=True):
                        loss = chunk.loss_of(batch)
                    if loss.dim():
                        raise RecordError(ONE_LOSS)
                    backward(loss)
                self._refuse_others(p.grad is not None for p in self._parameters.values())
                losses.append(loss.detach())
                with torch.no_grad(), full_precision(loss.device):
                    weights = {name: self._next(w, w.grad) for name, w in weights.items()}
            released = {key: value.clone() for key, value in given().items()}
        return self._moved(weights) | released, torch.stack(losses).mean()

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def _next(self, weight: Tensor, gradient: Tensor | None) -> Tensor:
        return weight if gradient is None else weight - self._local.lr * gradient

    def _moved(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """θ_0 - θ_K, in the type in which sums are computed."""
        with torch.no_grad():
            return {
                name: self._summed(p.detach()) - self._summed(weights[name]) for name, p in self._parameters.items()
            }

    def _summed(self, weight: Tensor) -> Tensor:
        return weight.to(torch.promote_types(torch.float32, weight.dtype))

    @contextmanager
    def _having(self, weights: dict[str, Tensor]) -> Iterator[None]:
        with parameters_replaced(self._module, weights):
            yield

    def _batches(self, chunk: Chunk, leaves: list[Any]) -> Iterator[Any]:
        """What each step is given, of a record's leaves [m, ...]: copies, which may be written to."""
        present = [leaf for leaf in leaves if leaf is not None]
        tensors = [leaf for leaf in present if isinstance(leaf, Tensor)]
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors}
        m = sizes.pop() if len(sizes) == 1 else 0
        for rows in self._local.batches(max(m, 1)):
            if not m or (self._local.batch_size is not None and len(tensors) < len(present)):
                raise RecordError(
                    "privacy_unit.local_training divides a user's examples into batches, so that its batch must "
                    "hold tensors whose "
                    "first dimension runs over the examples, and nothing else."
                )
            some = [copied(leaf[rows.start : rows.stop] if isinstance(leaf, Tensor) else leaf) for leaf in leaves]
            yield tree_unflatten(some, chunk.structure)

    def _refuse_others(self, reached: Any) -> None:
        """
        Raises:
            ConfigError: a parameter was used that is not what the module has in its place, and so would stay untrained.
        """
        if any(reached):
            for parameter in self._parameters.values():
                parameter.grad = None
            raise ConfigError(
                "privacy_unit.local_training trains weights in the place of the module's parameters, and one of "
                "them is used "
                "otherwise than as an attribute of its module; use it so, or choose privacy_unit.local_training=null."
            )
