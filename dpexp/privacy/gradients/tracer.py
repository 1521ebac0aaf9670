"""Traces, runs, compiles and proves the pass of a chunk."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp._torch_compat import quick_tracing
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import Progress, flops_of, seconds
from dpexp.privacy.gradients.graph import Graph, Template
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import ChunkGradients, VmapPass
from dpexp.privacy.gradients.reads import Reads, is_library_class, is_user_object, set_value, value_of
from dpexp.privacy.gradients.traced import Inputs, NotTraceable, prove, trace
from dpexp.privacy.noise.randomness import all_random_states, random_state, set_all_random_states, set_random_state
from dpexp.privacy.sampling.training_data import Memory
from dpexp.privacy.state_checks import digest

_MAX_DEPTH, _MAX_ENTRIES = 8, 1000  # of containers whose entries are restored
_SEQUENCES = (list, set, deque)


@contextmanager
def side_effects_undone(
    module: nn.Module, reads: Sequence[Reads], device: torch.device
) -> Iterator[Callable[[Any, str], None]]:
    """Restores attributes of all modules, variables that the step reads, the entries of their containers and plain
    objects, and the states of random generators, but not the entries of tensors, to which no trace may write.

    Yields a function to call with each further variable (owner, name) before it changes.
    """
    saved: dict[int, tuple[Any, Any]] = {}
    variables = []

    def save(owner: Any, name: str) -> None:
        variables.append((owner, name, value_of(owner, name)))
        _snapshot(variables[-1][-1], saved)

    _snapshot(module, saved)
    classes = {kind for layer in module.modules() for kind in type(layer).__mro__}
    for kind in (kind for kind in classes if not is_library_class(kind)):
        for name, value in [*vars(kind).items()]:
            if name[:2] != "__" and not callable(value) and not hasattr(value, "__get__"):
                save(kind, name)
    for owner, name in (variable for one in reads for variable in one.variables()):
        save(owner, name)
    state = all_random_states(device)
    try:
        yield save
    finally:
        set_all_random_states(device, *state)
        for container, content in saved.values():
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
            one.record_values()


def _snapshot(value: Any, saved: dict[int, tuple[Any, Any]], depth: int = _MAX_DEPTH) -> None:
    """Copies the entries of containers and plain objects, nested ones included, into `saved`."""
    if not depth or id(value) in saved:
        return
    if isinstance(value, Tensor) and value.layout == torch.strided:
        saved[id(value)] = value, value.data
    elif isinstance(value, np.ndarray) and value.size <= _MAX_ENTRIES and value.flags.writeable:
        saved[id(value)] = value, value.copy()
    elif isinstance(value, dict):
        saved[id(value)] = value, dict(value)
    elif isinstance(value, _SEQUENCES):
        saved[id(value)] = value, [*value]
    if isinstance(value, nn.Module) or is_user_object(value):
        _snapshot(getattr(value, "__dict__", None), saved, depth)
    if isinstance(value, (dict, tuple, *_SEQUENCES)) and len(value) <= _MAX_ENTRIES:
        for one in value.values() if isinstance(value, dict) else value:
            _snapshot(one, saved, depth if isinstance(value, dict) and isinstance(one, nn.Module) else depth - 1)


PLAIN, EXACT = "plain", "exact"  # kinds of graphs; an exact one adds doubtful rows, with norms in float64
EXACT_ROWS = 8  # doubtful rows of one exact graph
_TOLERANCE = 1e-5  # relative error of a compiled graph's sums
_MAX_UNTRACED_ROWS = 16  # in the proof of a pass that is not traced


class Tracer:
    """Traces the pass of a chunk, and runs, compiles, compares and proves its graphs.

    Args:
        zeros: gives a sum of zeros for each parameter and value, by name.
        usual: rows of a usual chunk (`usual_rows`).
        data: the training set's memory, which no graph may hold.

    Attributes:
        inputs: parameters and buffers.
        constant_shapes: shapes of other tensors that the step reads.
        draws: whether a usual graph draws random numbers.
    """

    def __init__(
        self, module: nn.Module, run_pass: VmapPass, clip: ClippedSums, zeros: Callable[[], dict[str, Tensor]],
        device: torch.device, usual: int, data: Memory,
    ) -> None:  # fmt: skip
        self.inputs = Inputs(module)
        self._pass, self._clip, self._zeros = run_pass, clip, zeros
        self.device, self.usual, self._data = device, usual, data
        self.constant_shapes: list[str] = []
        self.draws = False

    def prove_untraced(self, chunk: Chunk, synthetic: SyntheticRecords) -> None:
        """Proves that the untraced pass keeps records apart."""
        rows = max(2, min(self.usual, _MAX_UNTRACED_ROWS))
        some, others = (synthetic.records(chunk, rows, seed) for seed in (0, 1))
        clip_norms, state = self._clip.clip_norms((), self.device), random_state(self.device)

        def run(records: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self.device, state)
            return self._outputs(self._pass(records), clip_norms, counted)

        prove(run, some, others)

    def traced(self, records: Chunk, reads: Reads, kind: str = PLAIN, late: Reads | None = None) -> Graph:
        """A trace on synthetic records. `late` is given if private records made it necessary, whose side effects are
        then undone: what the step reads for other records."""
        other = next((leaf for leaf in records.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if other is not None:
            raise NotTraceable(f"a batch holds a {type(other).__name__} besides tensors; leave out what is not used")

        zeroing = self.draws

        def run(clip_norms: Tensor, counted: Tensor, *rest: Tensor) -> dict[str, Tensor]:
            rows, tensors = ((rest[0], rest[1]), rest[2:]) if kind == EXACT else (None, rest)
            gradients = self._pass(records.with_tensors([*tensors]))
            return self._outputs(gradients, clip_norms, counted, rows, zeroing)

        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        others = [self._clip.clip_norms((), self.device), counted, *(self.one_exact_row(0) if kind == EXACT else [])]
        with ExitStack() as around:
            if late is not None:
                save = around.enter_context(side_effects_undone(self.inputs.module, (late, reads), self.device))
                around.enter_context(reads.variables_recorded(save))
            around.enter_context(reads.recorded())
            graph = trace(run, self.inputs, [*others, *records.tensors])
            if graph.draws and not zeroing:
                zeroing = True
                graph = trace(run, self.inputs, [*others, *records.tensors])
        graph.zeroing = zeroing
        return graph

    def _outputs(
        self, gradients: ChunkGradients, clip_norms: Tensor, counted: Tensor, rows: tuple[Tensor, Tensor] | None = None,
        zeroing: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """`sum:name` for each parameter and value, and losses, norms and flags of each row."""
        sums = self._zeros()
        with torch.no_grad(), full_precision(self.device):  # a trace records operators as autocast changes them
            found = self._clip(gradients, clip_norms, sums, counted & gradients.in_range, rows, zeroing)
        outputs = {f"sum:{name}": total for name, total in sums.items()}
        return outputs | found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def one_exact_row(self, row: int) -> list[Tensor]:
        """The inputs by which an exact graph adds this row alone."""
        index = torch.arange(EXACT_ROWS, device=self.device)
        return [torch.full_like(index, row), index == 0]

    def run(
        self, graph: Graph, clip_norms: Tensor, counted: list[Tensor], records: Chunk, read: list[Tensor] | None = None
    ) -> dict[str, Tensor]:
        return graph([*(read or self.inputs.tensors()), clip_norms, *counted, *records.tensors], self.device)

    def _inputs(self, records: Chunk, read: list[Tensor] | None = None) -> list[Tensor]:
        """Inputs of a graph all of whose rows count."""
        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        return [*(read or self.inputs.tensors()), self._clip.clip_norms((), self.device), counted, *records.tensors]

    @property
    def parameters(self) -> int:
        """Number of released entries."""
        return sum(zeros.numel() for zeros in self._zeros().values())

    def seconds(self, graph: Graph, records: Chunk) -> float:
        inputs = self._inputs(records)
        return seconds(lambda: graph(inputs, self.device), self.device)

    def flops(self, graph: Graph, records: Chunk) -> int:
        return flops_of(lambda: graph(self._inputs(records), self.device))

    def compiled(self, graph: Graph, records: Chunk, *progress: Progress) -> Graph:
        """The graph compiled; raises NotTraceable if it differs from the uncompiled one, or refuses some records."""
        inputs, state = self._inputs(records), random_state(self.device)
        self._check_refuses_none(graph, records)
        fast = graph.compile(inputs, self.device, *progress)
        assert fast.compiled
        if not fast.compiled.fits(self._inputs(records, self.inputs.perturbed())):
            raise NotTraceable("a parameter's strides are not the usual ones")
        found = []
        for one in (graph, fast):
            set_random_state(self.device, state)
            found.append(one(inputs, self.device))
        error, total = 0.0, 0.0  # squared norms
        for name, value in found[0].items():
            if name.startswith("sum:"):
                error += float((value - found[1][name]).double().square().sum())
                total += float(value.double().square().sum())
            elif not torch.allclose(value.double(), found[1][name].double(), rtol=1e-3, atol=1e-6, equal_nan=True):
                raise NotTraceable(f"a record's {name.partition(':')[0]} differs")
        if not error <= (_TOLERANCE**2) * total:
            raise NotTraceable(f"the sums' relative error is {math.sqrt(error / total) if total else math.inf:.0e}")
        return fast

    def _check_refuses_none(self, graph: Graph, records: Chunk) -> None:
        """Raises NotTraceable: an operator refuses some records, such as those with an index out of range; its
        compiled code may end the process instead, or read another index."""
        for number in (1e30, -1e30, math.nan):
            changed = [leaf.detach().clone() for leaf in records.tensors]
            for leaf in changed:
                if leaf.is_floating_point() or leaf.is_complex():
                    leaf[0] = number
                elif leaf.dtype != torch.bool:
                    limits = torch.iinfo(leaf.dtype)
                    leaf[0] = limits.min // 2 if number < 0 else limits.max // 2
            try:
                graph(self._inputs(records.with_tensors(changed)), self.device)
            except Exception as error:
                raise NotTraceable("some records raise an error, as with an index out of range") from error

    def compare(self, graph: Graph, records: Chunk) -> None:
        """Raises NotTraceable: the untraced pass, from the same random state, gives other results."""
        counted = torch.ones(records.size, dtype=torch.bool, device=self.device)
        clip_norms, state = self._clip.clip_norms((), self.device), random_state(self.device)
        found = self.run(graph, clip_norms, [counted], records)
        set_random_state(self.device, state)
        with quick_tracing():
            untraced = self._outputs(self._pass(records), clip_norms, counted)
        finite = bool(untraced["finite"].all())
        for name, value in untraced.items():
            same = torch.allclose(value, found[name], rtol=1e-2, atol=1e-2 * _largest(value), equal_nan=True)
            if not same and (finite or not name.startswith("sum:")):
                raise NotTraceable(f"a record's {name.partition(':')[0]} differs from that of an untraced pass")

    def prove(self, graph: Graph, chunk: Chunk, synthetic: SyntheticRecords, rows: int = 0, kind: str = PLAIN) -> None:
        """Raises NotTraceable or ConfigError: the graph mixes records, writes to its inputs or holds training data."""
        some, others = (synthetic.records(chunk, rows or self.usual, seed) for seed in (0, 1))
        self._data.refuse(graph.constants.items())
        constants = (tensor for name, tensor in graph.constants.items() if name not in graph.literals)
        self.constant_shapes = [str(tuple(tensor.shape)) for tensor in constants if tensor.numel() > 1]
        read = self.inputs.perturbed()
        before = [digest(tensor) for tensor in (*read, *graph.constants.values())]
        clip_norms, state = self._clip.clip_norms((), self.device), random_state(self.device)

        def run(records: Chunk, counted: Tensor) -> dict[str, Tensor]:
            set_random_state(self.device, state)
            exact = self.one_exact_row(int(counted.nonzero()[0])) if kind == EXACT else []
            return self.run(graph, clip_norms, [counted, *exact], records, read)

        prove(run, some, others, graph.zeroing)
        if before != [digest(tensor) for tensor in (*read, *graph.constants.values())]:
            raise NotTraceable("it changes what it reads")

    def agree(
        self, graph: Graph, rows: int, other: Graph, other_rows: int, chunk: Chunk, synthetic: SyntheticRecords,
        kind: str,
    ) -> bool:  # fmt: skip
        """Whether two graphs agree on their common rows, from the same random state; `kind` is that of the first."""
        some, common = synthetic.records(chunk, max(rows, other_rows), 0), min(rows, other_rows)
        clip_norms, found = self._clip.clip_norms((), self.device), list[dict[str, Tensor]]()
        state = random_state(self.device)
        for each, count, is_exact in ((graph, rows, kind == EXACT), (other, other_rows, False)):
            index = torch.arange(count, device=self.device)
            exact = self.one_exact_row(0) if is_exact else []
            set_random_state(self.device, state)
            found.append(self.run(each, clip_norms, [index < common, *exact], some.rows(index)))
        for name in found[0].keys() & found[1].keys():
            if kind == PLAIN or not name.startswith("sum:"):
                one, two = (each[name] if name.startswith("sum:") else each[name][:common] for each in found)
                if not torch.allclose(one, two, rtol=1e-3, atol=1e-3 * _largest(two), equal_nan=True):
                    return False
        return True

    def template(
        self, graph: Graph, rows: int, chunk: Chunk, synthetic: SyntheticRecords, seed: int, reads: Reads,
        late: Reads | None = None,
    ) -> Template | None:  # fmt: skip
        """Made with a second trace of one row less, or more; None: the graphs differ in other ways, too."""
        found = None
        for others in (rows - 1, rows + 1):
            if found is None and others > 1:  # PyTorch traces one row differently
                other = self.traced(synthetic.records(chunk, others, seed), reads, late=late)
                found = Template.of(graph, rows, other, others)
        return found


def _largest(value: Tensor) -> float:
    """The largest absolute value that is not infinite or NaN; 0 of integers."""
    return float(value.abs().nan_to_num(0, 0).max()) if value.is_floating_point() else 0.0
