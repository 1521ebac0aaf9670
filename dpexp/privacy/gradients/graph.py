"""A traced pass, and how one of any number of rows is made of two."""

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
from dpexp.privacy.checks import digest
from dpexp.privacy.gradients.compiled import MARK, Compiled
from dpexp.privacy.gradients.norms import full_precision

_TYPED_IN = 64  # numbers of a tensor, at most, to count as made of what stands in the code


@dataclass
class Graph:
    """A traced pass for a number of rows.

    Attributes:
        outputs: the names of what it returns, in order.
        compiled: what runs in its place, for inputs that it fits.
    """

    run: fx.GraphModule
    outputs: list[str]
    input_specs: list[tuple]
    zeroing: bool = False  # gradients of rows that are not finite are set to zero
    compiled: Compiled | None = None

    @cached_property
    def _code(self) -> fx.graph.PythonCode:
        return self.run.graph.python_code("self")

    @cached_property
    def _run(self) -> Callable[..., list[Tensor]]:
        """Its code, in which operators are called without looking their names up."""
        names = dict(self._code.globals)

        def named(found: re.Match) -> str:
            name = "_".join(found.groups())
            operator: Any = reduce(getattr, found.groups(), torch.ops)
            names[name] = _itself if operator is MARK else operator_function(operator)
            return name

        exec(re.sub(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", named, self._code.src), names)
        return partial(names["forward"], self.run)

    def __call__(self, inputs: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        run = self.compiled if self.compiled and self.compiled.fits(inputs) else self._run
        with torch.no_grad(), full_precision(device):
            return dict(zip(self.outputs, run(*inputs), strict=True))

    def compile(self, inputs: Sequence[Tensor], device: torch.device) -> "Graph":
        with torch.no_grad(), full_precision(device):
            return replace(self, compiled=Compiled(self.run, inputs, len(self.input_specs)))

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        tags = (getattr(node.target, "tags", ()) for node in self.run.graph.nodes)
        return any(torch.Tag.nondeterministic_seeded in some for some in tags)

    @property
    def text(self) -> str:
        """Equal for graphs that do the same."""
        return self._code.src

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the graph holds."""
        names = [str(node.target) for node in self.run.graph.nodes if node.op == "get_attr"]
        held = {name: getattr(self.run, name) for name in names}
        return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}

    @cached_property
    def typed_in(self) -> set[str]:
        """Those that code makes anew from a few numbers, as torch.tensor([0.5, 2.0]) does."""
        lifted = [node.args[0] for node in self.run.graph.nodes if "lift_fresh" in str(node.target)]
        names = {str(node.target) for node in lifted if isinstance(node, fx.Node)}
        return {name for name in names if name in self.constants and self.constants[name].numel() <= _TYPED_IN}


def _itself(marked: Tensor) -> Tensor:
    return marked


def differs(some: Graph, other: Graph) -> str | None:
    """What two graphs differ in: a line of code, or a constant; None: nothing."""
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
    """The graph of any number of rows, made of two that were traced for numbers of which one is larger by 1: whole
    numbers in the code that differ are multiples of the number of rows.

    Attributes:
        multiples: of each node, which of its arguments.
    """

    graph: Graph
    rows: int
    multiples: list[list[int]]

    @staticmethod
    def of(graph: Graph, rows: int, other: Graph, others: int) -> "Template | None":
        """None: the graphs differ in more than their number of rows."""
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
            (given, form), (others_given, other_form) = _arguments(a), _arguments(b)
            if a.op != b.op or (a.op == "call_function" and a.target != b.target) or form != other_form:
                return None
            if not all(map(same, given, others_given)):
                return None
            if a.op == "get_attr" and _differ(getattr(graph.run, str(a.target)), getattr(other.run, str(b.target))):
                return None
            pairs = enumerate(zip(given, others_given, strict=True))
            multiples.append([i for i, (x, y) in pairs if type(x) is int and x != y])
        return Template(graph, rows, multiples)

    def of_rows(self, rows: int) -> Graph:
        """The graph of so many rows."""
        if rows == self.rows:
            return self.graph
        resized = copy.deepcopy(self.graph.run.graph)
        for node, places in zip(resized.nodes, self.multiples, strict=True):
            if places:
                given, form = _arguments(node)
                for i in places:
                    given[i] = given[i] // self.rows * rows
                node.args, node.kwargs = tree_unflatten(given, form)
        return replace(self.graph, run=fx.GraphModule(self.graph.run, resized), compiled=None)


def _arguments(node: fx.Node) -> tuple[list[Any], Any]:
    return tree_flatten((node.args, node.kwargs))


def rows_of(found: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """What a graph gives of its first rows."""
    return {name: value[:count] for name, value in found.items() if not name.startswith("sum:")}


def add_sums(found: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Adds what a graph sums up to `sums`, in place."""
    for name, value in found.items():
        if name.startswith("sum:"):
            name = name.removeprefix("sum:")
            sums[name] = sums[name].add_(value) if name in sums else value
