"""The graphs of a job: one for each shape that records have and each number of rows, traced when first needed."""

import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from dpexp.privacy.checks import CHANGED, StateFound, digest
from dpexp.privacy.engine.chunk import Chunk, LossOf, MadeUp
from dpexp.privacy.engine.clipped_sums import ClippedSums
from dpexp.privacy.engine.graph import Graph, Template, add_sums, differs, rows_of
from dpexp.privacy.engine.passes import Gradients, VmapPass
from dpexp.privacy.engine.questions import described, why
from dpexp.privacy.engine.random_states import own_state, random_state, set_random_state
from dpexp.privacy.engine.reads import Reads
from dpexp.privacy.engine.rounding import full_precision
from dpexp.privacy.engine.side_effects import undone
from dpexp.privacy.engine.traced import (
    Inputs,
    NotTraceable,
    check_constants,
    compiling,
    prove,
    rows_of_graph,
    trace,
)
from dpexp.privacy.training_data import Memory

PLAIN, EXACT = "plain", "exact"  # kinds of graphs
_SHAPES = 17  # of records, to say that these are many
_PROVED_ROWS = 16  # of a pass that is not traced
_EXACT_ROWS = 8  # of doubtful norms that one graph computes in float64


class Graphs:
    """Traces the pass of a chunk and runs it.

    Args:
        zeros: a sum of zeros for each parameter and value, by name.
        usual: rows of a usual chunk (`usual_rows`).
        data: where the training set lies in memory, which no graph may hold.

    Attributes:
        held: shapes of tensors that the step reads and that are neither parameters nor buffers.
        reads: what else it reads of the modules.
    """

    def __init__(
        self, module: nn.Module, run_pass: VmapPass, clip: ClippedSums, zeros: Callable[[], dict[str, Tensor]],
        device: torch.device, usual: int, data: Memory,
    ) -> None:  # fmt: skip
        self._inputs = Inputs(module)
        self._pass, self._clip, self._zeros = run_pass, clip, zeros
        self._device, self._usual, self._data = device, usual, data
        self._graphs: dict[tuple[Hashable, int, str], Graph] = {}
        self._templates: dict[Hashable, Template | None] = {}  # of graphs of other numbers of rows
        self._refused: dict[tuple[Hashable, int, str], Exception] = {}  # why there is no such graph
        self._reference: Chunk | None = None  # a usual chunk of made-up records
        self._draws = False  # whether a usual graph does
        self.held: list[str] = []
        self.reads = Reads()

    def settle(self, chunk: Chunk, made_up: MadeUp, settings: Callable[[], AbstractContextManager]) -> str | None:
        """Traces a usual chunk, and traces it again with other records, of another number, and under other settings:
        graphs that are equal but for that number show that the step is the same in every round. Caches that the first
        trace filled are allowed for. Chunks of other sizes are not traced: their graphs are made of these two.

        Returns:
            In what the step differs; None: in nothing, and the graph is proved.

        Raises:
            NotTraceable, or what stands in the way.
        """
        rows = self._usual
        self._draws = False
        graph = self._traced(made_up.records(chunk, rows, 0))
        self._draws = graph.draws
        odd: str | None = None
        for seed, settings_of, counters in (
            (1, settings, self.reads.counted_on), (2, nullcontext, nullcontext)
        ):  # fmt: skip
            with settings_of(), counters():
                template = self._template(graph, rows, chunk, made_up, seed)
                if template is None:
                    again = self._traced(made_up.records(chunk, rows, seed))
                    odd, graph = differs(graph, again), again
            if template is not None or odd is None:
                self._compare(graph, made_up.records(chunk, rows, 0))
                self._prove(graph, chunk, made_up)
                self._graphs[chunk.key, rows, PLAIN], self._templates[chunk.key] = graph, template
                self._reference = made_up.records(chunk, rows, 3)
                return None
        return odd

    def add(self, chunk: Chunk, made_up: MadeUp, numbers: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk's records, adds what they sum up to, and returns what it says of each.

        Rows of padding are copies of the first record, which no function refuses that takes the records. Records of
        which a norm is not finite add nothing: a graph that draws numbers, which may be why, sets their gradients to
        zero, and others run again with copies of another record in their place. Norms that are doubtful are computed
        by a graph in float64.

        Raises:
            Exception: there is no graph for such records, or it cannot process these; nothing was added.
        """
        key = chunk.key
        rows = self._rows_for(chunk, key, made_up)
        if rows < chunk.size:
            parts = [chunk.rows(some) for some in torch.arange(chunk.size, device=self._device).split(rows)]
            total: dict[str, Tensor] = {}
            each = [self.add(part, made_up, numbers, total) for part in parts]
            add_sums({f"sum:{name}": value for name, value in total.items()}, sums)
            return {name: torch.cat([one[name] for one in each]) for name in each[0] if all(name in o for o in each)}
        graph = self._graph_for(chunk, key, made_up, rows, PLAIN)
        index = torch.arange(rows, device=self._device)
        counted = index < chunk.size
        padded = chunk.rows(torch.where(counted, index, 0)) if rows > chunk.size else chunk
        state = random_state(self._device) if graph.draws else ()
        found = self._run(graph, numbers, [counted], padded)
        if not graph.zeroing and not bool((finite := found["finite"]).all()):
            if not bool((finite & counted).any()):
                return rows_of(found, chunk.size)
            good = (finite & counted).nonzero()[0]
            again = self._run(graph, numbers, [counted & finite], padded.rows(torch.where(finite, index, good)))
            found = again | {name: value for name, value in found.items() if not name.startswith(("sum:", "doubtful"))}
        to_add = [found]
        if "doubtful" in found and found["doubtful"].any():
            to_add += self._exactly(chunk, key, made_up, padded, numbers, found["doubtful"], state)
        for one in to_add:  # all or nothing
            add_sums(one, sums)
        return rows_of(found, chunk.size)

    def _exactly(
        self, chunk: Chunk, key: Hashable, made_up: MadeUp, padded: Chunk, numbers: Tensor, doubtful: Tensor,
        state: tuple[Tensor, ...],
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """What the rows add whose norms are to be computed in float64."""
        after, found = random_state(self._device), []
        graph = self._graph_for(chunk, key, made_up, padded.size, EXACT)
        for some in doubtful.nonzero()[:, 0].split(_EXACT_ROWS):
            places = torch.cat([some, some[:1].expand(_EXACT_ROWS - len(some))])
            here = torch.arange(_EXACT_ROWS, device=self._device) < len(some)
            set_random_state(self._device, state)
            found.append(self._run(graph, numbers, [doubtful, places, here], padded))
        set_random_state(self._device, after)
        return found

    def _rows_for(self, chunk: Chunk, key: Hashable, made_up: MadeUp) -> int:
        """The rows of a graph that suits the chunk, or else of one that is there."""
        rows = rows_of_graph(chunk.size, self._usual)
        known = [n for of, n, kind in self._graphs if of == key and kind == PLAIN]
        if not known or rows in known or self._resized(chunk, key, made_up, rows):
            return rows
        return min((n for n in known if n >= chunk.size), default=max(known))

    def _template(
        self, graph: Graph, rows: int, chunk: Chunk, made_up: MadeUp, seed: int, late: bool = False
    ) -> Template | None:
        """By a trace of one row less, or more; None: the step is another one, or operators depend on that number."""
        found = None
        for others in (rows - 1, rows + 1):
            if found is None and others > 1:  # of one row PyTorch makes something else
                other = self._traced(made_up.records(chunk, others, seed), late=late)
                found = Template.of(graph, rows, other, others)
        return found

    def _resized(self, chunk: Chunk, key: Hashable, made_up: MadeUp, rows: int) -> bool:
        """Makes the graph of so many rows, if there is a template and what it gives is proved."""
        template = self._templates.get(key)
        if template is None or template.graph.forms != self._inputs.forms() or (key, rows, PLAIN) in self._refused:
            return False
        graph = template.of_rows(rows)
        try:
            with own_state(self._device):
                self._prove(graph, chunk, made_up, rows)
                alike = graph.draws or self._agree(graph, rows, template.graph, template.rows, chunk, made_up, PLAIN)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refused[key, rows, PLAIN], alike = error.with_traceback(None), False
        if alike:
            self._graphs[key, rows, PLAIN] = graph
        return alike

    def changed(self, chunk: Chunk, made_up: MadeUp) -> str | None:
        """In what the step differs from what was traced; None: in nothing."""
        inputs = Inputs(self._inputs.module)
        if inputs.names() != self._inputs.names():
            self._inputs = inputs
            return "it has other parameters or buffers"
        known = self._graphs.get((chunk.key, self._usual, PLAIN))
        if known is None:
            return None
        return differs(known, self._traced(made_up.records(chunk, self._usual, 3)))

    def prove_untraced(self, chunk: Chunk, made_up: MadeUp) -> None:
        """Shows the same of a pass that is not traced.

        Raises:
            Exception: it is not so, or such records cannot be processed together.
        """
        rows = max(2, min(self._usual, _PROVED_ROWS))
        some, others = (made_up.records(chunk, rows, seed) for seed in (0, 1))
        numbers, state = self._clip.numbers((), self._device), random_state(self._device)

        def run(given: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self._device, state)
            return self._outputs(self._pass(given), numbers, counted)

        prove(run, some, others)

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return any(graph.draws for graph in self._graphs.values())

    def digest(self) -> str:
        return " ".join(sorted(graph.digest for graph in self._graphs.values()))

    def versions(self) -> dict[tuple[str, int], int]:
        """Of what a step reads besides the records: another one as soon as it is written to, or another tensor."""
        held = [*zip(self._inputs.names(), self._inputs.tensors(), strict=True)]
        for graph in self._graphs.values():
            held += graph.constants.items()
        return {(name, id(tensor)): tensor._version for name, tensor in held}

    def forget(self, but: Chunk | None = None) -> None:
        """What was traced is no longer what the step is; `but` of records of this shape."""
        kept = but.key if but is not None else None
        self._graphs = {key: graph for key, graph in self._graphs.items() if key[0] == kept}
        self._templates = {key: template for key, template in self._templates.items() if key == kept}
        self._refused.clear()

    def _traced(self, records: Chunk, kind: str = PLAIN, late: bool = False) -> Graph:
        """One trace, on made-up records; a late one, when private records need it, leaves nothing behind."""
        odd = next((leaf for leaf in records.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if odd is not None:
            raise NotTraceable(f"a batch holds a {type(odd).__name__} besides tensors; leave out what is not used")

        zeroing = self._draws

        def run(numbers: Tensor, counted: Tensor, *given: Tensor) -> dict[str, Tensor]:
            rows, tensors = ((given[0], given[1]), given[2:]) if kind == EXACT else (None, given)
            gradients = self._pass(records.having([*tensors]))
            return self._outputs(gradients, numbers, counted, rows, zeroing)

        counted = torch.ones(records.size, dtype=torch.bool, device=self._device)
        others = [self._clip.numbers((), self._device), counted, *(self._exact_rows(0) if kind == EXACT else [])]
        with undone(self._inputs.module, self.reads, self._device) if late else nullcontext(), self.reads.noted():
            graph = trace(run, self._inputs, [*others, *records.tensors])
            if graph.draws and not zeroing:
                zeroing = True
                graph = trace(run, self._inputs, [*others, *records.tensors])
        graph.zeroing = zeroing
        return graph

    def _outputs(
        self, gradients: Gradients, numbers: Tensor, counted: Tensor, rows: tuple[Tensor, Tensor] | None = None,
        zeroing: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Sums, and what is found of each row."""
        sums = self._zeros()
        with torch.no_grad(), full_precision(self._device):  # a trace notes what autocast makes of each operator
            found = self._clip(gradients, numbers, sums, counted & gradients.in_range, rows, zeroing)
        outputs = {f"sum:{name}": total for name, total in sums.items()}
        return outputs | found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def _exact_rows(self, row: int) -> list[Tensor]:
        """That one row's norm is wanted in float64."""
        here = torch.arange(_EXACT_ROWS, device=self._device)
        return [torch.full_like(here, row), here == 0]

    def _run(
        self, graph: Graph, numbers: Tensor, counted: list[Tensor], records: Chunk, read: list[Tensor] | None = None
    ) -> dict[str, Tensor]:
        return graph([*(read or self._inputs.tensors()), numbers, *counted, *records.tensors], self._device)

    def _compare(self, graph: Graph, records: Chunk) -> None:
        """With what the same pass gives untraced, from the same random state: an operator may do what no trace sees."""
        counted = torch.ones(records.size, dtype=torch.bool, device=self._device)
        numbers, state = self._clip.numbers((), self._device), random_state(self._device)
        found = self._run(graph, numbers, [counted], records)
        set_random_state(self._device, state)
        with compiling():
            seen = self._outputs(self._pass(records), numbers, counted)
        finite = bool(seen["finite"].all())
        for name, value in seen.items():
            most = float(value.abs().nan_to_num(0, 0).max()) if value.is_floating_point() else 0
            same = torch.allclose(value, found[name], rtol=1e-2, atol=1e-2 * most, equal_nan=True)
            if not same and (finite or not name.startswith("sum:")):
                raise NotTraceable(f"a record's {name.partition(':')[0]} is another one than without a trace")

    def _prove(self, graph: Graph, chunk: Chunk, made_up: MadeUp, rows: int = 0, kind: str = PLAIN) -> None:
        some, others = (made_up.records(chunk, rows or self._usual, seed) for seed in (0, 1))
        self.held = check_constants(graph, self._data)
        read = [*self._inputs.moved()]
        before = [digest(tensor) for tensor in (*read, *graph.constants.values())]
        numbers, state = self._clip.numbers((), self._device), random_state(self._device)

        def run(given: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self._device, state)
            exact = self._exact_rows(int(counted.nonzero()[0])) if kind == EXACT else []
            return self._run(graph, numbers, [counted, *exact], given, read)

        prove(run, some, others, graph.zeroing)
        if before != [digest(tensor) for tensor in (*read, *graph.constants.values())]:
            raise NotTraceable("it changes what it reads")

    def _check_unchanged(self, loss_of: LossOf) -> None:
        """Shows that the step is the one of which the graphs of this round's other records were made: a record would
        else be processed by what others there are.

        Raises:
            StateFound: the usual chunk is traced to something else.
        """
        assert self._reference is not None
        usual = self._graphs.get((self._reference.key, self._usual, PLAIN))
        if usual is None:
            return
        try:
            odd = differs(usual, self._traced(replace(self._reference, loss_of=loss_of), late=True))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            odd = why(error)
        if odd is not None:
            raise StateFound(CHANGED.format(what=odd))

    def _check_same(self, graph: Graph, chunk: Chunk, made_up: MadeUp, rows: int, kind: str) -> None:
        """Shows that a graph of a new shape is traced again to the same but for the number of rows, and that one in
        float64 gives its rows the same as the other.

        Raises:
            NotTraceable: it is not so.
        """
        known = self._graphs.get((chunk.key, rows, PLAIN))
        if kind == EXACT and known is not None:
            if not self._agree(graph, rows, known, rows, chunk, made_up, kind):
                raise NotTraceable("what a record gives is another in float64")
            return
        self._templates[chunk.key] = self._template(graph, rows, chunk, made_up, 1, late=True)
        if self._templates[chunk.key] is None:
            odd = differs(graph, self._traced(made_up.records(chunk, rows, 1), kind, late=True))
            if odd is not None:
                raise NotTraceable(f"the step is not the same each time it runs ({odd})")

    def _agree(
        self, graph: Graph, rows: int, other: Graph, others: int, chunk: Chunk, made_up: MadeUp, kind: str
    ) -> bool:
        """Whether two graphs make the same of the rows that both have, from the same random state."""
        some, few = made_up.records(chunk, max(rows, others), 0), min(rows, others)
        numbers, found = self._clip.numbers((), self._device), list[dict[str, Tensor]]()
        state = random_state(self._device)
        for each, count, exact in ((graph, rows, kind == EXACT), (other, others, False)):
            index = torch.arange(count, device=self._device)
            more = self._exact_rows(0) if exact else []
            set_random_state(self._device, state)
            found.append(self._run(each, numbers, [index < few, *more], some.rows(index)))
        for name in found[0].keys() & found[1].keys():
            if kind == PLAIN or not name.startswith("sum:"):
                one, two = (each[name] if name.startswith("sum:") else each[name][:few] for each in found)
                most = float(two.abs().nan_to_num(0, 0).max()) if two.is_floating_point() else 0
                if not torch.allclose(one, two, rtol=1e-3, atol=1e-3 * most, equal_nan=True):
                    return False
        return True

    def _graph_for(self, chunk: Chunk, key: Hashable, made_up: MadeUp, rows: int, kind: str) -> Graph:
        known = self._graphs.get((key, rows, kind))
        if known is not None and known.forms == self._inputs.forms():
            return known
        self._graphs.pop((key, rows, kind), None)
        if (key, rows, kind) in self._refused:
            raise self._refused[key, rows, kind]
        try:
            with undone(self._inputs.module, self.reads, self._device), self.reads.variables_noted():
                chunk.loss_of(made_up.records(chunk, 1, 0).one(0))
            with own_state(self._device):
                graph = self._traced(made_up.records(chunk, rows, 0), kind, late=True)
                self._prove(graph, chunk, made_up, rows, kind)
                self._check_same(graph, chunk, made_up, rows, kind)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = described([tensor[0] for tensor in chunk.tensors])
            refused = NotTraceable(f"training_step cannot be traced for records of {shapes}: {why(error)}")
            self._refused[key, rows, kind] = refused
            raise refused from None
        finally:
            self._check_unchanged(chunk.loss_of)
        self._graphs[key, rows, kind] = graph
        count = len({key for key, *_ in self._graphs})
        if count == _SHAPES and kind == PLAIN:
            warnings.warn(
                f"data: records have {count} shapes so far, and for each the step is traced, which takes as long as "
                "many rounds; pad records to a few shapes."
            )
        return graph
