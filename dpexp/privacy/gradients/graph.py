"""A traced pass, and the template that makes graphs of any number of rows from two traces."""

import copy
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any

import torch
from torch import Tensor, fx

from dpexp._torch_compat import operator_function, tree_flatten, tree_unflatten
from dpexp.privacy.gradients.compiled import MARK, Compiled, Progress
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.state_checks import digest

_MAX_LITERAL = 64  # entries of a constant that counts as a literal in the code


@dataclass
class Graph:
    """A traced pass for a fixed number of rows.

    Attributes:
        outputs: the names of its results, in order.
        input_specs: (shape, dtype, device) of each parameter and buffer.
        zeroing: gradients of rows that are not finite are set to zero.
        compiled: runs instead, for inputs whose memory layout fits.
    """

    run: fx.GraphModule
    outputs: list[str]
    input_specs: list[tuple]
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
            return replace(self, compiled=Compiled(self.run, inputs, len(self.input_specs), *progress))

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        tags = (getattr(node.target, "tags", ()) for node in self.run.graph.nodes)
        return any(torch.Tag.nondeterministic_seeded in some for some in tags)

    @property
    def text(self) -> str:
        """Its code; equal code with equal constants computes the same."""
        return self._code.src

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the graph holds."""
        names = [str(node.target) for node in self.run.graph.nodes if node.op == "get_attr"]
        values = {name: getattr(self.run, name) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @cached_property
    def literals(self) -> set[str]:
        """Names of the constants that are literals in the code, as in torch.tensor([0.5, 2.0])."""
        lifted = [node.args[0] for node in self.run.graph.nodes if "lift_fresh" in str(node.target)]
        names = {str(node.target) for node in lifted if isinstance(node, fx.Node)}
        return {name for name in names if name in self.constants and self.constants[name].numel() <= _MAX_LITERAL}


def difference(some: Graph, other: Graph) -> str | None:
    """The first line of code or constant in which two graphs differ; None: they are equal."""
    if some.text != other.text:
        lines = zip(some.text.splitlines(), other.text.splitlines(), strict=False)
        return next((b.strip()[:150] for a, b in lines if a != b), "its length")
    for (name, a), b in zip(some.constants.items(), other.constants.values(), strict=True):
        if _differ(a, b):
            return f"the tensor {name} {tuple(a.shape)}"
    return None


def _differ(some: Tensor, other: Tensor) -> bool:
    return some.data_ptr() != other.data_ptr() and digest(some) != digest(other)


@dataclass
class Template:
    """Makes the graph of any number of rows from two traces whose numbers of rows differ by 1: integers in their code
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
