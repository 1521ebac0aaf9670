"""Processes records one at a time: where the training step cannot be traced, and for users' local training.

Each record has fresh copies of the module, its tensors and the step's owner, so that what the step keeps is thrown
away. The module's parameters are shared, and compared by bits before each release.

User-level vectors by local training: v = θ_0 - θ_K, where θ_{k+1} = θ_k - η ∇ℓ(θ_k; batch k) on the user's examples.

Source: algorithm 1 of McMahan et al. 2018 (arXiv 1710.06963) and of Reddi et al. 2021 (arXiv 2003.00295). v is clipped,
summed and noised as a gradient is. The average takes the place of `p.grad`; the optimizer is the server's: SGD with
learning rate 1 is FedAvg, Adam is FedAdam.

The local weights are tensors of one user, which replace the module's parameters while the loss is computed. Users are
trained one at a time: in a batch, rounding would differ, many steps would amplify the difference without limit, and a
user's vector would depend on the other users.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._torch_compat import parameters_replaced, tree_unflatten
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.branches import describe, explain
from dpexp.privacy.gradients.chunk import (
    Chunk,
    NoLoss,
    SyntheticRecords,
    choose,
    copied,
    public_leaves,
    synthetic_options,
)
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.module_copy import changed
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import (
    NO_GRADIENT,
    ONE_LOSS,
    ChunkGradients,
    CtcTargetsChecked,
    backward,
    gradients_of_one_record,
    no_seeds,
)
from dpexp.privacy.gradients.training_step import StandIn
from dpexp.privacy.noise.randomness import all_random_states, own_state, set_all_random_states
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.sampling.privacy_unit import LocalTraining
from dpexp.privacy.state_checks import KEEPS_STATE, differ, digests, refuse_kept


class LocalTrainer:
    """Trains the model on one user's examples at a time."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values, local: LocalTraining) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values
        self._local = local

    def vector_of(self, own: StandIn, chunk: Chunk, i: int) -> tuple[dict[str, Tensor], Tensor]:
        """θ_0 - θ_K of user i by parameter, with the means over its steps of released values and of the loss.

        Args:
            own: the stand-in on which the step runs.

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
                with parameters_replaced(self._module, weights), parameters_replaced(own.module, weights):
                    with no_seeds(), CtcTargetsChecked():
                        loss = own.loss(batch)
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


class OneAtATime:
    """Computes the vector of one record, untraced.

    Args:
        local: local training of users; None: a record's vector is its gradient.

    Attributes:
        parameters, values: whose gradients and numbers are released.
        synthetic: how synthetic records are drawn.
        seconds_of_record: as measured by `test`.
        kept: attributes that the step sets on a record's copies, as seen by `test`.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, Tensor], values: Values, local: LocalTrainer | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._module, self.parameters, self.values = module, parameters, values
        self._local, self._device = local, device
        self.trains_users = local is not None
        self.synthetic = SyntheticRecords()
        self.seconds_of_record = 0.0
        self.kept: list[str] = []

    def gradients_of(self, chunk: Chunk, i: int, stand_in: StandIn | None = None) -> ChunkGradients:
        """The vector of record i, and its loss, by a new stand-in or the one given."""
        with chunk.step.stand_in() if stand_in is None else nullcontext(stand_in) as own:
            if self._local:
                found, loss = self._local.vector_of(own, chunk, i)
            else:
                found, loss = gradients_of_one_record(own, chunk.batch_of(i), self.parameters, self.values)
        dense: dict[str, LayerGradient] = {
            n: DenseGradient(g[None].to(torch.promote_types(torch.float32, g.dtype))) for n, g in found.items()
        }
        return ChunkGradients(dense, loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))

    def weights(self) -> dict[str, bytes]:
        """Digests of what no record may change: PyTorch's version counters miss writes through `.data` and NumPy."""
        return digests(self._module)

    def refuse_changes(self, before: dict[str, bytes]) -> None:
        """Raises ConfigError: a weight is not what it was."""
        _refuse_changes(before, self.weights())

    def choose_synthetic(self, chunk: Chunk, public: list | None) -> None:
        """Chooses synthetic records with finite losses and gradients; raises ConfigError if there are none, or if the
        step changes a weight."""
        weights = self.weights()

        def is_finite(synthetic: SyntheticRecords) -> bool:
            one = self.gradients_of(synthetic.records(chunk, 1, 0), 0)
            self.refuse_changes(weights)
            gradients = [gradient for name, gradient in one.by_name.items() if name in self.parameters]
            if not gradients:
                raise ConfigError(NO_GRADIENT)
            return all(bool(t.isfinite().all()) for t in (one.losses, *(g.materialize() for g in gradients)))

        self.synthetic = SyntheticRecords()
        try:
            with own_state(self._device):
                self.synthetic = choose(synthetic_options(2, public_leaves(public, chunk)), is_finite)
        except ConfigError as error:
            if not (self.trains_users and isinstance(error, NoLoss)):
                raise
        except Exception as error:
            records = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
            remedy = "" if public is not None else " Or give a validation set, whose first record is tried."
            raise NoLoss(
                f"model: training_step fails for every synthetic record; the data's are {describe(records)}: "
                f"{explain(error)}{remedy}"
            ) from error

    def test(self, chunks: Sequence[Chunk]) -> None:
        """Raises ConfigError unless a synthetic record has the same gradients before and after others, and for what the
        step keeps of a record and reads again.

        Args:
            chunks: of one record each, whose shapes and types the others have.
        """
        first = self.synthetic.records(chunks[0], 1, 0)
        others = [self.synthetic.records(chunk, 1, 1) for chunk in chunks]
        state, weights = all_random_states(self._device), self.weights()

        def probe(stand_in: StandIn | None = None) -> list[Tensor]:
            set_all_random_states(self._device, *state)
            one = self.gradients_of(first, 0, stand_in)
            return [t.clone() for t in (one.losses, *(gradient.materialize() for gradient in one.by_name.values()))]

        with own_state(self._device):
            try:
                before = probe()
                again, began = before if self._device.type == "cpu" else probe(), time.perf_counter()
                with first.step.stand_in() as own:
                    held, tensors = own.attributes(), _tensors(own)
                    probe(own)
                    self.kept = changed(held, own.attributes())
                    _refuse_changes(tensors, _tensors(own))
                    refuse_kept(self.kept, self._reads_again(lambda: probe(own), before, again))
            except RecordError as error:
                raise ConfigError(str(error)) from error
            for other in others:
                try:
                    self.gradients_of(other, 0)
                except ConfigError:
                    raise
                except Exception:  # such a record contributes nothing
                    pass
            try:
                after = probe()
            except Exception as error:
                what = f"training_step fails after other records ({explain(error)})"
                raise ConfigError(KEEPS_STATE.format(what=what)) from error
            self.seconds_of_record = (time.perf_counter() - began) / (2 + len(others))
        self.refuse_changes(weights)
        if _differ(before, after, again):
            raise ConfigError(KEEPS_STATE.format(what="a record's loss or gradient differs after other records"))

    def _reads_again(self, probe: Callable[[], list[Tensor]], before: list[Tensor], again: list[Tensor]) -> bool:
        """Whether a record has another loss or gradient on copies on which it was processed before."""
        try:
            return bool(self.kept) and _differ(before, probe(), again)
        except Exception:
            return True


def _differ(some: list[Tensor], other: list[Tensor], again: list[Tensor]) -> bool:
    """Whether losses, which come first, or gradients differ; see `state_checks.differ`."""
    return differ(some[:1], other[:1], again[:1]) or differ(some[1:], other[1:], again[1:])


def _refuse_changes(before: dict[str, bytes], now: dict[str, bytes]) -> None:
    for name, was in before.items():
        if now.get(name) != was:
            raise ConfigError(KEEPS_STATE.format(what=f"{name} is changed inside training_step"))


def _tensors(own: StandIn) -> dict[str, bytes]:
    """Digests of the parameters and buffers of a stand-in's module, and of the networks in its attributes."""
    outside = {name: value for name, value in own.attributes().items() if isinstance(value, nn.Module)}
    return digests(own.module) | {
        f"{k}.{name}": one for k, part in outside.items() for name, one in digests(part).items()
    }
