"""Passes on the traced graph of a chunk, which leave its results as they are."""

import math
from typing import Any

import torch
from torch import fx

from dpexp._torch_compat import UNSAFE_VIEW, OpOverload, arguments_of
from dpexp.privacy.gradients.compiled import MARK
from dpexp.privacy.gradients.operators import is_random

aten = torch.ops.aten


def share(module: fx.GraphModule) -> None:
    """Computes equal values once, leaves out operators that return what they are given, and makes scalars constants.

    Values that are written to, or are part of a result, keep memory of their own, as do those that operators make from
    nothing, such as zeros.
    """
    graph = module.graph
    origins = origins_of(graph)
    changing = written(graph, origins)
    own = changing | {origins[node] for node in graph.output_node().all_input_nodes}
    known: dict[str, fx.Node] = {}
    for node in [*graph.nodes]:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or origins[node] in own:
            continue
        same = node
        reads_changing = any(origins[given] in changing for given in node.all_input_nodes)
        if _changes_nothing(node) and origins[node.args[0]] not in own:
            same = node.args[0]
        elif node.target is aten.scalar_tensor.default:
            key = f"{node.args} {node.kwargs}"
            same = known[key] = known.get(key) or _constant(module, node)
            origins[same] = same
        elif node.all_input_nodes and node.target is not MARK and not is_random(node) and not reads_changing:
            same = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _constant(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The result of a node without inputs, computed now."""
    name = f"constant_{node.name}"
    module.register_buffer(name, node.target(*node.args, **node.kwargs), persistent=False)  # type: ignore[operator]
    with module.graph.inserting_before(node):
        return module.graph.get_attr(name)


def origins_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node that made the memory of each node's result."""
    origins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        origins[node] = node
        for given, is_view, _ in _tensors_given(node):
            if is_view or node.target in (MARK, UNSAFE_VIEW):  # which are not said to be views
                origins[node] = origins[given]
    return origins


def written(graph: fx.Graph, origins: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes that made memory to which operators write."""
    return {origins[given] for node in graph.nodes for given, _, is_written in _tensors_given(node) if is_written}


def needed_before(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What each node needs before it: its inputs, the last writes to their memory, and, if it writes itself, whatever
    used that memory before."""
    origins = origins_of(graph)
    used: dict[fx.Node, list[fx.Node]] = {}
    wrote: dict[fx.Node, fx.Node] = {}
    needed = {}
    for node in graph.nodes:
        writes = {origins[given] for given, _, is_written in _tensors_given(node) if is_written}
        own = needed[node] = [*node.all_input_nodes]
        for memory in dict.fromkeys(origins[given] for given in node.all_input_nodes):
            own += [wrote[memory]] if memory in wrote else []
            own += used.get(memory, []) if memory in writes else []
            used.setdefault(memory, []).append(node)
        wrote |= dict.fromkeys(writes, node)
    return needed


def bytes_of(node: fx.Node) -> int:
    """Of a node's result, for the rows that were traced."""
    metas = [one.meta["tensor_meta"] for one in (node, *node.users) if "tensor_meta" in one.meta]
    several = metas[:1] if "tensor_meta" in node.meta else metas  # those of the parts of a tuple
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in several)


def _tensors_given(node: fx.Node) -> list[tuple[fx.Node, bool, bool]]:
    """An operator's arguments, each with whether the result may be a view of it, and whether it is written to."""
    if node.op != "call_function":
        return []
    if not isinstance(node.target, OpOverload):  # getitem
        return [(given, True, False) for given in node.all_input_nodes]
    found = []
    for k, argument in enumerate(arguments_of(node.target)):
        value: Any = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
        for given in value if isinstance(value, list | tuple) else [value]:
            if isinstance(given, fx.Node):
                alias = argument.alias_info
                found.append((given, alias is not None, alias is not None and alias.is_write))
    return found


# Their result is the argument itself where shape and strides are equal.
_MAYBE_NOTHING = {
    aten.view.default, UNSAFE_VIEW, aten.reshape.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.slice.Tensor, aten.squeeze.dim, aten.alias.default, aten.detach.default,
    aten.clone.default,
}  # fmt: skip


def _changes_nothing(node: fx.Node) -> bool:
    """Whether the result is the first argument; a copy is, if neither is written to."""
    if node.target not in _MAYBE_NOTHING or not isinstance(node.args[0], fx.Node):
        return False
    given, made = (one.meta.get("tensor_meta") for one in (node.args[0], node))
    if given is None or made is None:
        return node.target is aten.detach.default
    return (given.shape, given.stride, given.dtype) == (made.shape, made.stride, made.dtype)
