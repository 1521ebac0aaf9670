"""Compiles a traced pass by PyTorch's inductor.

A compiler may compute a number twice and round it differently each time: a gradient once for its norm and once for the
sum, so that the norm is too small for what is added. Therefore the pass is cut into stages at the tensors that
`computed_once` marks: the factors of gradients, and which records count. Each stage is compiled by itself, and reads
what an earlier one wrote to memory. Within a stage norms allow for rounding in any order of summation (`rounding`).
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.utils.flop_counter import FlopCounterMode

from dpexp._torch_compat import compile_graph, no_torch_functions


@torch.library.custom_op("dpexp::materialise", mutates_args=())
def materialise(x: Tensor) -> Tensor:
    """Marks a tensor as one that is computed once. Where a graph is not compiled, it is the tensor itself."""
    return x.clone()


@materialise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def computed_once(x: Tensor) -> Tensor:
    """Marks a tensor; one with gaps between its numbers is made contiguous first, as its copy in a trace would be."""
    marked = materialise(x)
    return marked if marked.stride() == x.stride() else materialise(x.contiguous())


MARK = torch.ops.dpexp.materialise.default
_OPTIONS = {
    "fallback_random": True,  # numbers are drawn as they are without compiling
    "emulate_precision_casts": True,  # half precision is rounded to as it is without
}


class Compiled:
    """A graph, compiled for inputs of these shapes, strides and types.

    Args:
        held: how many of the inputs are parameters and buffers, which come first.

    Raises:
        Exception: it cannot be, as where there is no compiler.
    """

    def __init__(self, run: fx.GraphModule, inputs: Sequence[Tensor], held: int) -> None:
        run = fx.GraphModule(run, copy.deepcopy(run.graph))  # with the same constants
        self._constants = _constants_as_inputs(run)
        with no_torch_functions(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what inductor does
            pure = make_fx(torch.func.functionalize(run))(*inputs, *self._constants)
            pure.graph.eliminate_dead_code()
            _check_functions(pure.graph, held, len(inputs))
            stages = _stages(pure.graph)
            for node in pure.graph.nodes:
                if node.target is MARK:
                    node.replace_all_uses_with(node.args[0])
                    pure.graph.erase_node(node)
            self._stages = split_module(pure, pure, stages.__getitem__)
            _StageCompiler(self._stages).run(*inputs, *self._constants)
        self._stages.recompile()
        self._layouts = [*map(_layout, inputs)]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs are laid out as those were, without which what comes out is nonsense."""
        return [*map(_layout, inputs)] == self._layouts

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self._stages(*inputs, *self._constants)


def _layout(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each operator of a graph without writes: a mark and what is computed from it are one further."""
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        stages[node] = max((stages[of] + (of.target is MARK) for of in node.all_input_nodes), default=0)
    for node in graph.nodes:
        if node.op == "call_function" and not node.all_input_nodes:  # such as zeros
            stages[node] = min((stages[user] for user in node.users if user.op != "output"), default=0)
    return stages


def _check_functions(graph: fx.Graph, held: int, inputs: int) -> None:
    """Raises ValueError: a function of records is compiled in such a way that one record changes the last bits of
    another, as a sine is where one argument is large."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    of_records = {*given[held:inputs]}
    for node in graph.nodes:
        if not of_records.isdisjoint(node.all_input_nodes):
            of_records.add(node)
            name = str(getattr(node.target, "__name__", node.target)).partition(".")[0].removeprefix("_foreach_")
            if name in _NOT_ROW_BY_ROW or name.startswith(("special_", "bessel_")):
                raise ValueError(f"{name} of a record's numbers would depend on another record's")


def _constants_as_inputs(module: fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the constants, which may be written to, and must not enter the compiler's cache."""
    *_, last = (node for node in module.graph.nodes if node.op == "placeholder")
    constants = []
    for node in [*module.graph.nodes]:
        if node.op == "get_attr":
            constants.append(getattr(module, str(node.target)))
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(f"constant_{len(constants)}")
            node.replace_all_uses_with(last)
            module.graph.erase_node(node)
    module.recompile()
    return constants


class _StageCompiler(fx.Interpreter):
    """Compiles each stage for what the stages before it give."""

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        stage = compile_graph(getattr(self.module, target), [*args], _OPTIONS)
        delattr(self.module, target)
        setattr(self.module, target, stage)
        return stage(*args)


# Compiled, sin and cos (float32) and tan (float64) were found to change the last bits of one row with another row. The
# others were not all tried. exp, log, tanh, erf and what is made of them were, and do not.
_NOT_ROW_BY_ROW = {
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "erfinv",
    "erf_inv", "zeta", "ndtri", "lgamma", "mvlgamma", "digamma", "polygamma", "igamma", "igammac", "i0",
    "hypot", "polar", "angle",
}  # fmt: skip
_WORTH = 3  # times what compiling takes, for it to pay
_SAVED = 0.5  # of a round, at most, as is guessed before
_FIXED, _PER_PARAMETER = 1e7, 200  # of a chunk beyond its rows, in floating-point operations that take as long
_PARTS = 8  # of a sample, at most


class CompileDecision:
    """Decides whether a job's graph is compiled, and for how many rows.

    Args:
        wanted: None: where the rounds to come save at least three times what compiling takes.
        mean, spread: of a sample's size; rounds: of the job.

    Attributes:
        decided: whether it is; None: not yet. A resumed job begins with what the checkpoint says.
        reason: why, in a line.
    """

    def __init__(self, wanted: bool | None, mean: float, spread: float, rounds: int) -> None:
        self.decided = wanted
        self.reason = ""
        self._rounds = rounds
        self._sizes = [max(1.0, mean + spread * z) for z in NormalDist().quantiles(100)] if spread else [mean]

    def rows(self, usual: int, flops: float, parameters: int) -> int:
        """The rows of a chunk for which a sample takes the least work, padding included.

        Args:
            flops: of a usual chunk.
        """
        fixed = _FIXED + _PER_PARAMETER * parameters
        candidates = {max(2, math.ceil(usual / k)) for k in range(1, _PARTS + 1)}
        return min(
            sorted(candidates, reverse=True), key=lambda rows: self.chunks(rows) * (rows * flops / usual + fixed)
        )

    def chunks(self, rows: int) -> float:
        """The mean number of chunks in a sample."""
        return fmean(math.ceil(size / rows) for size in self._sizes)

    def worth_trying(self, seconds: float, nodes: int) -> bool:
        """Whether compiling may pay, judged by the seconds of a round and the number of operators."""
        guessed = 5 + nodes / 50
        if self.decided is None and self._rounds * seconds * _SAVED < _WORTH * guessed:
            self.decided = False
            self.reason = (
                f"not compiled, since {self._rounds} rounds of {_ms(seconds)} would not save {_WORTH} times the "
                f"{guessed:.0f} s that compiling may take; trainer.compile=true compiles all the same"
            )
        return self.decided is not False

    def compare(self, rows: int, before: float, after: float, took: float) -> bool:
        """Whether the compiled graph is used, given the seconds of a round before and after, and of compiling."""
        said = (
            f"a round takes {_ms(after)} in place of {_ms(before)} in chunks of {rows} records; this took {took:.0f} s"
        )
        if self.decided is None:
            self.decided = after < before
        self.reason = f"compiled: {said}" if self.decided else f"not compiled, since {said}"
        return self.decided

    def failed(self, why: str) -> None:
        self.decided, self.reason = False, f"not compiled: {why.rstrip('.')}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The least wall-clock time of three calls."""
    times = []
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops_of(run: Callable[[], object]) -> int:
    """Floating-point operations of products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
