"""Checks of the graph of one record, and simpler operators in it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dpexp._torch_compat import CHECKS_ERRORS, OpOverload, arguments_of, decompositions_of, inputs_of

aten = torch.ops.aten


class NotTraceable(Exception):
    """The step cannot be traced and proved. The message says why."""


_ALLOWED = ("aten", "prims", "dpexp")  # namespaces of operators


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers; attention is tagged so, but does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not (_name(node).startswith("_scaled_dot_product") and inputs_of(node)[3:4] in ((), (0.0,)))


def dependents(graph: fx.Graph, inputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The inputs, random operators, and the nodes that depend on them."""
    found = {*inputs}
    for node in graph.nodes:
        if is_random(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def check_operators(graph: fx.GraphModule) -> None:
    """Raises NotTraceable: an operator may keep state, communicate, or raise an error for some records."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, str(node.target)), torch.Generator):
            raise NotTraceable("it draws from a generator of its own")
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        namespace = getattr(node.target, "namespace", None)
        if node.op != "call_function" or (
            namespace not in _ALLOWED and getattr(node.target, "__module__", "") != "_operator"
        ):
            raise NotTraceable(f"it calls {node.target}, which is not one of PyTorch's operators")
        if node.target is CHECKS_ERRORS:
            raise NotTraceable(
                f"{node.args[1]} raises an error for some records; {node.args[1]}_ex, if it exists, does not"
            )


def check_writes(graph: fx.GraphModule) -> bool:
    """Whether tensors are written to, through views; raises NotTraceable if the graph did not make one.

    A step that writes to a parameter or buffer runs one record at a time, which refuses it.
    """
    origin: dict[fx.Node, fx.Node] = {}
    writes = False
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
                writes = True
                if origin[tensor].op in ("placeholder", "get_attr"):
                    raise NotTraceable(f"it writes to a constant in place ({_name(node)})")
    return writes


def _is_view_of_all(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether as_strided shows all entries in order, as in the pooling of images whose channels are last in memory."""
    ordered = x.is_contiguous() and torch.empty_strided(size, stride, device="meta").is_contiguous()
    return ordered and not offset and math.prod(size) == x.numel()


def _filled(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> Any:
    """x[mask] = number, without the shape of x[mask]."""
    (mask, *others) = indices
    if others or mask is None or mask.dtype != torch.bool or value.numel() != 1 or accumulate:
        return NotImplemented
    return torch.where(mask.reshape(*mask.shape, *(1,) * (x.dim() - mask.dim())), value.reshape(()), x)


# Functional forms of writes through views, for which vmap has no rules.
WITHOUT_WRITES: dict[Any, Any] = {
    aten.index_put.default: _filled,
    **decompositions_of([aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter]),
    aten.fill.Scalar: torch.full_like,
    aten.fill.Tensor: lambda x, value: value.to(x.dtype).expand(x.shape).clone(),
    aten.copy.default: lambda x, source, non_blocking=False: source.to(x.dtype).expand(x.shape).clone(),
    aten.as_strided.default: lambda x, size, *how: x.view(size) if _is_view_of_all(x, size, *how) else NotImplemented,
    aten.as_strided_scatter.default: lambda x, source, *how: (
        source.reshape(x.shape).clone() if _is_view_of_all(x, *how) else NotImplemented
    ),
}


def drop_copies(graph: fx.Graph) -> None:
    """Drops autograd's copies of gradients into memory of their own, which would otherwise count as writes."""
    for node in [*graph.nodes]:
        if node.target is aten.copy_.default and node.args[0].target is aten.new_empty_strided.default:
            own, gradient = node.args
            if [*own.users] == [node] and own.meta["val"].shape == gradient.meta["val"].shape:
                node.replace_all_uses_with(gradient)
                graph.erase_node(node)
                graph.erase_node(own)


def _is_same(node: fx.Node) -> bool:
    """Whether the result is the argument; nothing is written to any more, so that a copy is."""
    if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh.default):
        return inputs_of(node)[0].op != "get_attr"
    if node.target not in (aten.expand.default, aten.clone.default):
        return False
    of, made = inputs_of(node)[0].meta.get("val"), node.meta["val"]
    return of is not None and (of.shape, of.stride()) == (made.shape, made.stride())


def simplify(graph: fx.Graph) -> None:
    """Drops detach and orders in memory that are of four dimensions, and lets backward operators that compute several
    gradients compute one each."""
    for node in [*graph.nodes]:
        if node.kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
            node.kwargs = node.kwargs | {"memory_format": torch.contiguous_format}
        if node.op == "call_function" and _is_same(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.convolution_backward.default, aten.native_group_norm_backward.default):
            for user in [*node.users]:
                k = user.args[1]
                with graph.inserting_before(user):
                    if k == 2 and node.target is aten.convolution_backward.default:
                        dims = [0, *range(2, node.args[0].meta["val"].dim())]
                        own = graph.call_function(aten.sum.dim_IntList, (node.args[0], dims))
                        own.meta = dict(user.meta)
                        user.replace_all_uses_with(own)
                    else:
                        mask = [k == i for i in range(3)]
                        if node.target is aten.native_group_norm_backward.default and k > 0:
                            mask = [True] * 3  # without the input's gradient, PyTorch's code for channels last crashes
                        own = graph.call_function(node.target, (*node.args[:-1], mask))
                        own.meta = dict(node.meta)
                        user.args = (own, k)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    _initialise(graph)


_OVERWRITING = {"bernoulli", "cauchy", "exponential", "fill", "geometric", "log_normal", "normal", "random", "uniform"}


def _initialise(graph: fx.Graph) -> None:
    """Zeroes memory that no operator overwrites, since it may hold another record."""
    for node in [*graph.nodes]:
        if node.op != "call_function" or not _name(node).removeprefix("new_").startswith("empty"):
            continue
        users = [user for user in node.users if not (_name(user) in _OVERWRITING and user.args[0] is node)]
        if users:
            with graph.inserting_after(node):
                zeros = graph.call_function(aten.zeros_like.default, (node,))
            zeros.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, zeros)


def _name(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
