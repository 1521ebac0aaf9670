"""Compiles a traced pass by PyTorch's inductor.

A compiler may compute a value twice and round it differently: a gradient once for its norm and once for the sum, so
that the norm is too small for what is added. So the pass is cut into stages at the tensors that `computed_once` marks:
the factors of gradients, and which records count. Each stage is compiled separately and reads the marked tensors from
memory. Within a stage norms allow for rounding in any order of summation (`norms`).
"""

import copy
import math
import os
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
    """Marks a tensor as computed once. In a graph that is not compiled, the result is the tensor itself."""
    return x.clone()


@materialise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def computed_once(x: Tensor) -> Tensor:
    """Marks a tensor, made contiguous first if its memory has gaps, as its copy in a trace would be."""
    marked = materialise(x)
    return marked if marked.stride() == x.stride() else materialise(x.contiguous())


Progress = Callable[[int, int], None]
MARK = torch.ops.dpexp.materialise.default
_OPTIONS = {
    "fallback_random": True,  # draws are those of the uncompiled graph
    "emulate_precision_casts": True,  # as is rounding to half precision
}


class Compiled:
    """A graph compiled for inputs of these shapes, strides and dtypes, of which the first `num_state` are parameters
    and buffers. An error says why it cannot be; for example, there is no C++ compiler. `progress(done, stages)` is
    called before each stage."""

    def __init__(self, run: fx.GraphModule, inputs: Sequence[Tensor], num_state: int, progress: Progress) -> None:
        run = fx.GraphModule(run, copy.deepcopy(run.graph))  # with the same constants
        self._constants = _constants_as_inputs(run)
        with no_torch_functions():
            with warnings.catch_warnings(action="ignore"):
                pure = make_fx(torch.func.functionalize(run))(*inputs, *self._constants)
            pure.graph.eliminate_dead_code()
            _check_functions(pure.graph, num_state, len(inputs))
            stages = _stages(pure.graph)
            for node in pure.graph.nodes:
                if node.target is MARK:
                    node.replace_all_uses_with(node.args[0])
                    pure.graph.erase_node(node)
            self._stages = split_module(pure, pure, stages.__getitem__)
            compiler = _StageCompiler(self._stages)
            count = len([*self._stages.children()])
            compiler.before = lambda stage: progress(int(stage.rpartition("_")[2]), count)
            compiler.run(*inputs, *self._constants)
        self._stages.recompile()
        self._layouts = [*map(_layout, inputs)]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs have the layout that was compiled for, without which results are wrong."""
        return [*map(_layout, inputs)] == self._layouts

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self._stages(*inputs, *self._constants)


def _layout(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each operator of a functional graph; each mark on the way to it adds one."""
    stages: dict[fx.Node, int] = {}
    for node in graph.nodes:
        stages[node] = max((stages[of] + (of.target is MARK) for of in node.all_input_nodes), default=0)
    for node in graph.nodes:
        if node.op == "call_function" and not node.all_input_nodes:  # constants such as zeros
            stages[node] = min((stages[user] for user in node.users if user.op != "output"), default=0)
    return stages


def _check_functions(graph: fx.Graph, num_state: int, num_inputs: int) -> None:
    """Raises ValueError: a function of records has vectorized code in which a record changes another's last bits."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    of_records = {*placeholders[num_state:num_inputs]}
    for node in graph.nodes:
        if not of_records.isdisjoint(node.all_input_nodes):
            of_records.add(node)
            name = str(getattr(node.target, "__name__", node.target)).partition(".")[0].removeprefix("_foreach_")
            if name in _NOT_ROW_BY_ROW or name.startswith(("special_", "bessel_")):
                raise ValueError(f"{name} of a record's values would depend on another record's")


def _constants_as_inputs(module: fx.GraphModule) -> list[Tensor]:
    """Turns constants into inputs, since they may be written to and must not enter the compiler's cache."""
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
    """Compiles each stage for the results of the stages before it."""

    before: Callable[[str], object]  # called with each stage's name

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        self.before(target)
        with warnings.catch_warnings(action="ignore"):  # inductor's own
            stage = compile_graph(getattr(self.module, target), [*args], _OPTIONS)
        delattr(self.module, target)
        setattr(self.module, target, stage)
        return stage(*args)


# In compiled code, sin and cos (float32) and tan (float64) were found to change the last bits of a row when another row
# changes. The other functions below were not all tested. exp, log, tanh, erf and functions made of them do not.
_NOT_ROW_BY_ROW = {
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "erfinv",
    "erf_inv", "zeta", "ndtri", "lgamma", "mvlgamma", "digamma", "polygamma", "igamma", "igammac", "i0",
    "hypot", "polar", "angle",
}  # fmt: skip
_MIN_GAIN = 3  # times the duration of compiling
_MAX_PARTS = 8  # into which a usual chunk is divided
_FLOPS_OF_A_CHUNK = {"cpu": 1e7, "cuda": 1e11}  # in addition to its rows: a GPU could do so many during the launches
_FLOPS_OF_A_PARAMETER = 200
_MAX_SAVING = 0.5  # of a round's duration, as estimated beforehand


class CompileDecision:
    """Decides whether a job's graph is compiled.

    Args:
        wanted: None: compile if the rounds to come are expected to save three times the duration of compiling.
        sizes: of samples.

    Attributes:
        sample_size: records of a sample, on average.
        decided: the decision; None: not yet. A resumed job has that of its checkpoint.
        reason: a line that says why.
    """

    def __init__(self, wanted: bool | None, sizes: NormalDist, rounds: int) -> None:
        self.decided = wanted
        self.reason = ""
        self.sample_size, self._rounds = sizes.mean, rounds
        self._sizes = [max(1.0, size) for size in sizes.quantiles(100)] if sizes.stdev else [sizes.mean]
        self._began, self._limit = 0.0, math.inf  # of compiling, in seconds

    def chunks(self, rows: int) -> float:
        """Chunks of a sample, on average."""
        return fmean(math.ceil(size / rows) for size in self._sizes)

    def rows(self, usual: int, flops: float, parameters: int, device: str = "cpu") -> int:
        """Rows of the compiled graph: those with which a sample takes the fewest operations, padding included.

        Args:
            usual: the most.
            flops: floating-point operations of a row. They are counted, not timed, so that runs are reproducible.
            parameters: numbers to which each chunk's sums are added.
            device: its type.
        """
        candidates = sorted({max(2, math.ceil(usual / parts)) for parts in range(1, _MAX_PARTS + 1)}, reverse=True)
        fixed = _FLOPS_OF_A_CHUNK[device] + _FLOPS_OF_A_PARAMETER * parameters
        return min(candidates, key=lambda rows: self.chunks(rows) * (rows * flops + fixed))

    def worth_trying(self, seconds: float, nodes: int, device: torch.device) -> bool:
        """Whether compiling may save time, given the seconds of a round and the number of operators; begins to measure
        how long compiling takes."""
        estimate, limit = 5 + nodes / 50, self._rounds * seconds * _MAX_SAVING / _MIN_GAIN
        self._began, self._device, self._limit = now(device), device, math.inf if self.decided else limit
        if self.decided is None and limit < estimate:
            self.decided = False
        return self.decided is not False

    def progress(self, done: int, stages: int) -> None:
        """Reports how many stages are compiled; raises TimeoutError if compile=auto exceeds its time limit."""
        elapsed = now(self._device) - self._began
        if elapsed > self._limit:
            raise TimeoutError(
                f"{done} of {stages} stages took {elapsed:.0f} s, more than 1/{_MIN_GAIN} of what it may save"
            )
        warnings.warn(f"compiling the step: {done} of {stages} stages after {elapsed:.0f} s.")

    def compare(self, before: float, after: float) -> bool:
        """Whether the compiled graph is used, given the seconds of a round before and after."""
        duration = now(self._device) - self._began
        times = f"a round takes {_ms(after)} instead of {_ms(before)}; compiling took {duration:.0f} s"
        if self.decided is None:
            self.decided = after < before
        self.reason = f"compiled: {times}" if self.decided else f"not compiled, since {times}"
        return self.decided

    def failed(self, why: str) -> None:
        """Decides against compiling, which failed."""
        self.decided, self.reason = False, f"not compiled: {why.rstrip('.')}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def flops(run: Callable[[], object]) -> int:
    """Floating-point operations of products of matrices and vectors, and of convolutions."""
    of_vectors = {torch.ops.aten.mv: lambda matrix, vector, **_: 2 * math.prod(matrix)}
    with FlopCounterMode(display=False, custom_mapping=of_vectors) as counter:
        run()
    return counter.get_total_flops()


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of three calls, or of fewer that take a second: on a CPU per thread."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < 1:
        began = now(device)
        run()
        times.append((now(device) - began) / (torch.get_num_threads() if device.type == "cpu" else 1))
    return min(times)


def now(device: torch.device) -> float:
    """Seconds of which differences are durations: on a CPU the CPU time of the process and of those that it waited for,
    such as compilers, which other jobs of the machine do not lengthen; on a GPU the time by the clock."""
    if device.type == "cpu":
        return time.process_time() + sum(os.times()[2:4])
    torch.cuda.synchronize(device)
    return time.perf_counter()
