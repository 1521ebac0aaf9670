"""The pass of a chunk, traced once into a graph; the rounds run the graph, and no Python of the user's.

The pass is one pure function: (parameters, buffers, records, which rows count, the plan's numbers, torch's generator)
-> (clipped sums, and for each record its loss, norms and flags). `torch.fx`'s make_fx traces it under vmap on made-up
records. A graph does the same in every round, so that a record's contribution depends on that record, the weights and
fresh randomness alone; what is left to show is that it treats each record by itself, and `prove` shows it for each
graph.
"""

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
    proxy_tensor,
    quick_tracing,
    storage_of,
    tensors_held,
    tree_leaves,
)
from dpexp.privacy.checks import digest
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.graph import Graph
from dpexp.privacy.sampling.policies import Policy
from dpexp.privacy.sampling.training_data import Memory

_ALLOWED = ("aten", "prims", "dpexp")  # namespaces of operators
_OVERWRITING = {
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_",
}  # fmt: skip


class NotTraceable(Exception):
    """A step cannot be a graph that is proved. The message says why."""


class Mixes(NotTraceable):
    """Under vmap, one record changes what comes of another."""


@dataclass
class Inputs:
    """What the pass reads besides the records, by name each time: a hook may have put another tensor in a place."""

    module: nn.Module

    def __post_init__(self) -> None:
        places: dict[int, tuple[dict, str, str]] = {}
        for prefix, layer in self.module.named_modules():
            for held in tensors_held(layer):
                for key, tensor in held.items():
                    if tensor is not None:
                        places.setdefault(id(tensor), (held, key, f"{prefix}.{key}" if prefix else key))
        self._places = [*places.values()]

    def tensors(self) -> list[Tensor]:
        return [held[key] for held, key, _ in self._places]

    def moved(self) -> list[Tensor]:
        """The same, with trainable parameters a little elsewhere, where nothing is multiplied by zero."""
        generator = torch.Generator().manual_seed(0)
        tensors = self.tensors()
        return [
            t + (1e-3 * (1 + t.detach().abs()) * torch.randn(t.shape, generator=generator).to(t)).to(t)
            if isinstance(t, nn.Parameter) and t.requires_grad and t.is_floating_point()
            else t
            for t in tensors
        ]

    def forms(self) -> list[tuple]:
        """Of what shape and type they are, which a graph relies on."""
        return [(t.shape, t.dtype, t.device) for t in self.tensors()]

    def names(self) -> list[str]:
        return [name for *_, name in self._places]


def trace(run: Callable[..., dict[str, Tensor]], inputs: Inputs, others: Sequence[Tensor]) -> Graph:
    """Traces `run(*others)`, which reads the module's parameters and buffers.

    Raises:
        Exception: whatever stands in the way.
    """
    held, forms = inputs.tensors(), inputs.forms()  # before the step replaces a buffer by a larger one
    outputs: list[str] = []

    def flat(*given: Tensor) -> list[Tensor]:
        found = run(*given[len(held) :])
        outputs[:] = found
        return [*found.values()]

    with quick_tracing(), _NoWrites(others):
        graph = proxy_tensor.make_fx(flat)(*held, *others)
    written = _check_writes(graph)
    _check_errors(graph)
    _simplify(graph.graph, written)
    _initialise(graph.graph)
    graph.graph.eliminate_dead_code()
    _check_operators(graph)
    return Graph(graph, outputs, forms)


class _NoWrites(TorchDispatchMode):
    """Refuses operators that write to a tensor which was there before, but for some.

    Raises:
        NotTraceable: an operator does.
    """

    def __init__(self, own: Sequence[Tensor]) -> None:
        super().__init__()
        self._made = {storage_of(tensor) for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for position, argument in enumerate(arguments_of(func)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, Tensor) and storage_of(tensor) not in self._made:
                        raise NotTraceable(
                            f"it writes to a tensor {list(tensor.shape)}, which it did not make ({func})"
                        )
        found = func(*args, **kwargs)
        made = {storage_of(tensor) for tensor in tree_leaves(found) if isinstance(tensor, Tensor)}
        self._made |= made if func is torch.ops.aten.lift_fresh.default else made - given
        return found


def _simplify(graph: fx.Graph, written: set[fx.Node]) -> None:
    """Drops what does nothing where no gradient is recorded, copies of records that are not written to, and makes each
    number once."""
    numbers: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach.default or (
            node.target is torch.ops.aten.clone.default
            and node.args[0].op == "placeholder"
            and not node.kwargs
            and node not in written
        ):
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.ops.aten.scalar_tensor.default and node not in written:
            same = numbers.setdefault(f"{node.args} {node.kwargs}", node)
            if same is not node:
                node.replace_all_uses_with(same)


def _initialise(graph: fx.Graph) -> None:
    """Sets memory to zero that is not overwritten at once, as where an operator's own code writes to it unseen: it
    could hold another record."""
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


def _check_operators(graph: fx.GraphModule) -> None:
    """Raises NotTraceable: it calls what may keep state or see other processes."""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        namespace = getattr(node.target, "namespace", None)
        if node.op != "call_function" or (
            namespace not in _ALLOWED and getattr(node.target, "__module__", "") != "_operator"
        ):
            raise NotTraceable(f"it calls {node.target}, which is no operator of PyTorch's own")
        if any(isinstance(value, torch.Generator) for value in (*node.args, *node.kwargs.values())):
            raise NotTraceable("it draws from a generator of its own")


def _check_errors(graph: fx.GraphModule) -> None:
    """Raises NotTraceable: it raises an error for some records, which would be dropped with whatever has no result."""
    for node in graph.graph.nodes:
        if node.target is CHECKS_ERRORS:
            raise NotTraceable(
                f"{node.args[1]} has an error for some records; {node.args[1]}_ex, if there is one, has none"
            )


def _check_writes(graph: fx.GraphModule) -> set[fx.Node]:
    """Follows each write, through views, to what it writes to: tensors that the graph made."""
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
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else [given]:
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
    """Shows that what a pass makes of a row depends on no other row.

    From one random state it is run on a chunk as it is, and with a row replaced: the first, a middle and the last one
    by a made-up one, then one each by large numbers, NaN, and zeros, of which whole numbers are out of range unless an
    operator refuses them. The losses, norms and flags of all other rows must be the same to the last bit, and so must
    be their sums. Sums are not used where a norm is not finite, unless its row is zeroed.

    Args:
        run: (records, which rows are counted [B]) -> outputs, always from the same random state.
        records, others: made up.

    Raises:
        Mixes: it is not so.
    """
    size = records.size
    if size == 1:
        return
    rows = torch.arange(size, device=records.tensors[0].device)
    for row, change in ((0, _LARGE), (size // 2, _NOT_A_NUMBER), (size - 1, _ZERO)):
        kept = rows != row
        before = run(records, kept)
        for scale, shift in (_AS_IT_IS, change):
            try:
                after = run(_with_row(records, others, row, scale, shift), kept)
            except Exception:
                if not shift:
                    raise
                after = run(_with_row(records, others, row, scale, 0), kept)
            sums_used = zeroing or bool(before["finite"].all() & after["finite"].all())
            for name, value in before.items():
                if not name.startswith("sum:"):
                    same = digest(value[kept]) == digest(after[name][kept])
                else:
                    same = not sums_used or digest(value + 0) == digest(after[name] + 0)  # -0 + 0 = 0
                if not same:
                    raise Mixes(f"a record's {name.partition(':')[0]} depends on another record of its batch")


# What a made-up record is multiplied by, and what is added to its whole numbers, which puts indices out of range.
_AS_IT_IS, _LARGE, _NOT_A_NUMBER, _ZERO = (1.0, 0), (1e4, 7), (math.nan, -7), (0.0, 0)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _with_row(records: Chunk, others: Chunk, row: int, scale: float, shift: int) -> Chunk:
    """The records, of which one is another's, changed."""
    changed = []
    for a, b in zip(records.tensors, others.tensors, strict=True):
        new, of_row = a.detach().clone(), b.detach()[row]
        if scale == 0:
            new[row] = 0
        elif a.dtype in _WHOLE:
            new[row] = of_row + shift
        else:
            new[row] = of_row * (scale if a.is_floating_point() or a.is_complex() else 1)
        changed.append(new.requires_grad_(a.requires_grad))
    return records.having(changed)


def usual_rows(policy: Policy, n: int, most: int | None = None) -> int:
    """The rows of a usual chunk: those of a sample, of which few are larger, but at most as many as are processed at
    once."""
    mean, spread = size_of_samples(policy, n)
    rows = max(1, math.ceil(mean + 2 * spread - 1e-6))
    return rows if most is None else min(rows, most)


def size_of_samples(policy: Policy, n: int) -> tuple[float, float]:
    """Mean and standard deviation."""
    mean = policy.q * n
    return mean, 0 if policy.name in ("fixed_size", "shuffle") else math.sqrt(mean * (1 - policy.q))


def rows_of_graph(count: int, usual: int) -> int:
    """The number of rows of the graph that takes a chunk of so many records: the usual one, or a ninth of that more or
    less, and so on, so that padding adds at most 6 % on average."""
    step = max(1, round(usual / 9))
    return usual + math.ceil((count - usual) / step) * step


def check_constants(graph: Graph, data: Memory) -> list[str]:
    """The shapes of tensors that a graph holds and that are no parameters or buffers."""
    data.refuse(graph.constants.items())
    others = (tensor for name, tensor in graph.constants.items() if name not in graph.typed_in)
    return [str(tuple(tensor.shape)) for tensor in others if tensor.numel() > 1]
