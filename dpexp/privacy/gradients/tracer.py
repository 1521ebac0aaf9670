"""Traces the pass of a chunk, runs what it was traced to, and proves it."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp._torch_compat import quick_tracing
from dpexp.privacy.checks import digest
from dpexp.privacy.gradients.chunk import Chunk, MadeUp
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import flops_of, seconds
from dpexp.privacy.gradients.graph import Graph, Template
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import Gradients, VmapPass
from dpexp.privacy.gradients.reads import Reads, is_library_class, is_of_the_users, set_value, value_of
from dpexp.privacy.gradients.traced import Inputs, NotTraceable, check_constants, prove, trace
from dpexp.privacy.noise.randomness import all_random_states, random_state, set_all_random_states, set_random_state
from dpexp.privacy.sampling.training_data import Memory

_DEPTH, _MANY = 8, 1000  # of containers: nested how deep, of how many entries these are looked into
_SEQUENCES = (list, set, deque)


@contextmanager
def side_effects_undone(
    module: nn.Module, reads: Sequence[Reads], device: torch.device
) -> Iterator[Callable[[Any, str], None]]:
    """Restores attributes of all modules, variables that the step reads, the entries of their containers and plain
    objects, and the states of random generators. What tensors hold is not restored: no trace may write to one that it
    did not make.

    Yields:
        what to call for a variable (where it is, name) that is found meanwhile, before it changes.
    """
    seen: dict[int, tuple[Any, Any]] = {}
    variables = []

    def keep(owner: Any, name: str) -> None:
        variables.append((owner, name, value_of(owner, name)))
        _snapshot(variables[-1][-1], seen)

    _snapshot(module, seen)
    classes = {kind for layer in module.modules() for kind in type(layer).__mro__}
    for kind in (kind for kind in classes if not is_library_class(kind)):
        for name, value in [*vars(kind).items()]:
            if name[:2] != "__" and not callable(value) and not hasattr(value, "__get__"):
                keep(kind, name)
    for owner, name in (variable for one in reads for variable in one.variables()):
        keep(owner, name)
    state = all_random_states(device)
    try:
        yield keep
    finally:
        set_all_random_states(device, *state)
        for container, content in seen.values():
            if isinstance(container, Tensor):
                if container.data_ptr() != content.data_ptr() or container.shape != content.shape:
                    container.data = content
            elif isinstance(container, np.ndarray):
                container[...] = content
            elif isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(content)
        for owner, name, value in variables:
            set_value(owner, name, value)
        for one in reads:
            one.note_values()


def _snapshot(value: Any, seen: dict[int, tuple[Any, Any]], depth: int = _DEPTH) -> None:
    """Copies the entries of containers and plain objects, nested ones included, into `seen`."""
    if not depth or id(value) in seen:
        return
    if isinstance(value, Tensor) and value.layout == torch.strided:
        seen[id(value)] = value, value.data
    elif isinstance(value, np.ndarray) and value.size <= _MANY and value.flags.writeable:
        seen[id(value)] = value, value.copy()
    elif isinstance(value, dict):
        seen[id(value)] = value, dict(value)
    elif isinstance(value, _SEQUENCES):
        seen[id(value)] = value, [*value]
    if isinstance(value, nn.Module) or is_of_the_users(value):
        _snapshot(getattr(value, "__dict__", None), seen, depth)
    if isinstance(value, (dict, tuple, *_SEQUENCES)) and len(value) <= _MANY:
        for one in value.values() if isinstance(value, dict) else value:
            _snapshot(one, seen, depth if isinstance(value, dict) and isinstance(one, nn.Module) else depth - 1)


PLAIN, EXACT = "plain", "exact"  # kinds of graphs
EXACT_ROWS = 8  # of doubtful norms that one graph computes in float64
_AGREE = 1e-5  # of all sums, by which those of a compiled graph may be off
_PROVED_ROWS = 16  # of a pass that is not traced


class Tracer:
    """The pass of a chunk, and what shows that a graph of it treats each record by itself.

    Args:
        zeros: a sum of zeros for each parameter and value, by name.
        usual: rows of a usual chunk (`usual_rows`).
        data: where the training set lies in memory, which no graph may hold.

    Attributes:
        device, usual: as given.
        inputs: parameters and buffers.
        held: shapes of tensors that the step reads and that are neither.
        draws: whether a usual graph draws random numbers.
    """

    def __init__(
        self, module: nn.Module, run_pass: VmapPass, clip: ClippedSums, zeros: Callable[[], dict[str, Tensor]],
        device: torch.device, usual: int, data: Memory,
    ) -> None:  # fmt: skip
        self.inputs = Inputs(module)
        self._pass, self._clip, self._zeros = run_pass, clip, zeros
        self.device, self.usual, self._data = device, usual, data
        self.held: list[str] = []
        self.draws = False

    def prove_untraced(self, chunk: Chunk, made_up: MadeUp) -> None:
        """Shows the same of a pass that is not traced.

        Raises:
            Exception: it is not so, or such records cannot be processed together.
        """
        rows = max(2, min(self.usual, _PROVED_ROWS))
        some, others = (made_up.records(chunk, rows, seed) for seed in (0, 1))
        numbers, state = self._clip.numbers((), self.device), random_state(self.device)

        def run(given: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self.device, state)
            return self._outputs(self._pass(given), numbers, counted)

        prove(run, some, others)

    def traced(self, records: Chunk, reads: Reads, kind: str = PLAIN, late: Reads | None = None) -> Graph:
        """One trace, on made-up records.

        Args:
            late: what the step reads of other records: this trace is made because private records need it, and must
                leave nothing behind.
        """
        odd = next((leaf for leaf in records.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if odd is not None:
            raise NotTraceable(f"a batch holds a {type(odd).__name__} besides tensors; leave out what is not used")

        zeroing = self.draws

        def run(numbers: Tensor, counted: Tensor, *given: Tensor) -> dict[str, Tensor]:
            rows, tensors = ((given[0], given[1]), given[2:]) if kind == EXACT else (None, given)
            gradients = self._pass(records.having([*tensors]))
            return self._outputs(gradients, numbers, counted, rows, zeroing)

        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        others = [self._clip.numbers((), self.device), counted, *(self.exact_rows(0) if kind == EXACT else [])]
        with ExitStack() as around:
            if late is not None:
                keep = around.enter_context(side_effects_undone(self.inputs.module, (late, reads), self.device))
                around.enter_context(reads.variables_noted(keep))
            around.enter_context(reads.noted())
            graph = trace(run, self.inputs, [*others, *records.tensors])
            if graph.draws and not zeroing:
                zeroing = True
                graph = trace(run, self.inputs, [*others, *records.tensors])
        graph.zeroing = zeroing
        return graph

    def _outputs(
        self, gradients: Gradients, numbers: Tensor, counted: Tensor, rows: tuple[Tensor, Tensor] | None = None,
        zeroing: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Sums, and what is found of each row."""
        sums = self._zeros()
        with torch.no_grad(), full_precision(self.device):  # a trace notes what autocast makes of each operator
            found = self._clip(gradients, numbers, sums, counted & gradients.in_range, rows, zeroing)
        outputs = {f"sum:{name}": total for name, total in sums.items()}
        return outputs | found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def exact_rows(self, row: int) -> list[Tensor]:
        """That one row's norm is wanted in float64."""
        here = torch.arange(EXACT_ROWS, device=self.device)
        return [torch.full_like(here, row), here == 0]

    def run(
        self, graph: Graph, numbers: Tensor, counted: list[Tensor], records: Chunk, read: list[Tensor] | None = None
    ) -> dict[str, Tensor]:
        return graph([*(read or self.inputs.tensors()), numbers, *counted, *records.tensors], self.device)

    def _inputs(self, records: Chunk, read: list[Tensor] | None = None) -> list[Tensor]:
        """Of a graph whose rows all count."""
        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        return [*(read or self.inputs.tensors()), self._clip.numbers((), self.device), counted, *records.tensors]

    @property
    def parameters(self) -> int:
        """Numbers that are released."""
        return sum(zeros.numel() for zeros in self._zeros().values())

    def seconds(self, graph: Graph, records: Chunk) -> float:
        inputs = self._inputs(records)
        return seconds(lambda: graph(inputs, self.device), self.device)

    def flops(self, graph: Graph, records: Chunk) -> int:
        return flops_of(lambda: graph(self._inputs(records), self.device))

    def compiled(self, graph: Graph, records: Chunk) -> Graph:
        """The graph, compiled, and compared with itself uncompiled.

        Raises:
            NotTraceable: they differ, or some records end in an error.
        """
        inputs, state = self._inputs(records), random_state(self.device)
        self._check_takes_all(graph, records)
        fast = graph.compile(inputs, self.device)
        assert fast.compiled
        if not fast.compiled.fits(self._inputs(records, self.inputs.moved())):
            raise NotTraceable("a parameter's memory is laid out in an odd way")
        found = []
        for one in (graph, fast):
            set_random_state(self.device, state)
            found.append(one(inputs, self.device))
        off, whole = 0.0, 0.0
        for name, value in found[0].items():
            if name.startswith("sum:"):
                off += float((value - found[1][name]).double().square().sum())
                whole += float(value.double().square().sum())
            elif not torch.allclose(value.double(), found[1][name].double(), rtol=1e-3, atol=1e-6, equal_nan=True):
                raise NotTraceable(f"a record's {name.partition(':')[0]} is another one")
        if not off <= (_AGREE**2) * whole:
            raise NotTraceable(f"sums are off by {math.sqrt(off / whole) if whole else math.inf:.0e} of the whole")
        return fast

    def _check_takes_all(self, graph: Graph, records: Chunk) -> None:
        """Raises NotTraceable: an operator refuses some records, as indices out of range, where a compiled one may end
        the process, or take another index."""
        for number in (1e30, -1e30, math.nan):
            odd = [leaf.detach().clone() for leaf in records.tensors]
            for leaf in odd:
                if leaf.is_floating_point() or leaf.is_complex():
                    leaf[0] = number
                elif leaf.dtype != torch.bool:
                    bounds = torch.iinfo(leaf.dtype)
                    leaf[0] = bounds.min // 2 if number < 0 else bounds.max // 2
            try:
                graph(self._inputs(records.having(odd)), self.device)
            except Exception as error:
                raise NotTraceable("some records end in an error, as where an index is out of range") from error

    def compare(self, graph: Graph, records: Chunk) -> None:
        """With what the same pass gives untraced, from the same random state: an operator may do what no trace sees."""
        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        numbers, state = self._clip.numbers((), self.device), random_state(self.device)
        found = self.run(graph, numbers, [counted], records)
        set_random_state(self.device, state)
        with quick_tracing():
            seen = self._outputs(self._pass(records), numbers, counted)
        finite = bool(seen["finite"].all())
        for name, value in seen.items():
            most = float(value.abs().nan_to_num(0, 0).max()) if value.is_floating_point() else 0
            same = torch.allclose(value, found[name], rtol=1e-2, atol=1e-2 * most, equal_nan=True)
            if not same and (finite or not name.startswith("sum:")):
                raise NotTraceable(f"a record's {name.partition(':')[0]} is another one than without a trace")

    def prove(self, graph: Graph, chunk: Chunk, made_up: MadeUp, rows: int = 0, kind: str = PLAIN) -> None:
        some, others = (made_up.records(chunk, rows or self.usual, seed) for seed in (0, 1))
        self.held = check_constants(graph, self._data)
        read = [*self.inputs.moved()]
        before = [digest(tensor) for tensor in (*read, *graph.constants.values())]
        numbers, state = self._clip.numbers((), self.device), random_state(self.device)

        def run(given: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self.device, state)
            exact = self.exact_rows(int(counted.nonzero()[0])) if kind == EXACT else []
            return self.run(graph, numbers, [counted, *exact], given, read)

        prove(run, some, others, graph.zeroing)
        if before != [digest(tensor) for tensor in (*read, *graph.constants.values())]:
            raise NotTraceable("it changes what it reads")

    def agree(
        self, graph: Graph, rows: int, other: Graph, others: int, chunk: Chunk, made_up: MadeUp, kind: str
    ) -> bool:
        """Whether two graphs make the same of the rows that both have, from the same random state."""
        some, few = made_up.records(chunk, max(rows, others), 0), min(rows, others)
        numbers, found = self._clip.numbers((), self.device), list[dict[str, Tensor]]()
        state = random_state(self.device)
        for each, count, exact in ((graph, rows, kind == EXACT), (other, others, False)):
            index = torch.arange(count, device=self.device)
            more = self.exact_rows(0) if exact else []
            set_random_state(self.device, state)
            found.append(self.run(each, numbers, [index < few, *more], some.rows(index)))
        for name in found[0].keys() & found[1].keys():
            if kind == PLAIN or not name.startswith("sum:"):
                one, two = (each[name] if name.startswith("sum:") else each[name][:few] for each in found)
                most = float(two.abs().nan_to_num(0, 0).max()) if two.is_floating_point() else 0
                if not torch.allclose(one, two, rtol=1e-3, atol=1e-3 * most, equal_nan=True):
                    return False
        return True

    def template(
        self, graph: Graph, rows: int, chunk: Chunk, made_up: MadeUp, seed: int, reads: Reads, late: Reads | None = None
    ) -> Template | None:
        """By a trace of one row less, or more; None: the step is another one, or operators depend on that number."""
        found = None
        for others in (rows - 1, rows + 1):
            if found is None and others > 1:  # of one row PyTorch makes something else
                other = self.traced(made_up.records(chunk, others, seed), reads, late=late)
                found = Template.of(graph, rows, other, others)
        return found
