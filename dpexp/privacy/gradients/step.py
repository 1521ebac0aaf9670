"""Decides how a job's records are processed: by a traced graph, or one at a time."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.branches import explain
from dpexp.privacy.gradients.chunk import Chunk, LossOf, SyntheticRecords
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.graphs import Graphs
from dpexp.privacy.gradients.module_copy import attributes, changed
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_at_a_time import OneAtATime
from dpexp.privacy.gradients.one_record import difference
from dpexp.privacy.gradients.operators import NotTraceable
from dpexp.privacy.gradients.per_example import ChunkGradients
from dpexp.privacy.noise.randomness import own_state
from dpexp.privacy.state_checks import digest_as_integer

TRACED, LOOP = "traced", "one at a time"
_NOT_A_RECORDS_FAULT = (torch.OutOfMemoryError, ConfigError)
_SOME_SHAPES, _MANY_SHAPES = 4, 12  # of 16 records
_PAD = "Pad records to a few lengths, or let a collate_fn that pads do so: pad_to=[…] (data.pad_to)."
_COMPARED_ROUNDS = 4  # first rounds before which attributes are compared, those that begin epochs not counted
_MAX_CHANGES = 2  # with more between epochs, the step is no longer traced

Settings = Callable[[], AbstractContextManager]


class Step:
    """The training step of a job, applied to records.

    Attributes:
        graphs: of a traced step.
        alone: processes the records of a step that is not traced.
        mode: `TRACED` or `LOOP`, decided once before the first record; None: not yet.
        reason: why the job is not traced.
        public: a batch of one public record, on which the step is tried; None: there is none.
        seconds_of_round: estimated in the dry run; 0: unknown.
    """

    def __init__(
        self, module: nn.Module, graphs: Graphs, alone: OneAtATime, clip: ClippedSums, trains_users: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._module, self.graphs, self.alone, self._clip = module, graphs, alone, clip
        self._trains_users, self._device = trains_users, device
        self.mode: str | None = None
        self.reason = ""
        self.public: Any = None
        self.seconds_of_round = 0.0
        self._calls = self._changes = 0
        self._by_epoch = False  # the step reads the number of the epoch
        self._warned = False

    @property
    def digest(self) -> int:
        """A digest of the mode and graphs, which all processes must have in common."""
        return digest_as_integer(f"{self.mode} {self.graphs.digest()}".encode())

    @property
    def synthetic(self) -> SyntheticRecords:
        """How synthetic records are drawn."""
        return self.graphs.synthetic if self.mode == TRACED else self.alone.synthetic

    @property
    def kept(self) -> list[str]:
        """Attributes that the step sets, on a copy of the module."""
        return self.graphs.kept if self.mode == TRACED else self.alone.kept

    @property
    def is_random(self) -> bool:
        """Whether the step may draw random numbers."""
        return self.mode != TRACED or self.graphs.draws or self._warned

    def decide(
        self, chunk: Chunk, later: Settings = nullcontext, within: Settings = nullcontext, others: Sequence[Chunk] = ()
    ) -> None:
        """Decides `mode` for the job, from the shapes and types of records alone.

        Args:
            later: settings of the last round. A step is traced only if its graph is the same under these.
            within: settings of a later round of the first epoch: a step that is the same under these alone is traced
                in each epoch.
            others: records of other shapes; a step is traced if 16 records have at most 12 shapes.

        Raises:
            ConfigError: the step fails, keeps state of records, or changes a weight.
        """
        shapes = 1 + len(others)
        if self._trains_users:
            self.mode = LOOP
        elif shapes > _MANY_SHAPES:
            self.mode, self.reason = LOOP, f"the data's records have too many shapes to trace each. {_PAD}"
        else:
            self._try(lambda: self._trace(chunk, later, within))
        if self.mode == LOOP:
            self.alone.choose_synthetic(chunk, self.public)
            self.alone.test([chunk, *others])
        self._warn_if_slow(shapes)

    def _try(self, trace: Callable[[], None]) -> None:
        """Decides for `TRACED` if that succeeds."""
        try:
            trace()
            self.mode = TRACED
        except _NOT_A_RECORDS_FAULT:
            raise
        except Exception as error:
            self.mode, self.reason = LOOP, explain(error)

    def _trace(self, chunk: Chunk, later: Settings, within: Settings) -> None:
        first = self.graphs.trace(chunk)
        with later():
            what = difference(first, self.graphs.trace(chunk))
        if what is not None:
            if difference(first, self.graphs.trace(chunk)) is not None:
                raise NotTraceable(f"the step is not the same each time it runs ({what})")
            with within():
                if difference(first, self.graphs.trace(chunk)) is not None:
                    raise NotTraceable(f"it reads a number that changes within an epoch ({what}); keep it in a buffer")
            self._by_epoch = True
        self.graphs.use(first, chunk, self.public)

    def trace_again(self, loss_of: LossOf, epoch_begins: bool = False) -> None:
        """Traces the step of a traced job again if a plain attribute has changed, or the epoch that it reads.

        Attributes are compared before the first rounds and at the start of epochs. A step that changes in each of the
        first rounds is no longer traced.
        """
        if self.mode != TRACED:
            return
        self._calls += not epoch_begins
        due, graphs = epoch_begins or self._calls < _COMPARED_ROUNDS, self.graphs
        hooked = due and changed(graphs.attributes, attributes(self._module))
        if not (hooked or graphs.stale or (epoch_begins and self._by_epoch)):
            return
        chunk = replace(graphs.reference, loss_of=loss_of)
        self._try(lambda: self._trace_changed(chunk, epoch_begins))
        if self.mode != TRACED:
            self.alone.choose_synthetic(chunk, self.public)
            self.alone.test([chunk])
            self._warn_if_slow()

    def _trace_changed(self, chunk: Chunk, epoch_begins: bool) -> None:
        new = self.graphs.changed(chunk)
        if new is None:
            return
        self._changes += not epoch_begins
        if self._changes > _MAX_CHANGES:
            raise NotTraceable("hooks change an attribute that it reads in every round; keep it in a buffer")
        self.graphs.use(new, chunk, self.public)

    def add(self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]) -> Iterator[dict[str, Tensor] | Exception]:
        """Adds the clipped vectors of a chunk's records to `sums`; `clip_norms`: see `ClippedSums.clip_norms`.

        Yields losses, norms and flags of some of the records in order, or the error of a record without a loss. Raises
        ConfigError if the step keeps state, or has changed unseen.
        """
        if self.mode == TRACED:
            yield from self._add_by_graph(chunk, clip_norms, sums)
        else:
            yield from self._add_each(chunk, clip_norms, sums)

    def _add_each(
        self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor] | Exception]:
        weights = self.alone.weights()
        for i in range(chunk.size):
            try:
                one = self.alone.gradients_of(chunk, i)
            except _NOT_A_RECORDS_FAULT:
                raise
            except Exception as error:
                yield error
            else:
                yield self._clipped(one, clip_norms, sums)
        self.alone.refuse_changes(weights)

    def _add_by_graph(
        self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor] | Exception]:
        try:
            yield self.graphs.add(chunk, clip_norms, sums)
        except _NOT_A_RECORDS_FAULT:
            raise
        except NotTraceable as reason:
            # The shapes of other records, which decide the mode, must not decide what a record contributes.
            if not self._warned:
                warnings.warn(f"some records are processed one at a time, which is slow: {reason}")
                self._warned = True
            with own_state(self._device):
                each = [*self._add_each(chunk, clip_norms, sums)]
            yield from each
        except Exception as error:
            if chunk.size == 1:
                yield error
                return
            for i in range(chunk.size):
                yield from self._add_by_graph(chunk.row(i), clip_norms, sums)

    def _clipped(self, gradients: ChunkGradients, clip_norms: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad(), full_precision(self._device):
            found = self._clip.add(gradients, clip_norms, sums)
        return found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def _warn_if_slow(self, shapes: int = 1) -> None:
        if self.mode == TRACED and shapes > _SOME_SHAPES:
            warnings.warn(
                f"data: 16 records have {shapes} shapes. Only those of one shape are processed together, and the step "
                f"is traced for each, which is slow. {_PAD}"
            )
        if self.mode != LOOP or self._trains_users:
            return
        job = self.graphs.compiling
        self.seconds_of_round = self.alone.seconds_of_record * job.sample_size
        total = timedelta(seconds=round(self.seconds_of_round * job.rounds))
        rate = 1 / max(self.alone.seconds_of_record, 1e-6)
        warnings.warn(
            f"this model's records are processed one at a time, which is slow: about {rate:.0f} records a second, and "
            f"about {total} (h:mm:ss) for this job: {self.reason}"
        )
