"""The traced pass of a chunk of records, the template that makes such graphs of any number of rows, and the proof.

A graph treats each record by itself. What the proof tests is PyTorch's vmap rules, the operators that are run on joined
batches, the reading of factors, and the compiler: the function that was traced has seen one record alone.
"""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, fx

from dpexp._torch_compat import add_each, operator_function, proxy_tensor, quick_tracing, tree_flatten, tree_unflatten
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.compiled import MARK, Compiled, Progress
from dpexp.privacy.gradients.graph_passes import share
from dpexp.privacy.gradients.lifted import Lifted
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_record import Inputs, OneRecord
from dpexp.privacy.gradients.operators import NotTraceable
from dpexp.privacy.gradients.two_runs import deterministic, two_runs
from dpexp.privacy.noise.randomness import random_state, set_random_state
from dpexp.privacy.state_checks import differ, digest


@dataclass
class Graph:
    """The traced pass of a chunk, for a fixed number of rows.

    Attributes:
        outputs: the names of its results, in order.
        num_state: number of the parameters and buffers that are its first inputs.
        zeroing: gradients of rows that are not finite are set to zero.
        compiled: runs instead, for inputs whose memory layout fits.
        low_memory: it runs in two runs (`two_runs`).
    """

    run: fx.GraphModule
    outputs: list[str]
    num_state: int
    zeroing: bool = False
    compiled: Compiled | None = None
    low_memory: bool = False

    @cached_property
    def _runs(self) -> list[Callable[..., list[Tensor]]]:
        modules = two_runs(self.run, self.outputs) if self.low_memory else [self.run]
        return [*map(_bound, modules)]

    def __call__(self, inputs: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        with torch.no_grad(), full_precision(device):
            first, *rest = [self.compiled] if self.compiled and self.compiled.fits(inputs) else self._runs
            if not rest:
                return dict(zip(self.outputs, first(*inputs), strict=True))
            state = random_state(device) if self.zeroing else ()
            with deterministic():
                others = first(*inputs)
                set_random_state(device, state)
                return dict(zip(self.outputs, [*rest[0](*inputs, *others), *others], strict=True))

    def compile(self, inputs: Sequence[Tensor], device: torch.device, progress: Progress) -> "Graph":
        with torch.no_grad(), full_precision(device):
            return replace(self, compiled=Compiled(self.run, inputs, self.num_state, progress))


def _bound(module: fx.GraphModule) -> Callable[..., list[Tensor]]:
    """A graph's code, with operators bound to local names, which saves a lookup per call."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def bind(match: re.Match) -> str:
        name = "_".join(match.groups())
        operator: Any = reduce(getattr, match.groups(), torch.ops)
        names[name] = (lambda marked: marked) if operator is MARK else operator_function(operator)
        return name

    exec(re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", bind, code.src), names)
    return partial(names["forward"], module)


def trace(
    run: Callable[[list[Tensor]], dict[str, Tensor]], inputs: Sequence[Tensor], num_state: int, zeroing: bool,
    low_memory: bool = False, on_fakes: bool = False,
) -> Graph:  # fmt: skip
    """Traces `run(inputs)`, which calls operators of PyTorch only; `on_fakes`: on tensors without memory."""
    outputs: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found = run([*tensors])
        outputs[:] = found
        return [*found.values()]

    with quick_tracing():
        how: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True} if on_fakes else {}
        graph = proxy_tensor.make_fx(flat, **how)(*inputs)
    share(graph)
    return Graph(graph, outputs, num_state, zeroing, low_memory=low_memory)


def _differ(some: Tensor, other: Tensor) -> bool:
    return some.data_ptr() != other.data_ptr() and digest(some) != digest(other)


@dataclass
class Template:
    """Makes the graph of any number of rows from two traces of different numbers of rows: integers in their code
    either agree, or are proportional to the number of rows.

    Attributes:
        multiples: for each node, the positions of arguments that are proportional.
    """

    graph: Graph
    rows: int
    multiples: list[list[int]]

    @staticmethod
    def of(one: tuple[Graph, int], another: tuple[Graph, int]) -> "Template | None":
        """Compares two graphs, each with its number of rows; None: they differ by more than that number."""
        (graph, rows), (other, others) = one, another
        some, more = ([*one.run.graph.nodes] for one in (graph, other))
        if len(some) != len(more):
            return None
        place = dict(zip(more, some, strict=True))

        def same(a: Any, b: Any) -> bool:
            if isinstance(a, fx.Node):
                return isinstance(b, fx.Node) and place[b] is a
            if type(a) is int and type(b) is int:
                return a == b or a * others == b * rows
            return type(a) is type(b) and (a is b or bool(a == b) or (a != a and b != b))

        multiples = []
        for a, b in zip(some, more, strict=True):
            (values, structure), (other_values, other_structure) = _arguments(a), _arguments(b)
            if a.op != b.op or (a.op == "call_function" and a.target != b.target) or structure != other_structure:
                return None
            if not all(map(same, values, other_values)):
                return None
            if a.op == "get_attr" and _differ(getattr(graph.run, str(a.target)), getattr(other.run, str(b.target))):
                return None
            pairs = enumerate(zip(values, other_values, strict=True))
            multiples.append([i for i, (x, y) in pairs if type(x) is int and x != y])
        return Template(graph, rows, multiples)

    def of_rows(self, rows: int) -> Graph:
        """The graph of this number of rows."""
        if rows == self.rows:
            return self.graph
        resized = copy.deepcopy(self.graph.run.graph)
        for node, places in zip(resized.nodes, self.multiples, strict=True):
            if places:
                values, structure = _arguments(node)
                for i in places:
                    values[i] = values[i] // self.rows * rows
                node.args, node.kwargs = tree_unflatten(values, structure)
        return replace(self.graph, run=fx.GraphModule(self.graph.run, resized), compiled=None)


def _arguments(node: fx.Node) -> tuple[list[Any], Any]:
    return tree_flatten((node.args, node.kwargs))


def rows_of(found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """A graph's results for its first `count` rows, without sums."""
    return {name: value[:count] for name, value in found.items() if not name.startswith("sum:")}


def add_sums(found: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Adds a graph's sums to `sums`, in place."""
    new = {name.removeprefix("sum:"): value for name, value in found.items() if name.startswith("sum:")}
    both = [name for name in new if name in sums]
    if both:
        add_each([sums[name] for name in both], [new[name] for name in both])
    sums |= {name: value for name, value in new.items() if name not in both}


def prove(
    run: Callable[[Chunk, Tensor], dict[str, Tensor]], records: Chunk, others: Chunk, zeroing: bool = False
) -> None:
    """Raises NotTraceable unless a row's results are proved to depend on no other row.

    From one random state the pass `run(records, which rows count)` runs on a chunk as it is, and with one row replaced:
    the first, a middle and the last one by a row of `others`, and then by large values, by NaN, and by zeros
    respectively; integers are put out of range unless an operator refuses that. Losses, norms and flags of all other
    rows, and their sums, must be bit-equal; on a GPU, equal up to what two equal runs differ by (`differ`). Sums are
    compared only if all norms are finite or `zeroing`, since they are not used otherwise.
    """
    size = records.size
    if size == 1:
        return
    device = records.tensors[0].device
    rows, state = torch.arange(size, device=device), random_state(device)

    def from_state(some: Chunk, counted: Tensor) -> dict[str, Tensor]:
        set_random_state(device, state)
        return run(some, counted)

    def prove_row(row: int, change: tuple[float, int]) -> None:
        """In a function of its own, after which the sums of its runs, as large as all gradients, are freed."""
        unchanged = rows != row
        before = from_state(records, unchanged)
        again = before if device.type == "cpu" else from_state(records, unchanged)
        for scale, shift in (_UNCHANGED, change):
            try:
                after = from_state(_with_row(records, others, row, scale, shift), unchanged)
            except Exception:
                if not shift:
                    raise
                after = from_state(_with_row(records, others, row, scale, 0), unchanged)
            _refuse_difference(before, after, again, unchanged, zeroing)
            del after

    for row, change in ((0, _LARGE), (size // 2, _NAN), (size - 1, _ZERO)):
        prove_row(row, change)


def _refuse_difference(
    before: dict[str, Tensor], after: dict[str, Tensor], again: dict[str, Tensor], unchanged: Tensor, zeroing: bool
) -> None:
    """Raises NotTraceable if two runs differ in anything but the row that was changed; `again`: `before`, run again."""
    sums_used = zeroing or bool(before["finite"].all() & after["finite"].all())
    for kind in dict.fromkeys(name.partition(":")[0] for name in before):
        names = [name for name in before if name.partition(":")[0] == kind]
        runs = before, after, again
        if kind == "sum":
            values = [[found[name].add_(0) for name in names] for found in runs]  # -0 + 0 = 0
        else:
            values = [[found[name][unchanged] for name in names] for found in runs]
        if (kind != "sum" or sums_used) and differ(*values):
            raise NotTraceable(f"a record's {kind} depends on another record of its batch")


# The factor of the replacing record, and what is added to its integers, which puts indices out of range.
_UNCHANGED, _LARGE, _NAN, _ZERO = (1.0, 0), (1e4, 7), (math.nan, -7), (0.0, 0)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _with_row(records: Chunk, others: Chunk, row: int, scale: float, shift: int) -> Chunk:
    """The records with one row replaced by that of `others`, scaled; its integers are shifted."""
    changed = []
    for a, b in zip(records.tensors, others.tensors, strict=True):
        new, of_row = a.detach().clone(), b.detach()[row]
        if scale == 0:
            new[row] = 0
        elif a.dtype in _INTEGERS:
            new[row] = of_row + shift
        else:
            new[row] = of_row * (scale if a.is_floating_point() or a.is_complex() else 1)
        changed.append(new.requires_grad_(a.requires_grad))
    return records.with_tensors(changed)


_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2  # of a record's gradient, whose parts may cancel; in half precision
_ALONE_TOLERANCE = 5e-2  # of the same: rounding may change the sign of what enters a rectifier


def compare(one: OneRecord, lifted: Lifted, records: Chunk) -> None:
    """Raises NotTraceable: factors do not give the gradients that they are read off, or lifting changes a record's.

    The latter is not compared if the graph draws random numbers: no record by itself repeats those of a chunk's.
    """
    state = [t.detach() for t in one.inputs.tensors()]
    types = (node.meta["val"].dtype for node in one.graph.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    half = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in types)
    tolerance = _HALF_TOLERANCE if half else _TOLERANCE
    with torch.no_grad(), full_precision(state[0].device):
        found, dense = lifted.with_dense(state, records.tensors)
        sizes = sum((_norms(g).square() for g in dense.values()), torch.zeros_like(found.losses, dtype=torch.float64))
        for name, gradient in dense.items():
            factored = found.by_name[name].materialize().reshape(gradient.shape)
            if bool((_norms(factored - gradient) > tolerance * sizes.sqrt()).any()):
                raise NotTraceable(f"the factors of the gradient of {name} do not give it")
        for i in range(0 if one.draws else records.size):
            loss, *gradients = one.graph(*state, *(t[i] for t in records.tensors))
            pairs = [(found.losses[i], loss, loss.double().abs())]
            pairs += [(dense[n][i], g, sizes[i].sqrt()) for n, g in zip(one.used, gradients, strict=False)]
            for mine, its, size in pairs:
                if float((mine.double() - its.double()).norm()) > _ALONE_TOLERANCE * float(size):
                    raise NotTraceable("a record's loss or gradient differs from that of the record by itself")


def _norms(gradients: Tensor) -> Tensor:
    """[B] in float64."""
    return gradients.double().reshape(len(gradients), -1).norm(dim=1)


_MAX_ERROR = 1e-5  # relative, of a compiled graph's sums


def compile_and_compare(
    graph: Graph, inputs: Sequence[Tensor], of: Inputs, device: torch.device, progress: Progress
) -> Graph:
    """The graph compiled; raises NotTraceable if it differs from the uncompiled one, or refuses some records.

    Args:
        inputs: of the graph; the last ones are records.
        of: the parameters and buffers, which are the first ones.
    """
    k = graph.num_state
    _check_refuses_none(graph, inputs[: k + 2], inputs[k + 2 :], device)
    state = random_state(device)
    fast = graph.compile(inputs, device, progress)
    assert fast.compiled
    if not fast.compiled.fits([*of.perturbed(), *inputs[k:]]):
        raise NotTraceable("a parameter's strides are not the usual ones")
    found = []
    for each in (graph, fast):
        set_random_state(device, state)
        found.append(each(inputs, device))
    error, total = 0.0, 0.0  # squared norms
    for name, value in found[0].items():
        if name.startswith("sum:"):
            error += float((value - found[1][name]).double().square().sum())
            total += float(value.double().square().sum())
        elif not torch.allclose(value.double(), found[1][name].double(), rtol=1e-3, atol=1e-6, equal_nan=True):
            raise NotTraceable(f"a record's {name.partition(':')[0]} differs")
    if not error <= (_MAX_ERROR**2) * total:
        raise NotTraceable(f"the sums' relative error is {math.sqrt(error / total) if total else math.inf:.0e}")
    return fast


def _check_refuses_none(
    graph: Graph, others: Sequence[Tensor], records: Sequence[Tensor], device: torch.device
) -> None:
    """Raises NotTraceable: an operator refuses some records, such as those with an index out of range; its compiled
    code may end the process instead, or read another index."""
    for number in (1e30, -1e30, math.nan):
        changed = [leaf.detach().clone() for leaf in records]
        for leaf in changed:
            if leaf.is_floating_point() or leaf.is_complex():
                leaf[0] = number
            elif leaf.dtype != torch.bool:
                limits = torch.iinfo(leaf.dtype)
                leaf[0] = limits.min // 2 if number < 0 else limits.max // 2
        try:
            graph([*others, *changed], device)
        except Exception as error:
            raise NotTraceable("some records raise an error, as with an index out of range") from error
