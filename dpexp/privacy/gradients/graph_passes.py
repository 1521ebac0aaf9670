"""Passes on the traced graph of a chunk, which leave its results as they are."""

from typing import Any

import torch
from torch import fx

from dpexp._torch_compat import OpOverload, arguments_of
from dpexp.privacy.gradients.compiled import MARK
from dpexp.privacy.gradients.operators import is_random

aten = torch.ops.aten


def share(module: fx.GraphModule) -> None:
    """Computes equal values once, leaves out operators that return what they are given, and makes scalars constants.

    Values that are written to, or are part of a result, keep memory of their own, as do those that operators make from
    nothing, such as zeros.
    """
    graph = module.graph
    origins = _origins(graph)
    own = _written(graph, origins) | {origins[node] for node in graph.output_node().all_input_nodes}
    known: dict[str, fx.Node] = {}
    for node in [*graph.nodes]:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or origins[node] in own:
            continue
        same = node
        if _changes_nothing(node) and origins[node.args[0]] not in own:
            same = node.args[0]
        elif node.target is aten.scalar_tensor.default:
            key = f"{node.args} {node.kwargs}"
            same = known[key] = known.get(key) or _constant(module, node)
        elif node.all_input_nodes and node.target is not MARK and not is_random(node):
            same = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def consume_early(module: fx.GraphModule) -> None:
    """Runs what consumes the factors of gradients where its inputs are complete, so that stored gradients take the
    factors' place, and norms and Gram matrices go, while the backward pass runs.

    The forward and backward pass, which ends at the first mark, keeps its order. What consumes its loss or activations
    alone, such as the norm of a layer's input, waits until it is needed.
    """
    graph = module.graph
    nodes, before = [*graph.nodes], _needed_before(graph)
    marks = [k for k, node in enumerate(nodes) if node.target is MARK]
    if not marks:
        return
    passes, consumers, output = nodes[: marks[0]], nodes[marks[0] : -1], nodes[-1]
    forward = _ancestors(nodes[marks[0]])
    complete = dict(zip(passes, range(len(passes)), strict=True))
    early: dict[int, list[fx.Node]] = {}
    backward = {node for node in passes if node not in forward}
    for node in consumers:
        complete[node] = max((complete[one] for one in before[node]), default=0)
        if not backward.isdisjoint(before[node]):
            backward.add(node)
            early.setdefault(complete[node], []).append(node)
    moved: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        for one in before[node]:
            if one not in moved:
                place(one)
        moved.add(node)
        output.prepend(node)

    for k, node in enumerate(passes):
        for one in (node, *early.get(k, [])):
            if one not in moved:
                place(one)
    for node in consumers:
        if node not in moved:
            place(node)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [node]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def _needed_before(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What each node needs before it: its inputs, the last writes to their memory, and, if it writes itself, whatever
    used that memory before."""
    origins = _origins(graph)
    used: dict[fx.Node, list[fx.Node]] = {}
    wrote: dict[fx.Node, fx.Node] = {}
    needed = {}
    for node in graph.nodes:
        writes = {origins[given] for given, _, is_written in _tensors_given(node) if is_written}
        own = needed[node] = [*node.all_input_nodes]
        for memory in {origins[given]: None for given in node.all_input_nodes}:
            own += [wrote[memory]] if memory in wrote else []
            own += used.get(memory, []) if memory in writes else []
            used.setdefault(memory, []).append(node)
        wrote |= dict.fromkeys(writes, node)
    return needed


def _constant(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The result of a node without inputs, computed now."""
    name = f"constant_{node.name}"
    module.register_buffer(name, node.target(*node.args, **node.kwargs), persistent=False)  # type: ignore[operator]
    with module.graph.inserting_before(node):
        return module.graph.get_attr(name)


def _origins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node that made the memory of each node's result."""
    origins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        origins[node] = node
        for given, is_view, _ in _tensors_given(node):
            if is_view or node.target is MARK:
                origins[node] = origins[given]
    return origins


def _written(graph: fx.Graph, origins: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    return {origins[given] for node in graph.nodes for given, _, is_written in _tensors_given(node) if is_written}


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
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default,
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
