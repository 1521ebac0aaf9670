"""Decides how a job's records are processed: by a traced graph, or one at a time.

*Each traced graph* is tested before it is used, for each shape of records; where a test fails, it is not used.

- By inspection: it calls operators of PyTorch alone (and dpexp's, for recurrent layers); none communicates or has a
  generator of its own. It writes only to tensors that it made. No constant shares memory with a tensor or array of the
  data set.
- By running it on five synthetic records, of further shapes on three: if one is replaced, also by large values, NaN,
  zeros or indices out of range, the others' losses, norms and sums stay bit-equal (on a GPU, up to the order in which
  its kernels add). The losses and gradients of two are those of the graph of one record (not compared if it draws
  random numbers).

For other numbers of records the same trace is lifted. A compiled graph is compared with the uncompiled one, and tested
again.

*The step* is refused if it sets a buffer, or sets an attribute, other than a tensor of constants, and computes
something else when it runs again on the same copies. So is a training hook, of the module or of a callback, or a method
of a Trainer that by its own code reads what the step sets. The step is traced under the settings of the last round,
too: if the traces differ by the epoch alone, it is traced in each epoch; otherwise it runs one record at a time. There
a synthetic record must have the same loss and gradients before and after others.

*A traced step that changes between rounds* is traced again (`Step.trace_again`):

| What changed | When it is compared | What happens |
|---|---|---|
| the function, or what it reads (`TrainingStep.reads`) | in each round | it is traced again |
| shapes of parameters or buffers | in each round | it is traced again |
| attributes of the module | in the first 3 rounds and at the start of epochs | it is traced again |
| the epoch, if the step reads it | at the start of epochs | it is traced again |
| nothing, between epochs | | changes in a row are counted from 0 again |
| any of these, and the new trace is as before | | the graph of the usual shape stays, the others are dropped |
| any of these in 3 rounds in a row that begin no epoch, and the trace differs | | records run one at a time |
| the function in 3 rounds in a row, and the trace is as before | | a warning: tracing each round is slow |
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.branches import describe, explain
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import CompileDecision
from dpexp.privacy.gradients.graph import add_sums, rows_of
from dpexp.privacy.gradients.graphs import Graphs
from dpexp.privacy.gradients.module_copy import changed
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_at_a_time import OneAtATime
from dpexp.privacy.gradients.one_record import OneRecord, difference, trace_one
from dpexp.privacy.gradients.operators import NotTraceable
from dpexp.privacy.gradients.per_example import NO_GRADIENT, signals_deferred, undisturbed
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.noise.randomness import own_state
from dpexp.privacy.state_checks import digest_as_integer
from dpexp.privacy.training_memory import Memory

TRACED, LOOP = "traced", "one at a time"
_NOT_A_RECORDS_FAULT = (torch.OutOfMemoryError, ConfigError)
_SOME_SHAPES, _MANY_SHAPES = 4, 12  # of 16 records
_SHAPES_TRACED = 17  # a warning is given at this number
_PAD = "Pad records to a few lengths, or let a collate_fn that pads do so: pad_to=[…] (data.pad_to)."
_COMPARED_ROUNDS = 3  # attributes are compared before as many rounds, and at the start of each epoch
_MAX_CHANGES = 2  # with more in a row between epochs, the step is no longer traced

OTHER_FUNCTION = (
    "the function that computes the loss, or what it reads besides the model and the record, is another one in every "
    "round; pass what changes in the record, or keep it in a buffer of the model"
)

Settings = Callable[[], AbstractContextManager]
Found = Iterator[dict[str, Tensor] | Exception]

STEP_CHANGED = (
    "model: training_step has changed since it was last traced (a new trace of it differs), by something other than a "
    "plain attribute of a module, so records of a new shape would be processed by another step than the others; keep "
    "what hooks change in buffers, or in attributes that change between epochs."
)


class Step:
    """The training step of a job, applied to records.

    Args:
        alone: processes records one at a time, if the step is not traced and in the dry run; it has the parameters and
            values.
        clip: clips and sums gradients.
        usual: rows of a chunk of the usual size.
        sizes: of samples.
        rounds: of the job.
        compile: compile the graph of usual records; None: where that saves time.
        data: the training set's memory, which no graph may hold.
        low_memory: each graph runs in two runs (`two_runs`).

    Attributes:
        mode: `TRACED` or `LOOP`, decided once before the first record; None: not yet.
        reason: why the job is not traced.
        public: a batch of one public record, on which the step is tried; None: there is none.
        seconds_of_round: estimated in the dry run; 0: unknown.
        compiling: whether the graph of usual records is compiled.
        constants: shapes of tensors that the step reads and that are neither parameters nor buffers.
    """

    def __init__(
        self, module: nn.Module, alone: OneAtATime, clip: ClippedSums, device: torch.device, usual: int,
        sizes: NormalDist, rounds: int, compile: bool | None, data: Memory, low_memory: bool = False,
    ) -> None:  # fmt: skip
        self._module = module
        self.alone = alone
        self._clip = clip
        self._device = device
        self.usual = usual
        self.rounds = rounds
        self._data = data
        self._low_memory = low_memory
        self.compiling = CompileDecision(compile, sizes, rounds)
        self.mode: str | None = None
        self.reason = ""
        self.public: Any = None
        self.seconds_of_round = 0.0
        self.constants: list[str] = []
        self._graphs: dict[Hashable, Graphs] = {}  # by shape of records, the usual shape first
        self._refused: dict[Hashable, str] = {}  # why records of a shape are not traced
        self._reference: Chunk  # a synthetic record of the usual shape; `_use` sets it with the first graph
        self._rounds_seen = 0  # by `trace_again`, not counting its calls at the start of epochs
        self._changes_in_a_row = 0  # rounds between epochs in which the step was traced again and differed
        self._other_functions_in_a_row = 0  # rounds in which its function, or what that reads, was another
        self._read: dict[str, Any] = {}  # by the step's function, when it was last looked at
        self._by_epoch = False  # the step reads the number of the epoch
        self._some_alone = False  # records of some shapes run one at a time

    @property
    def digest(self) -> int:
        """A digest of the mode and graphs, which all processes must have in common."""
        return digest_as_integer(
            " ".join([str(self.mode), *sorted(g.one.text for g in self._graphs.values())]).encode()
        )

    @property
    def synthetic(self) -> SyntheticRecords:
        """How synthetic records are drawn."""
        return self._usual_shape.synthetic if self.mode == TRACED else self.alone.synthetic

    @property
    def kept(self) -> list[str]:
        """Attributes that the step sets, on its copies."""
        return self._usual_shape.one.kept if self.mode == TRACED else self.alone.kept

    @property
    def is_random(self) -> bool:
        """Whether the step may draw random numbers."""
        return self.mode != TRACED or self._some_alone or any(graphs.one.draws for graphs in self._graphs.values())

    @property
    def _usual_shape(self) -> Graphs:
        return next(iter(self._graphs.values()))

    # ---- before the rounds, and where the step has changed -----------------------------------------------------------

    def decide(
        self,
        chunk: Chunk,
        last_round: Settings = nullcontext,
        same_epoch: Settings = nullcontext,
        others: Sequence[Chunk] = (),
    ) -> None:
        """Chooses the execution mode, traced or one record at a time, from the shapes and types of records alone.

        Args:
            chunk: a record of the usual shape.
            last_round: settings of the last round. A step is traced once if its graph is the same under these.
            same_epoch: settings of a later round of the present epoch. A step whose graph is the same under these, but
                not in the last round, is traced in each epoch.
            others: records of other shapes; a step is traced if 16 records have at most 12 shapes.

        Raises:
            ConfigError: the step fails, keeps state of records, or changes a weight.
        """
        shapes = 1 + len(others)

        def trace() -> None:
            if self.alone.trains_users:
                raise NotTraceable("users train one at a time")
            if shapes > _MANY_SHAPES:
                raise NotTraceable(f"the data's records have too many shapes to trace each. {_PAD}")
            self._trace_first(chunk, last_round, same_epoch)

        self._choose(trace, [chunk, *others])
        if self.mode == TRACED and shapes > _SOME_SHAPES:
            warnings.warn(
                f"data: 16 records have {shapes} shapes. Only those of one shape are processed together, and the step "
                f"is traced for each, which is slow. {_PAD}"
            )

    def _choose(self, trace: Callable[[], None], chunks: Sequence[Chunk]) -> None:
        """Decides for `TRACED` if that succeeds, and else for `LOOP`, which is tested on such chunks. If an error is
        raised, nothing is decided."""
        before = self.mode
        try:
            try:
                trace()
                self.mode = TRACED
            except _NOT_A_RECORDS_FAULT:
                raise
            except Exception as error:
                self.mode, self.reason = LOOP, explain(error)
            self._test_alone(chunks)
        except BaseException:
            self.mode = before
            raise

    def _trace(self, chunk: Chunk) -> OneRecord:
        """A new trace of the step, for a record of a chunk's shapes and types."""
        other = next((leaf for leaf in chunk.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if other is not None:
            raise NotTraceable(f"a batch holds a {type(other).__name__} besides tensors; leave out what is not used")
        with own_state(self._device):
            one = trace_one(self.alone.parameters, chunk, self.alone.values)
        self._data.refuse(one.constants.items())
        return one

    def _trace_first(self, chunk: Chunk, last_round: Settings, same_epoch: Settings) -> None:
        self._read = chunk.step.reads()
        first = self._trace(chunk)
        with last_round():
            what = difference(first, self._trace(chunk))
        if what is not None:  # is it the settings, and of these the epoch alone?
            if difference(first, self._trace(chunk)) is not None:
                raise NotTraceable(f"the step is not the same each time it runs ({what})")
            with same_epoch():
                if difference(first, self._trace(chunk)) is not None:
                    raise NotTraceable(f"it reads a number that changes within an epoch ({what}); keep it in a buffer")
            self._by_epoch = True
        self._use(first, chunk)

    def _use(self, one: OneRecord, chunk: Chunk) -> None:
        """Replaces the graphs of the usual shape by those of a new trace, and drops all others."""
        if not any(name in self.alone.parameters for name in one.used):
            raise ConfigError(NO_GRADIENT)
        graphs = self._graphs_for(one, chunk, public=self.public)
        self._graphs, self._refused = {chunk.key: graphs}, {}
        constants = (t for name, t in one.constants.items() if name not in one.literals)
        self.constants = [str(tuple(t.shape)) for t in constants if t.numel() > 1]
        self._reference = graphs.synthetic.records(chunk, 1, 3)
        self.seconds_of_round = graphs.compile(chunk, self.compiling)

    def _graphs_for(self, one: OneRecord, chunk: Chunk, **of_synthetic: Any) -> Graphs:
        return Graphs(one, chunk, self._clip, self.usual, self._device, self._low_memory, **of_synthetic)

    def trace_again(self, step: TrainingStep, epoch_begins: bool = False) -> None:
        """Traces the step of a traced job again if it may have changed since.

        The table at the top of this file says what is compared, and what follows.

        Args:
            epoch_begins: the round is the first of an epoch.
        """
        if self.mode != TRACED:
            return
        if not epoch_begins:
            self._rounds_seen += 1
        read = step.reads()
        is_other = bool(changed(self._read, read))
        attributes_are_due = epoch_begins or self._rounds_seen <= _COMPARED_ROUNDS
        hooked = attributes_are_due and changed(self._usual_shape.one.attributes, step.attributes())
        reshaped = any(graphs.one.specs != graphs.one.inputs.specs() for graphs in self._graphs.values())
        self._other_functions_in_a_row = self._other_functions_in_a_row + 1 if is_other else 0
        if is_other or hooked or reshaped or (epoch_begins and self._by_epoch):
            chunk = replace(self._reference, step=step)
            trace = partial(self._trace_changed, chunk, epoch_begins)
            undisturbed(partial(self._choose, trace, [chunk]))
        elif not epoch_begins:
            self._changes_in_a_row = 0
        self._read = read
        if self._other_functions_in_a_row == _MAX_CHANGES + 1 and self.mode == TRACED:
            warnings.warn(f"the step is traced again in each round, which is slow: {OTHER_FUNCTION}.")

    def _trace_changed(self, chunk: Chunk, epoch_begins: bool) -> None:
        """Traces a step that may have changed.

        Raises:
            NotTraceable: it has changed in too many rounds in a row.
        """
        new = self._trace(chunk)
        if difference(self._usual_shape.one, new) is None:
            # Networks in lists may be others, and so may the steps of records of other shapes.
            self._usual_shape.one.attributes, self._usual_shape.one.inputs = new.attributes, new.inputs
            self._graphs, self._refused = {chunk.key: self._usual_shape}, {}
            return
        changes = self._changes_in_a_row if epoch_begins else self._changes_in_a_row + 1
        if self._other_functions_in_a_row > _MAX_CHANGES:
            raise NotTraceable(OTHER_FUNCTION)
        if changes > _MAX_CHANGES:
            raise NotTraceable("hooks change an attribute that it reads in every round; keep it in a buffer")
        self._use(new, chunk)
        self._changes_in_a_row = changes

    def _graphs_of(self, chunk: Chunk) -> Graphs:
        """The graphs of a chunk's shape; a new shape is traced first.

        Raises:
            NotTraceable: records of this shape cannot be traced. ConfigError: the step has changed.
        """
        key = chunk.key
        if key in self._graphs:
            return self._graphs[key]
        if key not in self._refused:
            undisturbed(partial(self._trace_new_shape, chunk, key))
        if key in self._refused:
            raise NotTraceable(self._refused[key])
        if len(self._graphs) == _SHAPES_TRACED:
            warnings.warn(
                f"data: records have {_SHAPES_TRACED} shapes so far, and the step is traced for each, which takes as "
                "long as many rounds; pad records to a few shapes."
            )
        return self._graphs[key]

    def _trace_new_shape(self, chunk: Chunk, key: Hashable) -> None:
        """Traces a shape that a private record has first.

        The usual shape is traced again, too: if the step had changed, records of the new shape would be processed by
        another step than the others.
        """
        usual = self._usual_shape
        found: dict[Hashable, Graphs] = {}
        refused: dict[Hashable, str] = {}
        try:
            one = self._trace(chunk)
            found[key] = self._graphs_for(one, chunk, synthetic=usual.synthetic)
        except _NOT_A_RECORDS_FAULT:
            raise
        except Exception as error:
            shapes = describe([tensor[0] for tensor in chunk.tensors])
            refused[key] = f"training_step cannot be traced for records of {shapes}: {explain(error)}"
        if difference(usual.one, self._trace(replace(self._reference, step=chunk.step))) is not None:
            raise ConfigError(STEP_CHANGED)
        self._graphs |= found
        self._refused |= refused

    def _test_alone(self, chunks: Sequence[Chunk]) -> None:
        """Tests a step that runs one record at a time, and warns of the time that it takes."""
        if self.mode != LOOP:
            return
        self.alone.choose_synthetic(chunks[0], self.public)
        self.alone.test(chunks)
        if not self.alone.trains_users:
            self.seconds_of_round = self.alone.seconds_of_record * self.compiling.sample_size
            total = timedelta(seconds=round(self.seconds_of_round * self.rounds))
            rate = 1 / max(self.alone.seconds_of_record, 1e-6)
            warnings.warn(
                f"this model's records are processed one at a time, which is slow: about {rate:.0f} records a second, "
                f"and about {total} (h:mm:ss) for this job: {self.reason}"
            )

    # ---- in the rounds -----------------------------------------------------------------------------------------------

    def add(self, chunk: Chunk, bounds: Tensor, sums: dict[str, Tensor]) -> Found:
        """Adds the clipped vectors of a chunk's records to `sums`; `bounds`: see `ClippedSums.bounds`.

        Yields losses, norms and flags of some of the records in order, or the error of a record without a loss. Raises
        ConfigError if the step keeps state, or has changed unseen.
        """
        if self.mode != TRACED:
            yield from self._add_each(chunk, bounds, sums)
            return
        try:
            graphs = self._graphs_of(chunk)
        except NotTraceable as reason:
            # The shapes of other records, which decide the mode, must not decide what a record contributes.
            if not self._some_alone:
                warnings.warn(f"some records are processed one at a time, which is slow: {reason}")
                self._some_alone = True
            with own_state(self._device):
                each = [*self._add_each(chunk, bounds, sums)]
            yield from each
            return
        if graphs.max_rows is not None and chunk.size > graphs.max_rows:
            parts = chunk.split(graphs.max_rows)  # a compiled graph has one size
        else:
            try:
                yield graphs.add(chunk, bounds, sums)
                return
            except _NOT_A_RECORDS_FAULT:
                raise
            except Exception as error:
                if chunk.size == 1:
                    yield error
                    return
            # A record made the chunk fail, and nothing was added. Each is processed by itself, so that what the others
            # contribute does not depend on it.
            parts = [chunk.row(i) for i in range(chunk.size)]
        for part in parts:
            yield from self.add(part, bounds, sums)

    def _add_each(self, chunk: Chunk, bounds: Tensor, sums: dict[str, Tensor]) -> Found:
        weights = self.alone.weights()
        own: dict[str, Tensor] = {}
        for i in range(chunk.size):
            found: dict[str, Tensor] | Exception
            with signals_deferred():
                try:
                    one = self.alone.gradients_of(chunk, i)
                except _NOT_A_RECORDS_FAULT:
                    raise
                except Exception as error:
                    found = error
                else:
                    with torch.no_grad(), full_precision(self._device):
                        found = self._clip.clipped_sums(one, bounds, one.in_range, zeroing=True)
                        add_sums(found, own)
                        found = rows_of(found, 1)
            yield found
        self.alone.refuse_changes(weights)
        add_sums({f"sum:{name}": total for name, total in own.items()}, sums)
