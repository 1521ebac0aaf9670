"""The graphs of records of one shape: the trace of one record, lifted over chunks of any number of records."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpexp.privacy.gradients.branches import explain
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords, choose, public_leaves, synthetic_options
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import CompileDecision, flops, seconds
from dpexp.privacy.gradients.graph import Graph, Template, add_sums, compare, compile_and_compare, prove, rows_of, trace
from dpexp.privacy.gradients.lifted import Lifted
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_record import OneRecord
from dpexp.privacy.gradients.operators import NotTraceable
from dpexp.privacy.noise.randomness import own_state

_COMPARED_ROWS, _PROVED_ROWS, _PROVED_ROWS_OF_FURTHER_SHAPES = 2, 5, 3


class Graphs:
    """The graphs of a step for records of one shape: one for each number of rows, proved before it is used.

    Args:
        one: the trace of one record.
        chunk: records of this shape.
        clip: clips and sums their gradients.
        usual: rows of a chunk of the usual size (`round.usual_rows`).
        low_memory: each graph runs in two runs (`two_runs`).
        synthetic: how synthetic records are drawn; None: chosen here.
        public: a batch of one public record, which synthetic records may resemble; None: there is none.

    Raises:
        NotTraceable: the graph cannot be proved. NoLoss: no synthetic record has a finite loss.
    """

    def __init__(
        self, one: OneRecord, chunk: Chunk, clip: ClippedSums, usual: int, device: torch.device,
        low_memory: bool = False, synthetic: SyntheticRecords | None = None, public: Any = None,
    ) -> None:  # fmt: skip
        self.one, self._lifted = one, Lifted(one)
        self._clip, self._usual, self._device, self._low_memory = clip, usual, device, low_memory
        self._on_fakes = False
        self._compiled: Graph | None = None
        self._compiled_rows = usual
        self._template: Template | None = None
        with own_state(device):
            options = synthetic_options(self._lifted.smallest_range or 2, public_leaves(public, chunk))
            self.synthetic = synthetic or choose(options, lambda drawn: self._is_finite(drawn.records(chunk, 2, 0)))
            compare(one, self._lifted, self.synthetic.records(chunk, _COMPARED_ROWS, 0))
            rows = _PROVED_ROWS if synthetic is None else _PROVED_ROWS_OF_FURTHER_SHAPES
            some, others = (self.synthetic.records(chunk, rows, seed) for seed in (0, 1))
            run = self._run_lifted
            if low_memory:
                graph = self._traced(chunk, rows)
                run = partial(graph, device=device)
                self._on_fakes = self._can_trace_fakes(chunk, graph, rows)
            prove(self._perturbed(run), some, others, one.draws)
            self._by_rows = {usual: self._traced(chunk, usual)}

    def _is_finite(self, records: Chunk) -> bool:
        found = self._run_lifted(self._inputs(records))
        return bool((found["finite"] & found["in_range"] & found["loss"].isfinite()).all())

    def _clips_and_counts(self, rows: int) -> list[Tensor]:
        """The clip norms of the plan, and a mask [rows] that is true."""
        return [self._clip.bounds((), self._device), torch.ones(rows, dtype=torch.bool, device=self._device)]

    def _inputs(self, records: Chunk) -> list[Tensor]:
        """What a graph takes, if all records count."""
        return [*self.one.inputs.tensors(), *self._clips_and_counts(records.size), *records.tensors]

    def _run_lifted(self, inputs: list[Tensor]) -> dict[str, Tensor]:
        """Runs the lifted trace of one record, and clips and sums its gradients.

        Args:
            inputs: parameters and buffers, clip norms, the mask of rows that count, and the records' tensors.

        Returns:
            See `ClippedSums.of`.
        """
        k = len(self.one.specs)
        state, bounds, counted, records = inputs[:k], inputs[k], inputs[k + 1], inputs[k + 2 :]
        with torch.no_grad(), full_precision(self._device):
            gradients = self._lifted([t.detach() for t in state], [t.detach() for t in records])
            return self._clip.clipped_sums(gradients, bounds, counted, self.one.draws)

    def _perturbed(self, run: Callable[[list[Tensor]], dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        """Runs with perturbed weights: (records, which rows count) -> results."""
        state, bounds = self.one.inputs.perturbed(), self._clip.bounds((), self._device)
        return lambda records, counted: run([*state, bounds, counted, *records.tensors])

    def _traced(self, chunk: Chunk, rows: int) -> Graph:
        inputs = self._inputs(self.synthetic.records(chunk, rows, 0))
        return trace(self._run_lifted, inputs, len(self.one.specs), self.one.draws, self._low_memory, self._on_fakes)

    def _can_trace_fakes(self, chunk: Chunk, graph: Graph, rows: int) -> bool:
        """Whether tensors without memory give this graph of few rows, too; others take the memory of one run."""
        self._on_fakes = True
        try:
            return Template.of((graph, rows), (self._traced(chunk, rows), rows)) is not None
        except Exception:
            return False

    def compile(self, chunk: Chunk, compiling: CompileDecision) -> float:
        """Compiles the graph if `compiling` says so; the result must agree with the graph and be proved, too.

        Returns the seconds of a round.
        """
        with own_state(self._device):
            graph, inputs = self._by_rows[self._usual], self._inputs(self.synthetic.records(chunk, self._usual, 0))
            before = seconds(lambda: graph(inputs, self._device), self._device) * compiling.sample_size / self._usual
            count = len(graph.run.graph.nodes)
            if compiling.decided is False or not compiling.worth_trying(before, count, self._device):
                return before
            of_a_row = flops(lambda: graph(inputs, self._device)) / self._usual
            rows = compiling.rows(self._usual, of_a_row, self._clip.entries, self._device.type)
            some, others = (self.synthetic.records(chunk, rows, seed) for seed in (0, 1))
            inputs = self._inputs(some)
            try:
                if self._lifted.unchecked_index is not None:
                    raise NotTraceable(f"{self._lifted.unchecked_index} has an index whose range is not known")
                graph = self._of_rows(chunk, rows)
                fast = compile_and_compare(graph, inputs, self.one.inputs, self._device, compiling.progress)
                prove(self._perturbed(lambda given: fast(given, self._device)), some, others, fast.zeroing)
            except Exception as error:
                compiling.failed(explain(error))
                return before
            after = compiling.chunks(rows) * seconds(lambda: fast(inputs, self._device), self._device)
            if not compiling.compare(before, after):
                return before
            self._compiled, self._compiled_rows = fast, rows
            return after

    @property
    def max_rows(self) -> int | None:
        """The largest chunk: a compiled graph has one size. None: there is no limit."""
        return self._compiled_rows if self._compiled else None

    def add(self, chunk: Chunk, bounds: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk, adds to `sums`, and returns each record's loss, norms and flags.

        Rows of padding are copies of the first record, which no operator refuses that accepts the records. Records with
        a norm that is not finite add nothing: a graph that draws random numbers, which may be the cause, sets their
        gradients to zero; other graphs run again with copies of another record in their place. If an error is raised,
        nothing was added.
        """
        rows = self.max_rows or rows_of_graph(chunk.size, self._usual)
        graph = self._compiled or self._of_rows(chunk, rows)
        state, index = self.one.inputs.tensors(), torch.arange(rows, device=self._device)
        counted, padded = index < chunk.size, chunk.padded(rows)
        found = graph([*state, bounds, counted, *padded.tensors], self._device)
        if not graph.zeroing and not bool((finite := found["finite"]).all()):
            if not bool((finite & counted).any()):
                return rows_of(found, chunk.size)
            good = (finite & counted).nonzero()[0]
            replaced = padded.rows(torch.where(finite, index, good))
            again = graph([*state, bounds, counted & finite, *replaced.tensors], self._device)
            found = again | {name: value for name, value in found.items() if not name.startswith("sum:")}
        add_sums(found, sums)
        return rows_of(found, chunk.size)

    def _of_rows(self, chunk: Chunk, rows: int) -> Graph:
        """The graph for a number of rows. The first two are traced; the template makes the others from them."""
        if rows not in self._by_rows:
            if self._template is not None and rows > 1:  # vmap over one row is another graph
                self._by_rows[rows] = self._template.of_rows(rows)
            else:
                with own_state(self._device):
                    self._by_rows[rows] = self._traced(chunk, rows)
                sizes = [one for one in self._by_rows if one > 1]
                if len(sizes) == 2:
                    self._template = Template.of(*((self._by_rows[size], size) for size in sizes))
        return self._by_rows[rows]


def rows_of_graph(count: int, usual: int) -> int:
    """Rows of the graph for `count` records: the usual number plus or minus a multiple of its ninth, rounded up."""
    step = max(1, round(usual / 9))
    return usual + math.ceil((count - usual) / step) * step
