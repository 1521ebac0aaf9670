"""The graphs of a job: one for each shape that records have and each number of rows, traced when first needed."""

import random
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.checks import STATE, StateFound, digest
from dpexp.privacy.engine.chunk import Chunk, MadeUp
from dpexp.privacy.engine.clipped_sums import ClippedSums
from dpexp.privacy.engine.passes import Gradients, VmapPass
from dpexp.privacy.engine.reads import Reads
from dpexp.privacy.engine.rounding import full_precision
from dpexp.privacy.engine.traced import (
    Graph,
    Inputs,
    NotTraceable,
    check_constants,
    compiling,
    differs,
    prove,
    rows_of_graph,
    trace,
)

PLAIN, EXACT, ZEROING = "plain", "exact", "zeroing"  # kinds of graphs
_SHAPES = 17  # of records, to say that these are many
_PROVED_ROWS = 16  # of a pass that is not traced
_EXACT_ROWS = 8  # of doubtful norms that one graph computes in float64


class Graphs:
    """Traces the pass of a chunk and runs it.

    Args:
        zeros: a sum of zeros for each parameter and value, by name.
        usual: rows of a usual chunk (`usual_rows`).
        data: where the training set lies in memory, which no graph may hold (`memory_of`).

    Attributes:
        held: shapes of tensors that the step reads and that are neither parameters nor buffers.
        reads: what else it reads of the modules.
    """

    def __init__(
        self, module: nn.Module, run_pass: VmapPass, clip: ClippedSums, zeros: Callable[[], dict[str, Tensor]],
        device: torch.device, usual: int, data: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        self._inputs = Inputs(module)
        self._pass, self._clip, self._zeros = run_pass, clip, zeros
        self._device, self._usual, self._data = device, usual, data
        self._graphs: dict[tuple[Hashable, int, str], Graph] = {}
        self._refused: dict[tuple[Hashable, int, str], Exception] = {}  # why there is no such graph
        self.held: list[str] = []
        self.reads = Reads()

    def settle(self, chunk: Chunk, made_up: MadeUp, settings: Callable[[], AbstractContextManager]) -> str | None:
        """Traces a usual chunk, and traces it again with other records and under other settings: equal graphs show that
        the step is the same in every round. Caches that the first trace filled are allowed for.

        Returns:
            In what the step differs; None: in nothing, and the graph is proved.

        Raises:
            NotTraceable, or what stands in the way.
        """
        graph = self._traced(made_up.records(chunk, self._usual, 0))
        odd: str | None = None
        for seed, other in ((1, settings), (2, nullcontext)):
            with other():
                again = self._traced(made_up.records(chunk, self._usual, seed))
            odd = differs(graph, again)
            graph = again
            if odd is None:
                self._compare(graph, made_up.records(chunk, self._usual, 0))
                self._prove(graph, chunk, made_up)
                self._graphs[chunk.key, self._usual, PLAIN] = graph
                return None
        return odd

    def add(self, chunk: Chunk, made_up: MadeUp, numbers: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk's records, adds what they sum up to, and returns what it says of each.

        Rows of padding are copies of the first record, which no function refuses that takes the records. Where a norm
        is not finite or doubtful, another graph runs from the same random state, so that all other records draw the
        same: one that sets such records' gradients to zero, or one of norms in float64.

        Raises:
            Exception: there is no graph for such records, or it cannot process these; nothing was added.
        """
        rows, key = rows_of_graph(chunk.size, self._usual), chunk.key
        graph = self._graph_for(chunk, key, made_up, rows, PLAIN)
        index = torch.arange(rows, device=self._device)
        counted = index < chunk.size
        padded = chunk.rows(torch.where(counted, index, 0)) if rows > chunk.size else chunk
        state = random_state(self._device) if graph.draws else ()
        found = self._run(graph, numbers, [counted], padded)
        if not bool(found["finite"].all()):
            zeroing = self._graph_for(chunk, key, made_up, rows, ZEROING)
            set_random_state(self._device, state)
            found = self._run(zeroing, numbers, [counted], padded)
        to_add = [found]
        if "doubtful" in found and found["doubtful"].any():
            after = random_state(self._device)
            exact = self._graph_for(chunk, key, made_up, rows, EXACT)
            for some in found["doubtful"].nonzero()[:, 0].split(_EXACT_ROWS):
                places = torch.cat([some, some[:1].expand(_EXACT_ROWS - len(some))])
                here = torch.arange(_EXACT_ROWS, device=self._device) < len(some)
                set_random_state(self._device, state)
                to_add.append(self._run(exact, numbers, [counted, places, here], padded))
            set_random_state(self._device, after)
        for one in to_add:  # all or nothing
            _add(one, sums)
        return {name: value[: chunk.size] for name, value in found.items() if not name.startswith("sum:")}

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
        self._refused.clear()

    def _traced(self, records: Chunk, kind: str = PLAIN) -> Graph:
        """One trace, on made-up records."""
        odd = next((leaf for leaf in records.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if odd is not None:
            raise NotTraceable(f"a batch holds a {type(odd).__name__} besides tensors; leave out what is not used")

        def run(numbers: Tensor, counted: Tensor, *given: Tensor) -> dict[str, Tensor]:
            rows, tensors = ((given[0], given[1]), given[2:]) if kind == EXACT else (None, given)
            gradients = self._pass(records.having([*tensors]))
            return self._outputs(gradients, numbers, counted, rows, kind == ZEROING)

        counted = torch.ones(records.size, dtype=torch.bool, device=self._device)
        others = [self._clip.numbers((), self._device), counted, *(self._exact_rows(0) if kind == EXACT else [])]
        with self.reads.noted():
            return trace(run, self._inputs, [*others, *records.tensors], self._device)

    def _outputs(
        self,
        gradients: Gradients,
        numbers: Tensor,
        counted: Tensor,
        rows: tuple[Tensor, Tensor] | None = None,
        zeroing: bool = False,
    ) -> dict[str, Tensor]:
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

        prove(run, some, others, kind == ZEROING)
        if before != [digest(tensor) for tensor in (*read, *graph.constants.values())]:
            raise NotTraceable("it changes what it reads")

    def _check_same(self, graph: Graph, chunk: Chunk, made_up: MadeUp, rows: int, kind: str) -> None:
        """Compares a graph of another number of rows with the usual one: what a step holds may have changed, as a
        generator of its own does, and then a record would be processed by how many others there are.

        Raises:
            StateFound: a record's loss is another one; or, where the step draws, another trace is.
        """
        usual = self._graphs.get((chunk.key, self._usual, PLAIN))
        if usual is None:
            return
        if graph.draws:
            same = differs(graph, self._traced(made_up.records(chunk, rows, 1), kind)) is None
        else:
            some, numbers = made_up.records(chunk, max(rows, self._usual), 0), self._clip.numbers((), self._device)
            exact = self._exact_rows(0) if kind == EXACT else []
            losses = []
            for one, count, more in ((graph, rows, exact), (usual, self._usual, [])):
                index = torch.arange(count, device=self._device)
                losses.append(self._run(one, numbers, [index >= 0, *more], some.rows(index))["loss"])
            few = min(rows, self._usual)
            same = torch.allclose(losses[0][:few], losses[1][:few], rtol=1e-2, atol=1e-6, equal_nan=True)
        if not same:
            raise StateFound(STATE.format(what="a record's loss is another one when the step is traced again"))

    def _graph_for(self, chunk: Chunk, key: Hashable, made_up: MadeUp, rows: int, kind: str) -> Graph:
        known = self._graphs.get((key, rows, kind))
        if known is not None and known.forms == self._inputs.forms():
            return known
        self._graphs.pop((key, rows, kind), None)
        if (key, rows, kind) in self._refused:
            raise self._refused[key, rows, kind]
        try:
            with own_state(self._device):
                graph = self._traced(made_up.records(chunk, rows, 0), kind)
                self._prove(graph, chunk, made_up, rows, kind)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if any(key == other for other, *_ in self._graphs):  # it is no matter of these records
                raise ConfigError(
                    f"model: training_step can no longer be traced ({type(error).__name__}): it fails on made-up "
                    "records, perhaps since weights have diverged."
                ) from None
            self._refused[key, rows, kind] = error.with_traceback(None)
            raise
        with own_state(self._device):
            self._check_same(graph, chunk, made_up, rows, kind)
        self._graphs[key, rows, kind] = graph
        shapes = len({key for key, *_ in self._graphs})
        if shapes == _SHAPES and kind == PLAIN:
            warnings.warn(
                f"data: records have {shapes} shapes so far, and for each the step is traced, which takes as long as "
                "many rounds; pad records to a few shapes."
            )
        return graph


def _add(found: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name.startswith("sum:"):
            name = name.removeprefix("sum:")
            sums[name] = sums[name].add_(value) if name in sums else value


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators that a step on the device draws from."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    for of, to in zip((torch.set_rng_state, lambda to: torch.cuda.set_rng_state(to, device)), state, strict=False):
        of(to)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Meanwhile whatever is drawn leaves torch's generators as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, state)


def all_random_states(device: torch.device) -> tuple[Any, ...]:
    """Of torch, Python and NumPy."""
    return random_state(device), random.getstate(), np.random.get_state()


def set_all_random_states(device: torch.device, of_torch: tuple[Tensor, ...], of_python: Any, of_numpy: Any) -> None:
    set_random_state(device, of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
