"""The graphs of a job: one for each shape that records have and each number of rows, traced when first needed."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.checks import digest
from dpexp.privacy.engine.clipped_sums import ClippedSums
from dpexp.privacy.engine.made_up import MadeUp, signature
from dpexp.privacy.engine.passes import VmapPass
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

LossOf = Callable[[Any], Tensor]
_EXACT_ROWS = 8  # of doubtful norms that one graph computes in float64


class Graphs:
    """Traces the pass of a chunk and runs it.

    Args:
        zeros: a sum of zeros for each parameter and value, by name.
        expected: records of a chunk, by the plan.
        data: tensors of the training set, which no graph may hold.

    Attributes:
        held: shapes of tensors that the step reads and that are neither parameters nor buffers.
    """

    def __init__(
        self, module: nn.Module, run_pass: VmapPass, clip: ClippedSums, zeros: Callable[[], dict[str, Tensor]],
        device: torch.device, expected: float, data: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        self._inputs = Inputs(module)
        self._pass, self._clip, self._zeros = run_pass, clip, zeros
        self._device, self._expected, self._data = device, expected, data
        self._graphs: dict[tuple[Hashable, int, bool], Graph] = {}
        self._refused: dict[tuple[Hashable, int, bool], Exception] = {}  # why there is no such graph
        self.held: list[str] = []

    def traced(
        self,
        loss_of: LossOf,
        leaves: list[Any],
        structure: Any,
        made_up: MadeUp,
        size: int,
        seed: int,
        exact: bool = False,
    ) -> Graph:
        """One trace, on made-up records."""
        odd = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if odd is not None:
            raise NotTraceable(f"a batch holds a {type(odd).__name__} besides tensors; leave out what is not used")
        records = made_up.records(leaves, size, seed)
        places = [k for k, leaf in enumerate(records) if isinstance(leaf, Tensor)]

        def run(numbers: Tensor, counted: Tensor, *given: Tensor) -> dict[str, Tensor]:
            rows, tensors = ((given[0], given[1]), given[2:]) if exact else (None, given)
            mine = list(records)
            for place, tensor in zip(places, tensors, strict=True):
                mine[place] = tensor
            gradients = self._pass(loss_of, mine, structure, size, traced=True)
            counted = counted & gradients.in_range
            sums = self._zeros()
            with torch.no_grad():
                found = self._clip(gradients, numbers, sums, counted, rows)
            outputs = {f"sum:{name}": total for name, total in sums.items()}
            return outputs | found | {"loss": gradients.losses, "in_range": gradients.in_range}

        counted = torch.ones(size, dtype=torch.bool, device=self._device)
        rows = [torch.zeros(_EXACT_ROWS, dtype=torch.long, device=self._device), counted.new_ones(_EXACT_ROWS)]
        others = [self._clip.numbers((), self._device), counted, *(rows if exact else [])]
        return trace(run, self._inputs, [*others, *(records[place] for place in places)], self._device)

    def proved(
        self, loss_of: LossOf, leaves: list[Any], structure: Any, key: Hashable, made_up: MadeUp, size: int,
        exact: bool = False,
    ) -> Graph:  # fmt: skip
        """The graph for so many rows, traced and proved if there is none yet.

        Raises:
            NotTraceable, or what stands in the way: there can be none.
        """
        graph = self.traced(loss_of, leaves, structure, made_up, size, 0, exact)
        self._prove(graph, leaves, key, made_up, size, exact)
        return graph

    def settle(
        self, loss_of: LossOf, leaves: list[Any], structure: Any, key: Hashable, made_up: MadeUp,
        settings: Callable[[], AbstractContextManager],
    ) -> str | None:  # fmt: skip
        """Traces a usual chunk, and traces it again with other records and under other settings: equal graphs show that
        the step is the same in every round. Caches that the first trace filled are allowed for.

        Returns:
            In what the step differs; None: in nothing, and the graph is proved.

        Raises:
            NotTraceable, or what stands in the way.
        """
        size = rows_of_graph(max(1, round(self._expected)), self._expected)
        graph = self.traced(loss_of, leaves, structure, made_up, size, 0)
        odd: str | None = None
        for seed, other in ((1, settings), (2, nullcontext)):
            with other():
                again = self.traced(loss_of, leaves, structure, made_up, size, seed)
            odd = differs(graph, again)
            graph = again
            if odd is None:
                self._compare(graph, loss_of, leaves, structure, made_up, size)
                self._prove(graph, leaves, key, made_up, size, False)
                return None
        return odd

    def _compare(
        self, graph: Graph, loss_of: LossOf, leaves: list[Any], structure: Any, made_up: MadeUp, size: int
    ) -> None:
        """With what the same pass gives untraced, from the same random state: an operator may do what no trace sees.

        Raises:
            NotTraceable: it is something else.
        """
        given = made_up.records(leaves, size, 0)
        numbers, counted = self._clip.numbers((), self._device), torch.ones(size, dtype=torch.bool, device=self._device)
        state = random_state(self._device)
        found = graph([*self._inputs.tensors(), numbers, counted, *_tensors(given)], self._device)
        set_random_state(self._device, state)
        with compiling():
            gradients = self._pass(loss_of, given, structure, size, traced=True)
        with torch.no_grad():
            seen = self._clip.add(gradients, numbers, self._zeros()) | {"loss": gradients.losses}
        for name, value in seen.items():
            most = float(value.abs().nan_to_num(0, 0).max())
            if not torch.allclose(value, found[name], rtol=1e-2, atol=1e-2 * most, equal_nan=True):
                raise NotTraceable(f"a record's {name.partition(':')[0]} is another one than without a trace")

    def _prove(self, graph: Graph, leaves: list[Any], key: Hashable, made_up: MadeUp, size: int, exact: bool) -> None:
        some, others = made_up.records(leaves, size, 0), made_up.records(leaves, size, 1)
        self.held = check_constants(graph, self._data)
        before = [digest(tensor) for tensor in (*self._inputs.tensors(), *graph.constants().values())]
        numbers = self._clip.numbers((), self._device)
        state = random_state(self._device)

        def run(given: list[Any], counted: Tensor) -> dict[str, Tensor]:
            counted = counted.to(self._device)
            rows = []
            if exact:
                rows = [
                    counted.nonzero()[:1, 0].expand(_EXACT_ROWS).contiguous(),
                    torch.zeros(_EXACT_ROWS, dtype=torch.bool),
                ]
                rows[1][0] = True
                rows[1] = rows[1].to(self._device)
            set_random_state(self._device, state)
            return graph([*self._inputs.tensors(), numbers, counted, *rows, *_tensors(given)], self._device)

        prove(graph, run, some, others)
        if before != [digest(tensor) for tensor in (*self._inputs.tensors(), *graph.constants().values())]:
            raise NotTraceable("it changes what it reads")
        self._graphs[key, size, exact] = graph

    def add(
        self, loss_of: LossOf, leaves: list[Any], structure: Any, key: Hashable, made_up: MadeUp, size: int,
        numbers: Tensor, sums: dict[str, Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Runs the graph on `size` records, adds what they sum up to, and returns what it says of each.

        Raises:
            Exception: there is no graph for such records, or it cannot process these; nothing was added.
        """
        of = rows_of_graph(size, self._expected)
        graph = self._graph_for(loss_of, leaves, structure, key, made_up, of, False)
        # Rows of padding are copies of a record of the chunk, which no function refuses that takes the records.
        padded = [
            torch.cat([leaf.detach(), leaf[:1].detach().expand(of - size, *leaf.shape[1:])])
            if isinstance(leaf, Tensor) and size < of
            else leaf
            for leaf in leaves
        ]
        counted = torch.arange(of, device=self._device) < size
        state = random_state(self._device) if "doubtful" in graph.outputs else None
        held = self._inputs.tensors()
        found = graph([*held, numbers, counted, *_tensors(padded)], self._device)
        to_add = [found]
        if state is not None and found["doubtful"].any():
            after = random_state(self._device)
            exact = self._graph_for(loss_of, leaves, structure, key, made_up, of, True)
            doubtful = found["doubtful"].nonzero()[:, 0]
            for some in doubtful.split(_EXACT_ROWS):
                rows = torch.cat([some, some[:1].expand(_EXACT_ROWS - len(some))])
                here = torch.arange(_EXACT_ROWS, device=self._device) < len(some)
                set_random_state(self._device, state)
                to_add.append(exact([*held, numbers, counted, rows, here, *_tensors(padded)], self._device))
            set_random_state(self._device, after)
        for one in to_add:
            _add(one, sums)
        return {name: value[..., :size] for name, value in found.items() if not name.startswith("sum:")}

    def _graph_for(
        self, loss_of: LossOf, leaves: list[Any], structure: Any, key: Hashable, made_up: MadeUp, size: int, exact: bool
    ) -> Graph:
        known = self._graphs.get((key, size, exact))
        if known is not None and known.forms == self._inputs.forms():
            return known
        self._graphs.pop((key, size, exact), None)
        if (key, size, exact) in self._refused:
            raise self._refused[key, size, exact]
        try:
            with own_state(self._device):
                return self.proved(loss_of, leaves, structure, key, made_up, size, exact)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if any(key == other for other, *_ in self._graphs):  # it is no matter of these records
                raise ConfigError(
                    f"model: training_step can no longer be traced for {size} records ({type(error).__name__}): it "
                    "fails on made-up ones, perhaps since weights have diverged."
                ) from None
            self._refused[key, size, exact] = error.with_traceback(None)
            raise

    def changed(self, loss_of: LossOf, leaves: list[Any], structure: Any, made_up: MadeUp) -> str | None:
        """In what the step differs from what was traced; None: in nothing."""
        size = rows_of_graph(max(1, round(self._expected)), self._expected)
        known = self._graphs.get((signature(leaves, structure), size, False))
        if known is None:
            return None
        return differs(known, self.traced(loss_of, leaves, structure, made_up, size, 3))

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
            held += graph.constants().items()
        return {(name, id(tensor)): tensor._version for name, tensor in held}

    def forget(self) -> None:
        """What was traced is no longer what the step is."""
        self._graphs.clear()
        self._refused.clear()


def _add(found: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if name.startswith("sum:"):
            name = name.removeprefix("sum:")
            sums[name] = sums[name].add_(value) if name in sums else value


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators that a step on the device draws from."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Meanwhile whatever is drawn leaves torch's generators as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, state)
