"""A traced chunk, and the template that makes graphs of any number of rows from two traces."""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, fx

from dpexp._torch_compat import operator_function, proxy_tensor, quick_tracing, tree_flatten, tree_unflatten
from dpexp.privacy.gradients.compiled import MARK, Compiled, Progress
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_record import Inputs
from dpexp.privacy.state_checks import digest


@dataclass
class Graph:
    """The traced pass of a chunk, for a fixed number of rows.

    Attributes:
        outputs: the names of its results, in order.
        state: the parameters and buffers that are its first inputs.
        zeroing: gradients of rows that are not finite are set to zero.
        compiled: runs instead, for inputs whose memory layout fits.
    """

    run: fx.GraphModule
    outputs: list[str]
    state: Inputs
    zeroing: bool = False
    compiled: Compiled | None = None

    @cached_property
    def _code(self) -> fx.graph.PythonCode:
        return self.run.graph.python_code("self")

    @cached_property
    def _run(self) -> Callable[..., list[Tensor]]:
        """Its code, with operators bound to local names, which saves a lookup per call."""
        names = dict(self._code.globals)

        def bind(match: re.Match) -> str:
            name = "_".join(match.groups())
            operator: Any = reduce(getattr, match.groups(), torch.ops)
            names[name] = (lambda marked: marked) if operator is MARK else operator_function(operator)
            return name

        exec(re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", bind, self._code.src), names)
        return partial(names["forward"], self.run)

    def __call__(self, inputs: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        run = self.compiled if self.compiled and self.compiled.fits(inputs) else self._run
        with torch.no_grad(), full_precision(device):
            return dict(zip(self.outputs, run(*inputs), strict=True))

    def compile(self, inputs: Sequence[Tensor], device: torch.device, *progress: Progress) -> "Graph":
        with torch.no_grad(), full_precision(device):
            return replace(self, compiled=Compiled(self.run, inputs, len(self.state.names()), *progress))


def trace(run: Callable[..., dict[str, Tensor]], inputs: Sequence[Tensor], of: Inputs, zeroing: bool) -> Graph:
    """Traces `run(*inputs)`, a function of operators alone; the first inputs are the parameters and buffers `of`."""
    outputs: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found = run(*tensors)
        outputs[:] = found
        return [*found.values()]

    with quick_tracing():
        graph = proxy_tensor.make_fx(flat)(*inputs)
    scalars: dict[str, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.ops.aten.scalar_tensor.default:
            same = scalars.setdefault(f"{node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()
    return Graph(graph, outputs, of, zeroing)


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
    def of(graph: Graph, rows: int, other: Graph, others: int) -> "Template | None":
        """From two graphs of `rows` and `others` rows; None: they differ in other ways, too."""
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
    for name, value in found.items():
        if name.startswith("sum:"):
            name = name.removeprefix("sum:")
            sums[name] = sums[name].add_(value) if name in sums else value
