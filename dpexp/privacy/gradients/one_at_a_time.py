"""Records processed one at a time: for a step that is no function of operators alone, and for users' local training.

Each record has a fresh copy of the module, with clones of its buffers, so that what the step keeps is thrown away.
Weights are shared, and compared by bits before each release.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.branches import describe, explain, failing_layer
from dpexp.privacy.gradients.chunk import (
    NO_LOSS,
    Chunk,
    NoLoss,
    SyntheticRecords,
    public_leaves,
    smallest_index_range,
    synthetic_options,
)
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.local_training import LocalTrainer
from dpexp.privacy.gradients.module_copy import copy_of
from dpexp.privacy.gradients.per_example import NO_GRADIENT, ChunkGradients, gradients_of_one_record, no_seeds
from dpexp.privacy.noise.randomness import all_random_states, own_state, set_all_random_states
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.state_checks import KEEPS_STATE, digest, digests


class OneAtATime:
    """Computes the vector of one record, untraced.

    Args:
        local: local training of users; None: a record's vector is its gradient.

    Attributes:
        synthetic: how synthetic records are drawn.
        seconds_of_record: as measured by `test`.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, Tensor], values: Values, local: LocalTrainer | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._module, self._parameters, self._values = module, parameters, values
        self._local, self._device = local, device
        self.synthetic = SyntheticRecords()
        self.seconds_of_record = 0.0

    def gradients_of(self, chunk: Chunk, i: int) -> ChunkGradients:
        """The vector of record i, and its loss."""
        buffers = {id(b): b.detach().clone() for b in self._module.buffers()}
        module = copy_of(self._module, lambda t: buffers.get(id(t), t))
        with spectral_norms_fixed(module):
            if self._local:
                found, loss = self._local.vector_of(module, chunk, i)
            else:
                found, loss = gradients_of_one_record(
                    chunk.loss_of, module, chunk.batch_of(i), self._parameters, self._values
                )
        dense: dict[str, LayerGradient] = {
            n: DenseGradient(g[None].to(torch.promote_types(torch.float32, g.dtype))) for n, g in found.items()
        }
        return ChunkGradients(dense, loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))

    def weights(self) -> dict[str, bytes]:
        """Digests of what no record may change: PyTorch's version counters miss writes through `.data` and NumPy."""
        return digests(self._module)

    def refuse_changes(self, before: dict[str, bytes]) -> None:
        """Raises ConfigError: a weight is not what it was."""
        now = self.weights()
        changed = next((name for name, was in before.items() if now.get(name) != was), None)
        if changed is not None:
            raise ConfigError(KEEPS_STATE.format(what=f"{changed} is changed inside training_step"))

    def choose_synthetic(self, chunk: Chunk, public: list | None) -> None:
        """Chooses synthetic records with finite losses and gradients; raises ConfigError if there are none, or if the
        step changes a weight."""
        weights = self.weights()
        with own_state(self._device), no_seeds():
            options = synthetic_options(smallest_index_range(chunk, self._module), public_leaves(public, chunk))
            error, failed = None, True
            for self.synthetic in options:
                try:
                    one = self.gradients_of(self.synthetic.records(chunk, 1, 0), 0)
                except ConfigError:
                    raise
                except Exception as caught:
                    error = error or caught
                    continue
                self.refuse_changes(weights)
                failed = False
                gradients = [gradient for name, gradient in one.by_name.items() if name in self._parameters]
                if not gradients:
                    raise ConfigError(NO_GRADIENT)
                if all(bool(t.isfinite().all()) for t in (one.losses, *(g.materialize() for g in gradients))):
                    return
        self.synthetic = SyntheticRecords()
        if self._local:
            return
        raise NoLoss(NO_LOSS if not failed else self._failure_message(chunk, error, public)) from error

    def _failure_message(self, chunk: Chunk, error: Exception | None, public: list | None) -> str:
        """Says how all synthetic records fail, and in which layer."""
        one = SyntheticRecords().records(chunk, 1, 0)
        layer = failing_layer(self._module, lambda: chunk.loss_of(self._module, one.batch_of(0)))
        records = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
        remedy = "" if public is not None else " Or give a validation set, whose first record is tried."
        assert error is not None
        return (
            f"model: training_step fails for every synthetic record; the data's are {describe(records)}{layer}: "
            f"{explain(error)}{remedy}"
        )

    def test(self, chunks: Sequence[Chunk]) -> None:
        """Raises ConfigError unless a synthetic record has the same gradients before and after others.

        Args:
            chunks: of one record each, whose shapes and types the others have.
        """
        first = self.synthetic.records(chunks[0], 1, 0)
        others = [self.synthetic.records(chunk, 1, 1) for chunk in chunks]
        state, weights = all_random_states(self._device), self.weights()

        def probe() -> list[bytes] | None:
            set_all_random_states(self._device, *state)
            one = self.gradients_of(first, 0)
            return [*map(digest, (one.losses, *(gradient.materialize() for gradient in one.by_name.values())))]

        with own_state(self._device):
            try:
                before, began = probe(), time.perf_counter()
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
            self.seconds_of_record = (time.perf_counter() - began) / (1 + len(others))
        self.refuse_changes(weights)
        if after != before:
            raise ConfigError(KEEPS_STATE.format(what="a record's loss or gradient differs after other records"))
