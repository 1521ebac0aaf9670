"""The graphs of a job: one for each shape of records and number of rows, traced when first needed."""

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpexp._torch_compat import version_of
from dpexp.privacy.gradients.branches import describe, explain
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.compiled import CompileDecision
from dpexp.privacy.gradients.graph import Graph, Template, add_sums, difference, rows_of
from dpexp.privacy.gradients.reads import Reads, counters_advanced
from dpexp.privacy.gradients.traced import Inputs, NotTraceable, rows_of_graph
from dpexp.privacy.gradients.tracer import EXACT, EXACT_ROWS, PLAIN, Tracer
from dpexp.privacy.noise.randomness import own_state, random_state, set_random_state
from dpexp.privacy.state_checks import STEP_CHANGED, StateFound

_MANY_SHAPES = 17  # from which on a warning is given


class Graphs:
    """Traces, proves and keeps graphs, and runs chunks by them.

    Attributes:
        reads: what the step reads in addition to records, parameters and buffers.
        compiling: decides whether the graph of usual records is compiled.
        seconds_of_round: that the gradients of a sample of usual records take.
    """

    def __init__(self, tracer: Tracer, compiling: CompileDecision) -> None:
        self.compiling = compiling
        self._compiled_rows: dict[Hashable, int] = {}
        self.tracer, self._device, self._usual = tracer, tracer.device, tracer.usual
        self._graphs: dict[tuple[Hashable, int, str], Graph] = {}
        self._templates: dict[Hashable, Template | None] = {}  # by shape of records
        self._refused: dict[tuple[Hashable, int, str], str] = {}  # why there is no such graph
        self._late: dict[Hashable, Reads] = {}  # what the step reads for shapes that first occurred in a round
        self._reference: Chunk | None = None  # a usual chunk of synthetic records
        self._synthetic = SyntheticRecords()
        self.reads = Reads()
        self.seconds_of_round = 0.0

    def trace_and_prove(
        self, chunk: Chunk, synthetic: SyntheticRecords, settings: Callable[[], AbstractContextManager]
    ) -> str | None:
        """Traces a usual chunk, and again with other records, one row less, and the settings of a later round.

        If the graphs are equal but for the number of rows, the step is the same in every round. Caches that the first
        trace fills are allowed for. Graphs for other numbers of rows are made from these two. Returns how the step
        differs from trace to trace, or None if the graph is proved; an error says why it cannot be traced or proved.
        """
        self._synthetic, rows = synthetic, self._usual
        self.tracer.draws = False
        graph = self.tracer.traced(synthetic.records(chunk, rows, 0), self.reads)
        self.tracer.draws = graph.draws
        changes: str | None = None
        for seed, settings_of, counters in ((1, settings, self.reads.counters), (2, nullcontext, [])):
            with settings_of(), counters_advanced(counters):
                template = self.tracer.template(graph, rows, chunk, synthetic, seed, self.reads)
                if template is None:
                    again = self.tracer.traced(synthetic.records(chunk, rows, seed), self.reads)
                    changes, graph = difference(graph, again), again
            if template is not None or changes is None:
                self.tracer.compare(graph, synthetic.records(chunk, rows, 0))
                self.tracer.prove(graph, chunk, synthetic)
                self._graphs[chunk.key, rows, PLAIN], self._templates[chunk.key] = graph, template
                self._reference = synthetic.records(chunk, rows, 3)
                self._compile(chunk)
                return None
        return changes

    def _compile(self, chunk: Chunk) -> None:
        """Compiles the graph of usual records, if that is asked for or saves time, compares and proves it."""
        key, usual, compiling, tracer = chunk.key, self._usual, self.compiling, self.tracer
        self._compiled_rows = {}
        graph = self._graphs[key, usual, PLAIN]
        seconds = tracer.seconds(graph, self._synthetic.records(chunk, usual, 0))
        self.seconds_of_round, before = seconds * compiling.sample_size / usual, seconds * compiling.chunks(usual)
        if compiling.decided is False or not compiling.worth_trying(before, len(graph.run.graph.nodes)):
            return
        rows = compiling.rows(usual, tracer.flops(graph, self._synthetic.records(chunk, usual, 0)), tracer.parameters)
        if rows != usual and not self._resized(chunk, key, rows):
            rows = usual
        graph, records, began = (
            self._graphs[key, rows, PLAIN],
            self._synthetic.records(chunk, rows, 0),
            time.perf_counter(),
        )
        try:
            fast = tracer.compiled(graph, records, compiling.progress)
            tracer.prove(fast, chunk, self._synthetic, rows)
        except Exception as error:
            compiling.failed(explain(error))
            return
        after = compiling.chunks(rows) * tracer.seconds(fast, records)
        if compiling.compare(rows, before, after, time.perf_counter() - began):
            self._graphs[key, rows, PLAIN] = fast
            self._compiled_rows[key], self.seconds_of_round = rows, after

    def add(self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk, adds to `sums`, and returns each record's loss, norms and flags.

        Rows of padding are copies of the first record, which no operator refuses that accepts the records. Records with
        a norm that is not finite add nothing: a graph that draws random numbers, which may be the cause, sets their
        gradients to zero; other graphs run again with copies of another record in their place. Rows with doubtful norms
        are added by a graph that computes their norms in float64. If an error is raised, nothing was added.
        """
        key = chunk.key
        rows = self._rows_for(chunk, key)
        if rows < chunk.size:
            total: dict[str, Tensor] = {}
            each = [self.add(part, clip_norms, total) for part in chunk.split(rows)]
            add_sums({f"sum:{name}": value for name, value in total.items()}, sums)
            return {name: torch.cat([one[name] for one in each]) for name in each[0] if all(name in o for o in each)}
        graph = self._graph_for(chunk, key, rows, PLAIN)
        counted = torch.arange(rows, device=self._device) < chunk.size
        padded = chunk.padded(rows)
        state = random_state(self._device) if graph.draws else ()
        found = self.tracer.run(graph, clip_norms, [counted], padded)
        if not graph.zeroing and not bool((finite := found["finite"]).all()):
            if not bool((finite & counted).any()):
                return rows_of(found, chunk.size)
            index, good = torch.arange(rows, device=self._device), (finite & counted).nonzero()[0]
            replaced = padded.rows(torch.where(finite, index, good))
            again = self.tracer.run(graph, clip_norms, [counted & finite], replaced)
            found = again | {name: value for name, value in found.items() if not name.startswith(("sum:", "doubtful"))}
        to_add = [found]
        if "doubtful" in found and found["doubtful"].any():
            to_add += self._exact_sums(chunk, key, padded, clip_norms, found["doubtful"], state)
        for one in to_add:  # all or nothing
            add_sums(one, sums)
        return rows_of(found, chunk.size)

    def _exact_sums(
        self, chunk: Chunk, key: Hashable, padded: Chunk, clip_norms: Tensor, doubtful: Tensor,
        state: tuple[Tensor, ...],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """The sums of rows with doubtful norms, whose norms are computed in float64."""
        after, found = random_state(self._device), []
        graph = self._graph_for(chunk, key, padded.size, EXACT)
        for some in doubtful.nonzero()[:, 0].split(EXACT_ROWS):
            places = torch.cat([some, some[:1].expand(EXACT_ROWS - len(some))])
            here = torch.arange(EXACT_ROWS, device=self._device) < len(some)
            set_random_state(self._device, state)
            found.append(self.tracer.run(graph, clip_norms, [doubtful, places, here], padded))
        set_random_state(self._device, after)
        return found

    def _rows_for(self, chunk: Chunk, key: Hashable) -> int:
        """The number of rows of the graph for a chunk: the best one that can be proved, else an existing one."""
        if key in self._compiled_rows:
            return self._compiled_rows[key]
        rows = rows_of_graph(chunk.size, self._usual)
        known = [n for of, n, kind in self._graphs if of == key and kind == PLAIN]
        if not known or rows in known or self._resized(chunk, key, rows):
            return rows
        return min((n for n in known if n >= chunk.size), default=max(known))

    def _resized(self, chunk: Chunk, key: Hashable, rows: int) -> bool:
        """Makes the graph of this number of rows from the template; False: there is none, or it cannot be proved."""
        template = self._templates.get(key)
        if (
            template is None
            or template.graph.input_specs != self.tracer.inputs.input_specs()
            or (key, rows, PLAIN) in self._refused
        ):
            return False
        graph = template.of_rows(rows)
        try:
            with own_state(self._device):
                self.tracer.prove(graph, chunk, self._synthetic, rows)
                agrees = graph.draws or self.tracer.agree(
                    graph, rows, template.graph, template.rows, chunk, self._synthetic, PLAIN
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refused[key, rows, PLAIN], agrees = explain(error), False
        if agrees:
            self._graphs[key, rows, PLAIN] = graph
        return agrees

    def changed(self, chunk: Chunk) -> str | None:
        """How the step differs from its graph; None: it does not."""
        inputs = Inputs(self.tracer.inputs.module)
        if inputs.names() != self.tracer.inputs.names():
            self.tracer.inputs = inputs
            return "it has other parameters or buffers"
        known = self._graphs.get((chunk.key, self._usual, PLAIN))
        if known is None:
            return None
        if known.input_specs != self.tracer.inputs.input_specs():
            return "a buffer of another shape"
        return difference(known, self.tracer.traced(self._synthetic.records(chunk, self._usual, 3), self.reads))

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return any(graph.draws for graph in self._graphs.values())

    def digest(self) -> str:
        return " ".join(sorted(graph.digest for graph in self._graphs.values()))

    def versions(self) -> dict[tuple[str, int], Any]:
        """Versions of all that a step reads, which change with a write to a tensor or another object in its place."""
        tensors = [*zip(self.tracer.inputs.names(), self.tracer.inputs.tensors(), strict=True)]
        for graph in self._graphs.values():
            tensors += graph.constants.items()
        return {(name, id(tensor)): version_of(tensor) for name, tensor in tensors} | self.reads.signatures()

    def stale(self) -> str | None:
        """What hooks have changed that the step reads; None: nothing."""
        assert self._reference is not None
        usual = self._graphs.get((self._reference.key, self._usual, PLAIN))
        if usual is not None and usual.input_specs != self.tracer.inputs.input_specs():
            return "a buffer of another shape"
        return self.reads.changed()

    def drop(self, kept: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Drops all graphs, but for those of some shapes, by `Chunk.key`."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if kept(key[0])}
        self._compiled_rows = {key: rows for key, rows in self._compiled_rows.items() if kept(key)}
        self._templates = {key: template for key, template in self._templates.items() if kept(key)}
        self._refused = {key: refused for key, refused in self._refused.items() if kept(key[0])}
        self._late = {key: reads for key, reads in self._late.items() if kept(key)}

    def _check_unchanged(self, chunk: Chunk) -> None:
        """Raises StateFound unless the step is still the one that the graphs of this round's other records were traced
        from: how a record is processed would otherwise depend on which shapes other records have."""
        assert self._reference is not None
        usual = replace(self._reference, loss_of=chunk.loss_of)
        for sample in {usual.key: usual, chunk.key: chunk}.values():
            changes = self._difference(sample, sample.key, Reads())
            if changes is not None:
                raise StateFound(STEP_CHANGED.format(what=changes))

    def _drop_if_changed(self, chunk: Chunk, key: Hashable) -> None:
        """Drops the graphs of a shape if the step has changed for such records."""
        if self._difference(chunk, key, self._late[key]) is None:
            self._late[key].note_step_unaffected()
        else:
            self.drop(lambda other: other != key)

    def _difference(self, sample: Chunk, key: Hashable, reads: Reads) -> str | None:
        """How the graph of a shape differs from a new trace; None: it does not, or there is none."""
        template = self._templates.get(key)
        plain = ((n, graph) for (of, n, kind), graph in self._graphs.items() if of == key and kind == PLAIN)
        known = next(plain, None) if template is None else (template.rows, template.graph)
        if known is None:
            return None
        rows, graph = known
        try:
            again = self.tracer.traced(self._synthetic.records(sample, rows, 3), reads, late=self.reads)
            return difference(graph, again)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return explain(error)

    def _check_same(self, graph: Graph, chunk: Chunk, rows: int, kind: str, reads: Reads) -> None:
        """Raises NotTraceable unless a second trace of a new shape is equal but for the number of rows, and an exact
        graph agrees with the plain one."""
        known = self._graphs.get((chunk.key, rows, PLAIN))
        if kind == EXACT and known is not None:
            if not self.tracer.agree(graph, rows, known, rows, chunk, self._synthetic, kind):
                raise NotTraceable("a record's results differ in float64")
            return
        self._templates[chunk.key] = self.tracer.template(graph, rows, chunk, self._synthetic, 1, reads, self.reads)
        if self._templates[chunk.key] is None:
            changes = difference(
                graph, self.tracer.traced(self._synthetic.records(chunk, rows, 1), reads, kind, self.reads)
            )
            if changes is not None:
                raise NotTraceable(f"the step is not the same each time it runs ({changes})")

    def _graph_for(self, chunk: Chunk, key: Hashable, rows: int, kind: str) -> Graph:
        """The graph for records of this shape, traced and proved if it is new; raises NotTraceable if that fails."""
        if key in self._late and self._late[key].changed() is not None:
            self._drop_if_changed(chunk, key)
        known = self._graphs.get((key, rows, kind))
        if known is not None and known.input_specs == self.tracer.inputs.input_specs():
            return known
        self._graphs.pop((key, rows, kind), None)
        if (key, rows, kind) in self._refused:
            raise NotTraceable(self._refused[key, rows, kind])
        assert self._reference is not None
        reads = Reads() if key == self._reference.key else self._late.setdefault(key, Reads())
        try:
            with own_state(self._device):
                graph = self.tracer.traced(self._synthetic.records(chunk, rows, 0), reads, kind, self.reads)
                self.tracer.prove(graph, chunk, self._synthetic, rows, kind)
                self._check_same(graph, chunk, rows, kind, reads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = describe([tensor[0] for tensor in chunk.tensors])
            self._refused[key, rows, kind] = f"training_step cannot be traced for records of {shapes}: {explain(error)}"
            raise NotTraceable(self._refused[key, rows, kind]) from None
        finally:
            self._check_unchanged(chunk)
        self._graphs[key, rows, kind] = graph
        count = len({key for key, *_ in self._graphs})
        if count == _MANY_SHAPES and kind == PLAIN:
            warnings.warn(
                f"data: records have {count} shapes so far, and the step is traced for each, which takes as long as "
                "many rounds; pad records to a few shapes."
            )
        return graph
