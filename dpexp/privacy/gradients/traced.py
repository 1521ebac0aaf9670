"""Traces the pass of a chunk into a graph, and proves that a graph treats each record by itself.

The pass is one pure function: (parameters, buffers, clip norms, which rows count, records, torch's generator) ->
(clipped sums, and for each record its loss, norms and flags). `torch.fx`'s make_fx traces it under vmap on synthetic
records. A graph does the same in every round and runs no Python of the user's, so a record's contribution depends on
that record, the weights and fresh randomness alone if no row affects another. `prove` shows that for each graph.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from dpexp._torch_compat import (
    CHECKS_ERRORS,
    OpOverload,
    TorchDispatchMode,
    arguments_of,
    own_tensors,
    proxy_tensor,
    quick_tracing,
    storage_of,
    tree_leaves,
)
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.graph import Graph
from dpexp.privacy.sampling.policies import Policy
from dpexp.privacy.state_checks import digest

_ALLOWED = ("aten", "prims", "dpexp")  # namespaces of operators
_OVERWRITING = {
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_",
}  # fmt: skip


class NotTraceable(Exception):
    """The step cannot be traced and proved. The message says why."""


class MixesRecords(NotTraceable):
    """Under vmap, one record affects another."""


@dataclass
class Inputs:
    """The module's parameters and buffers, looked up by name each time, since a hook may replace a tensor."""

    module: nn.Module

    def __post_init__(self) -> None:
        places: dict[int, tuple[dict, str, str]] = {}
        for prefix, layer in self.module.named_modules():
            for owner in own_tensors(layer):
                for key, tensor in owner.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), (owner, key, f"{prefix}.{key}" if prefix else key))
        self._places = [*places.values()]

    def tensors(self) -> list[Tensor]:
        return [owner[key] for owner, key, _ in self._places]

    def perturbed(self) -> list[Tensor]:
        """The same, with noise on trainable parameters, so that no parameter is exactly zero."""
        generator = torch.Generator().manual_seed(0)
        tensors = self.tensors()
        return [
            t + (1e-3 * (1 + t.detach().abs()) * torch.randn(t.shape, generator=generator).to(t)).to(t)
            if isinstance(t, nn.Parameter) and t.requires_grad and t.is_floating_point()
            else t
            for t in tensors
        ]

    def input_specs(self) -> list[tuple]:
        """(shape, dtype, device) of each, on which a graph relies."""
        return [(t.shape, t.dtype, t.device) for t in self.tensors()]

    def names(self) -> list[str]:
        return [name for *_, name in self._places]


def trace(run: Callable[..., dict[str, Tensor]], inputs: Inputs, others: Sequence[Tensor]) -> Graph:
    """Traces `run(*others)`, which reads the module's parameters and buffers; an error says what cannot be traced."""
    state, input_specs = inputs.tensors(), inputs.input_specs()  # before the step replaces a buffer by a larger one
    outputs: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found = run(*tensors[len(state) :])
        outputs[:] = found
        return [*found.values()]

    with quick_tracing(), _NoWrites(others):
        graph = proxy_tensor.make_fx(flat)(*state, *others)
    written = _check_writes(graph)
    _check_errors(graph)
    _simplify(graph.graph, written)
    _initialise(graph.graph)
    graph.graph.eliminate_dead_code()
    _check_operators(graph, input_specs)
    return Graph(graph, outputs, input_specs)


class _NoWrites(TorchDispatchMode):
    """Raises NotTraceable if an operator writes to a tensor that existed before, other than these."""

    def __init__(self, writable: Sequence[Tensor]) -> None:
        super().__init__()
        self._made = {storage_of(tensor) for tensor in writable}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {storage_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for position, argument in enumerate(arguments_of(func)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor) and storage_of(tensor) not in self._made:
                        raise NotTraceable(
                            f"it writes to a tensor {list(tensor.shape)}, which it did not make ({func})"
                        )
        result = func(*args, **kwargs)
        made = {storage_of(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}
        self._made |= made if func is torch.ops.aten.lift_fresh.default else made - read
        return result


def _simplify(graph: fx.Graph, written: set[fx.Node]) -> None:
    """Drops detach, drops copies of inputs that are not written to, and merges equal scalars."""
    scalars: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default or (
            node.target is torch.ops.aten.clone.default
            and node.args[0].op == "placeholder"
            and not node.kwargs
            and node not in written
        ):
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.ops.aten.scalar_tensor.default and node not in written:
            same = scalars.setdefault(f"{node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)


def _initialise(graph: fx.Graph) -> None:
    """Zeroes memory that the next operator does not overwrite, since it may hold another record."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    filled = False
    for node in order:
        if node.op != "call_function" or not _name(node.target).removeprefix("new_").startswith("empty"):
            continue
        first = min(node.users, key=order.__getitem__, default=None)
        if first is not None and not (_name(first.target) in _OVERWRITING and first.args[0] is node):
            with graph.inserting_after(node):
                zeros = graph.call_function(torch.ops.aten.zero.default, (node,))
            node.replace_all_uses_with(zeros, lambda use, zeros=zeros: use is not zeros)
            filled = True
    if filled:
        graph.lint()


def _name(target: Any) -> str:
    return str(getattr(getattr(target, "overloadpacket", None), "__name__", ""))


def _check_operators(graph: fx.GraphModule, input_specs: Sequence[tuple]) -> None:
    """Raises NotTraceable: an operator may keep state or communicate with other processes, or the number of entries
    that it returns may change with the weights."""
    of_weights: set[fx.Node] = set()
    for node, spec in itertools.zip_longest(graph.graph.nodes, input_specs):
        if spec is not None and spec[1].is_floating_point:
            of_weights.add(node)
        elif not of_weights.isdisjoint(node.all_input_nodes):
            of_weights.add(node)
            if node.target is torch.ops.aten.index.Tensor:
                selects = any(_is_mask(one) for one in node.args[1] if one in of_weights)
            else:
                selects = _name(node.target) in _OF_ANY_SIZE
            if selects:
                raise NotTraceable(f"how many entries {node.target} returns may change with the weights")
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        namespace = getattr(node.target, "namespace", None)
        if node.op != "call_function" or (
            namespace not in _ALLOWED and getattr(node.target, "__module__", "") != "_operator"
        ):
            raise NotTraceable(f"it calls {node.target}, which is not one of PyTorch's operators")
        if any(isinstance(value, torch.Generator) for value in (*node.args, *node.kwargs.values())):
            raise NotTraceable("it draws from a generator of its own")


def _is_mask(node: fx.Node) -> bool:
    """Whether a node is a boolean tensor: a comparison, or a view or combination of some."""
    name = _name(node.target)
    if name in _COMPARISONS or node.kwargs.get("dtype") == torch.bool:
        return True
    return name in _OF_MASKS and any(map(_is_mask, node.all_input_nodes))


_OF_ANY_SIZE = {
    "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
    "repeat_interleave", "bincount",
}  # fmt: skip
_COMPARISONS = {
    "gt", "lt", "ge", "le", "eq", "ne", "logical_not", "logical_and", "logical_or", "logical_xor", "isnan", "isinf",
    "isfinite", "signbit",
}  # fmt: skip
_OF_MASKS = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "view", "_unsafe_view", "reshape", "expand", "slice",
    "select", "unsqueeze", "squeeze", "permute", "transpose", "t", "alias", "detach", "clone", "cat", "where",
}  # fmt: skip


def _check_errors(graph: fx.GraphModule) -> None:
    """Raises NotTraceable: an operator raises an error for some records, which dead-code elimination would drop."""
    for node in graph.graph.nodes:
        if node.target is CHECKS_ERRORS:
            raise NotTraceable(
                f"{node.args[1]} raises an error for some records; {node.args[1]}_ex, if it exists, does not"
            )


def _check_writes(graph: fx.GraphModule) -> set[fx.Node]:
    """The tensors that are written to, through views; raises NotTraceable if the graph did not make one."""
    origin: dict[fx.Node, fx.Node] = {}
    written = set()
    for node in graph.graph.nodes:
        origin[node] = node
        if node.op != "call_function":
            continue
        arguments = arguments_of(node.target)
        if not arguments and not isinstance(node.target, OpOverload):  # getitem
            if node.args and isinstance(node.args[0], fx.Node):
                origin[node] = origin[node.args[0]]
            continue
        for position, argument in enumerate(arguments):
            if argument.alias_info is None:
                continue
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if not isinstance(tensor, fx.Node):
                    continue
                origin[node] = origin[tensor]
                if not argument.alias_info.is_write:
                    continue
                written.add(origin[tensor])
                if origin[tensor].op in ("placeholder", "get_attr"):
                    raise NotTraceable(f"it writes to {origin[tensor].target}, which it did not make ({node.target})")
    return written


def prove(
    run: Callable[[Chunk, Tensor], dict[str, Tensor]], records: Chunk, others: Chunk, zeroing: bool = False
) -> None:
    """Raises MixesRecords unless a row's results are proved to depend on no other row.

    From one random state the pass `run(records, which rows count)` runs on a chunk as it is, and with one row replaced:
    the first, a middle and the last one by a row of `others`, and then by large values, by NaN, and by zeros
    respectively; integers are put out of range unless an operator refuses that. Losses, norms and flags of all other
    rows, and their sums, must be bit-equal. Sums are compared only if all norms are finite or `zeroing`, since they are
    not used otherwise.
    """
    size = records.size
    if size == 1:
        return
    rows = torch.arange(size, device=records.tensors[0].device)
    for row, change in ((0, _LARGE), (size // 2, _NAN), (size - 1, _ZERO)):
        unchanged = rows != row
        before = run(records, unchanged)
        for scale, shift in (_UNCHANGED, change):
            try:
                after = run(_with_row(records, others, row, scale, shift), unchanged)
            except Exception:
                if not shift:
                    raise
                after = run(_with_row(records, others, row, scale, 0), unchanged)
            sums_used = zeroing or bool(before["finite"].all() & after["finite"].all())
            for name, value in before.items():
                if not name.startswith("sum:"):
                    same = digest(value[unchanged]) == digest(after[name][unchanged])
                else:
                    same = not sums_used or digest(value + 0) == digest(after[name] + 0)  # -0 + 0 = 0
                if not same:
                    raise MixesRecords(f"a record's {name.partition(':')[0]} depends on another record of its batch")


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


def usual_rows(policy: Policy, n: int, limit: int | None = None) -> int:
    """Rows of a usual chunk: two standard deviations above a sample's mean size, within a limit."""
    mean, std = size_of_samples(policy, n)
    rows = max(1, math.ceil(mean + 2 * std - 1e-6))
    return rows if limit is None else min(rows, limit)


def size_of_samples(policy: Policy, n: int) -> tuple[float, float]:
    """Mean and standard deviation of a sample's size."""
    mean = policy.q * n
    return mean, 0 if policy.name in ("fixed_size", "shuffle") else math.sqrt(mean * (1 - policy.q))


def rows_of_graph(count: int, usual: int) -> int:
    """Rows of the graph for `count` records: the usual number plus or minus a multiple of its ninth, rounded up."""
    step = max(1, round(usual / 9))
    return usual + math.ceil((count - usual) / step) * step
