"""The graphs of a job: one for each shape that records have and each number of rows, traced when first needed."""

import time
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpexp._torch_compat import version_of
from dpexp.privacy.checks import STEP_CHANGED, StateFound
from dpexp.privacy.gradients.branches import described, why
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.compiled import CompileDecision
from dpexp.privacy.gradients.graph import Graph, Template, add_sums, differs, rows_of
from dpexp.privacy.gradients.reads import Reads, counters_advanced
from dpexp.privacy.gradients.traced import Inputs, NotTraceable, rows_of_graph
from dpexp.privacy.gradients.tracer import EXACT, EXACT_ROWS, PLAIN, Tracer
from dpexp.privacy.noise.randomness import own_state, random_state, set_random_state

_SHAPES = 17  # of records, to say that these are many


class Graphs:
    """Which graph a chunk is run by.

    Attributes:
        reads: what the step reads besides records, parameters and buffers.
        compiling: decides whether graphs of usual records are compiled.
    """

    def __init__(self, tracer: Tracer, compiling: CompileDecision) -> None:
        self.compiling = compiling
        self._compiled_rows: dict[Hashable, int] = {}
        self.tracer, self._device, self._usual = tracer, tracer.device, tracer.usual
        self._graphs: dict[tuple[Hashable, int, str], Graph] = {}
        self._templates: dict[Hashable, Template | None] = {}  # of graphs of other numbers of rows
        self._refused: dict[tuple[Hashable, int, str], str] = {}  # why there is no such graph
        self._late: dict[Hashable, Reads] = {}  # what the step reads of records of a shape that was met late
        self._reference: Chunk | None = None  # a usual chunk of made-up records
        self.reads = Reads()

    def trace_and_prove(self, chunk: Chunk, synthetic: SyntheticRecords, settings: Callable[[], AbstractContextManager]) -> str | None:
        """Traces a usual chunk, and traces it again with other records, of another number, and under other settings:
        graphs that are equal but for that number show that the step is the same in every round. Caches that the first
        trace filled are allowed for. Chunks of other sizes are not traced: their graphs are made of these two.

        Returns:
            In what the step differs; None: in nothing, and the graph is proved.

        Raises:
            NotTraceable, or what stands in the way.
        """
        rows = self._usual
        self.tracer.draws = False
        graph = self.tracer.traced(synthetic.records(chunk, rows, 0), self.reads)
        self.tracer.draws = graph.draws
        odd: str | None = None
        for seed, settings_of, counters in ((1, settings, self.reads.counters), (2, nullcontext, [])):
            with settings_of(), counters_advanced(counters):
                template = self.tracer.template(graph, rows, chunk, synthetic, seed, self.reads)
                if template is None:
                    again = self.tracer.traced(synthetic.records(chunk, rows, seed), self.reads)
                    odd, graph = differs(graph, again), again
            if template is not None or odd is None:
                self.tracer.compare(graph, synthetic.records(chunk, rows, 0))
                self.tracer.prove(graph, chunk, synthetic)
                self._graphs[chunk.key, rows, PLAIN], self._templates[chunk.key] = graph, template
                self._reference = synthetic.records(chunk, rows, 3)
                self._compile(chunk, synthetic)
                return None
        return odd

    def _compile(self, chunk: Chunk, synthetic: SyntheticRecords) -> None:
        """Compiles the graph of usual records, if that is wanted or pays, compares it with the graph, and proves it."""
        key, usual, compiling, tracer = chunk.key, self._usual, self.compiling, self.tracer
        self._compiled_rows = {}
        if compiling.decided is False:
            return
        graph = self._graphs[key, usual, PLAIN]
        before = compiling.chunks(usual) * tracer.seconds(graph, synthetic.records(chunk, usual, 0))
        if not compiling.worth_trying(before, len(graph.run.graph.nodes)):
            return
        rows = compiling.rows(usual, tracer.flops(graph, synthetic.records(chunk, usual, 0)), tracer.parameters)
        if rows != usual and not self._resized(chunk, key, synthetic, rows):
            rows = usual
        graph, records, began = self._graphs[key, rows, PLAIN], synthetic.records(chunk, rows, 0), time.perf_counter()
        try:
            fast = tracer.compiled(graph, records)
            tracer.prove(fast, chunk, synthetic, rows)
        except Exception as error:
            compiling.failed(why(error))
            return
        after = compiling.chunks(rows) * tracer.seconds(fast, records)
        if compiling.compare(rows, before, after, time.perf_counter() - began):
            self._graphs[key, rows, PLAIN] = fast
            self._compiled_rows[key] = rows

    def add(self, chunk: Chunk, synthetic: SyntheticRecords, clip_norms: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk's records, adds what they sum up to, and returns what it says of each.

        Rows of padding are copies of the first record, which no function refuses that takes the records. Records of
        which a norm is not finite add nothing: a graph that draws numbers, which may be why, sets their gradients to
        zero, and others run again with copies of another record in their place. Norms that are doubtful are computed
        by a graph in float64.

        Raises:
            Exception: there is no graph for such records, or it cannot process these; nothing was added.
        """
        key = chunk.key
        rows = self._rows_for(chunk, key, synthetic)
        if rows < chunk.size:
            total: dict[str, Tensor] = {}
            each = [self.add(part, synthetic, clip_norms, total) for part in chunk.split(rows)]
            add_sums({f"sum:{name}": value for name, value in total.items()}, sums)
            return {name: torch.cat([one[name] for one in each]) for name in each[0] if all(name in o for o in each)}
        graph = self._graph_for(chunk, key, synthetic, rows, PLAIN)
        counted = torch.arange(rows, device=self._device) < chunk.size
        padded = chunk.padded(rows)
        state = random_state(self._device) if graph.draws else ()
        found = self.tracer.run(graph, clip_norms, [counted], padded)
        if not graph.zeroing and not bool((finite := found["finite"]).all()):
            if not bool((finite & counted).any()):
                return rows_of(found, chunk.size)
            good = (finite & counted).nonzero()[0]
            index = torch.arange(rows, device=self._device)
            again = self.tracer.run(graph, clip_norms, [counted & finite], padded.rows(torch.where(finite, index, good)))
            found = again | {name: value for name, value in found.items() if not name.startswith(("sum:", "doubtful"))}
        to_add = [found]
        if "doubtful" in found and found["doubtful"].any():
            to_add += self._exactly(chunk, key, synthetic, padded, clip_norms, found["doubtful"], state)
        for one in to_add:  # all or nothing
            add_sums(one, sums)
        return rows_of(found, chunk.size)

    def _exactly(
        self, chunk: Chunk, key: Hashable, synthetic: SyntheticRecords, padded: Chunk, clip_norms: Tensor, doubtful: Tensor,
        state: tuple[Tensor, ...],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """What the rows add whose norms are to be computed in float64."""
        after, found = random_state(self._device), []
        graph = self._graph_for(chunk, key, synthetic, padded.size, EXACT)
        for some in doubtful.nonzero()[:, 0].split(EXACT_ROWS):
            places = torch.cat([some, some[:1].expand(EXACT_ROWS - len(some))])
            here = torch.arange(EXACT_ROWS, device=self._device) < len(some)
            set_random_state(self._device, state)
            found.append(self.tracer.run(graph, clip_norms, [doubtful, places, here], padded))
        set_random_state(self._device, after)
        return found

    def _rows_for(self, chunk: Chunk, key: Hashable, synthetic: SyntheticRecords) -> int:
        """The rows of a graph that suits the chunk, or else of one that is there."""
        if key in self._compiled_rows:
            return self._compiled_rows[key]
        rows = rows_of_graph(chunk.size, self._usual)
        known = [n for of, n, kind in self._graphs if of == key and kind == PLAIN]
        if not known or rows in known or self._resized(chunk, key, synthetic, rows):
            return rows
        return min((n for n in known if n >= chunk.size), default=max(known))

    def _resized(self, chunk: Chunk, key: Hashable, synthetic: SyntheticRecords, rows: int) -> bool:
        """Makes the graph of so many rows, if there is a template and what it gives is proved."""
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
                self.tracer.prove(graph, chunk, synthetic, rows)
                alike = graph.draws or self.tracer.agree(
                    graph, rows, template.graph, template.rows, chunk, synthetic, PLAIN
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refused[key, rows, PLAIN], alike = why(error), False
        if alike:
            self._graphs[key, rows, PLAIN] = graph
        return alike

    def changed(self, chunk: Chunk, synthetic: SyntheticRecords) -> str | None:
        """In what the step differs from what was traced; None: in nothing."""
        inputs = Inputs(self.tracer.inputs.module)
        if inputs.names() != self.tracer.inputs.names():
            self.tracer.inputs = inputs
            return "it has other parameters or buffers"
        known = self._graphs.get((chunk.key, self._usual, PLAIN))
        if known is None:
            return None
        if known.input_specs != self.tracer.inputs.input_specs():
            return "a buffer of another shape"
        return differs(known, self.tracer.traced(synthetic.records(chunk, self._usual, 3), self.reads))

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return any(graph.draws for graph in self._graphs.values())

    def digest(self) -> str:
        return " ".join(sorted(graph.digest for graph in self._graphs.values()))

    def versions(self) -> dict[tuple[str, int], Any]:
        """Of what a step reads besides the records: another one as soon as it is written to, or another tensor."""
        held = [*zip(self.tracer.inputs.names(), self.tracer.inputs.tensors(), strict=True)]
        for graph in self._graphs.values():
            held += graph.constants.items()
        return {(name, id(tensor)): version_of(tensor) for name, tensor in held} | self.reads.signatures()

    def stale(self) -> str | None:
        """What hooks have changed of that which the step reads; None: nothing."""
        assert self._reference is not None
        usual = self._graphs.get((self._reference.key, self._usual, PLAIN))
        if usual is not None and usual.input_specs != self.tracer.inputs.input_specs():
            return "a buffer of another shape"
        return self.reads.changed()

    def forget(self, but: Chunk | None = None) -> None:
        """What was traced is no longer what the step is; `but` of records of this shape."""
        self._forget(lambda key: but is not None and key == but.key)

    def _forget(self, kept: Callable[[Hashable], bool]) -> None:
        self._graphs = {key: graph for key, graph in self._graphs.items() if kept(key[0])}
        self._compiled_rows = {key: rows for key, rows in self._compiled_rows.items() if kept(key)}
        self._templates = {key: template for key, template in self._templates.items() if kept(key)}
        self._refused = {key: refused for key, refused in self._refused.items() if kept(key[0])}
        self._late = {key: reads for key, reads in self._late.items() if kept(key)}

    def _check_unchanged(self, chunk: Chunk, synthetic: SyntheticRecords) -> None:
        """Shows that the step is the one of which the graphs of this round's other records were made: a record would
        else be processed by what others there are.

        Raises:
            StateFound: a usual chunk, or one of this shape, is traced to something else.
        """
        assert self._reference is not None
        usual = replace(self._reference, loss_of=chunk.loss_of)
        for sample in {usual.key: usual, chunk.key: chunk}.values():
            odd = self._differs(sample, sample.key, synthetic, Reads())
            if odd is not None:
                raise StateFound(STEP_CHANGED.format(what=odd))

    def _follow(self, chunk: Chunk, key: Hashable, synthetic: SyntheticRecords) -> None:
        """Drops the graphs of a shape if what the step reads of such records has changed, and the step with it."""
        if self._differs(chunk, key, synthetic, self._late[key]) is None:
            self._late[key].note_step_unaffected()
        else:
            self._forget(lambda other: other != key)

    def _differs(self, sample: Chunk, key: Hashable, synthetic: SyntheticRecords, reads: Reads) -> str | None:
        """In what the graph of records of a shape differs from another trace; None: in nothing, or there is none."""
        known = self._traced_graph(key)
        if known is None:
            return None
        rows, graph = known
        try:
            return differs(graph, self.tracer.traced(synthetic.records(sample, rows, 3), reads, late=self.reads))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return why(error)

    def _traced_graph(self, key: Hashable) -> tuple[int, Graph] | None:
        """(rows, graph) of one that was traced of records of a shape, rather than made of others."""
        if (template := self._templates.get(key)) is not None:
            return template.rows, template.graph
        return next(((n, graph) for (of, n, kind), graph in self._graphs.items() if of == key and kind == PLAIN), None)

    def _check_same(self, graph: Graph, chunk: Chunk, synthetic: SyntheticRecords, rows: int, kind: str, reads: Reads) -> None:
        """Shows that a graph of a new shape is traced again to the same but for the number of rows, and that one in
        float64 gives its rows the same as the other.

        Raises:
            NotTraceable: it is not so.
        """
        known = self._graphs.get((chunk.key, rows, PLAIN))
        if kind == EXACT and known is not None:
            if not self.tracer.agree(graph, rows, known, rows, chunk, synthetic, kind):
                raise NotTraceable("what a record gives is another in float64")
            return
        self._templates[chunk.key] = self.tracer.template(graph, rows, chunk, synthetic, 1, reads, self.reads)
        if self._templates[chunk.key] is None:
            odd = differs(graph, self.tracer.traced(synthetic.records(chunk, rows, 1), reads, kind, self.reads))
            if odd is not None:
                raise NotTraceable(f"the step is not the same each time it runs ({odd})")

    def _graph_for(self, chunk: Chunk, key: Hashable, synthetic: SyntheticRecords, rows: int, kind: str) -> Graph:
        if key in self._late and self._late[key].changed() is not None:
            self._follow(chunk, key, synthetic)
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
                graph = self.tracer.traced(synthetic.records(chunk, rows, 0), reads, kind, self.reads)
                self.tracer.prove(graph, chunk, synthetic, rows, kind)
                self._check_same(graph, chunk, synthetic, rows, kind, reads)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = described([tensor[0] for tensor in chunk.tensors])
            self._refused[key, rows, kind] = f"training_step cannot be traced for records of {shapes}: {why(error)}"
            raise NotTraceable(self._refused[key, rows, kind]) from None
        finally:
            self._check_unchanged(chunk, synthetic)
        self._graphs[key, rows, kind] = graph
        count = len({key for key, *_ in self._graphs})
        if count == _SHAPES and kind == PLAIN:
            warnings.warn(
                f"data: records have {count} shapes so far, and for each the step is traced, which takes as long as "
                "many rounds; pad records to a few shapes."
            )
        return graph
