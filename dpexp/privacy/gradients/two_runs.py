"""Computes the graph of a chunk in two runs, which take less memory: norms in the first, sums in the second.

Clip factors need all of a record's norms, so in one run the factors of every layer are held until the backward pass has
ended. Here the first run gives losses, norms and flags, and drops each factor once its norm is known. The second, from
the same random state, computes the same factors by the same operators, and adds them up at once, weighted by clip
factors of the norms that the first run gave. A record's bound rests on both having the same bits: operators run in
their deterministic forms (`deterministic`), and the pair of runs is proved as one pass is.

In both, activations of the forward pass are computed again, a segment at a time, where the backward pass needs them
(Chen et al. 2016, "Training deep nets with sublinear memory cost"); what is drawn at random is kept.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import fx

from dpexp.privacy.gradients.compiled import MARK
from dpexp.privacy.gradients.graph_passes import bytes_of, needed_before, origins_of, written
from dpexp.privacy.gradients.operators import is_random


@contextmanager
def deterministic() -> Iterator[None]:
    """Meanwhile operators give the same bits each time, or raise an error; some add in parallel, on a CPU, too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def two_runs(module: fx.GraphModule, outputs: Sequence[str]) -> list[fx.GraphModule]:
    """(inputs) -> the outputs but for sums, and (inputs, these outputs) -> the sums."""
    (results,) = module.graph.output_node().args
    by_name = dict(zip(outputs, results, strict=True))  # type: ignore[arg-type]
    sums, others = ([by_name[n] for n in outputs if n.startswith("sum:") == is_sum] for is_sum in (True, False))
    return [_run_of(module, others, []), _run_of(module, sums, others)]


def _run_of(module: fx.GraphModule, results: list[fx.Node], given: list[fx.Node]) -> fx.GraphModule:
    """The part of a graph that computes `results`, with `given` nodes as further inputs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(module.graph, copies)
    nodes = [*module.graph.nodes][:-1]
    end = next(k for k, node in enumerate(nodes) if node.target is MARK)
    consumers, loss = {copies[node] for node in nodes[end:]}, copies[nodes[end].all_input_nodes[0]]
    forward = _closure([loss], {node: node.all_input_nodes for node in graph.nodes})
    *_, last = (node for node in graph.nodes if node.op == "placeholder")
    for node in given:
        with graph.inserting_after(last):
            last = graph.placeholder(f"given_{node.name}")
        copies[node].replace_all_uses_with(last)
    output = graph.output([copies[node] for node in results])
    before = needed_before(graph)
    needed = _closure([output, *filter(is_random, graph.nodes)], before)
    for node in reversed(graph.nodes):
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)
    due = _due(graph, before, consumers & needed, forward)
    order = sorted(graph.nodes, key=due.__getitem__)
    return fx.GraphModule(module, _recomputed(graph, order, forward, {n for n in order if due[n] > due[loss]}))


def _closure(some: list[fx.Node], before: dict[fx.Node, list[fx.Node]]) -> set[fx.Node]:
    found, waiting = set[fx.Node](), [*some]
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += before[node]
    return found


def _due(
    graph: fx.Graph, before: dict[fx.Node, list[fx.Node]], consumers: set[fx.Node], forward: set[fx.Node]
) -> dict[fx.Node, int]:
    """When each node runs: the forward and backward pass in their order, and what consumes factors after the node that
    completes its inputs. What consumes activations alone, such as the norm of a layer's input, waits until needed."""
    due = {node: k for k, node in enumerate(graph.nodes) if node not in consumers}
    backward = {node for node in due if node not in forward and node.op == "call_function"}
    after: dict[fx.Node, list[fx.Node]] = {}
    waits = []
    for node in graph.nodes:
        for one in before[node]:
            after.setdefault(one, []).append(node)
        if node in consumers:
            due[node] = max((due[one] for one in before[node]), default=0)
            backward |= set() if backward.isdisjoint(before[node]) else {node}
            waits += [] if node in backward else [node]
    for node in reversed(waits):
        due[node] = min(due[one] for one in after[node])
    for node in waits:
        due[node] = max((due[one] for one in before[node] if one in consumers), default=due[node])
    return due


def _recomputed(graph: fx.Graph, order: list[fx.Node], forward: set[fx.Node], later: set[fx.Node]) -> fx.Graph:
    """The graph in this order, in which what is `later` than the loss gets activations that are computed again.

    The forward pass is cut into about as many segments as the root of its length, where least is handed on. All but the
    last are computed again for the first node that needs them, from what was handed on to them.
    """
    origins = origins_of(graph)
    kept = written(graph, origins)
    again_if = [
        node for node in order
        if node in forward and node.op == "call_function" and not is_random(node) and origins[node] not in kept
    ]  # fmt: skip
    cuts = _cuts(again_if, origins)
    segment = {node: s for s, (a, b) in enumerate(pairwise(cuts)) for node in again_if[a:b]}
    within = {
        node: [one for one in node.all_input_nodes if node in segment and segment.get(one) == segment[node]]
        for node in order
    }
    used = _closure([one for node in later for one in node.all_input_nodes if one in segment], within)
    copies: dict[fx.Node, fx.Node] = {}
    again: dict[fx.Node, fx.Node] = {}
    new = fx.Graph()
    for node in order:
        for given in node.all_input_nodes if node in later else []:
            if given in segment and given not in again and segment[given] < len(cuts) - 2:
                for one in again_if[cuts[segment[given]] : cuts[segment[given] + 1]]:
                    if one in used:
                        again[one] = new.node_copy(one, (copies | {x: again[x] for x in within[one]}).__getitem__)
        seen = copies | again if node in later else copies
        copies[node] = new.node_copy(node, seen.__getitem__)
    return new


def _cuts(nodes: list[fx.Node], origins: dict[fx.Node, fx.Node]) -> list[int]:
    """Where segments of consecutive nodes begin and end."""
    place = {node: k for k, node in enumerate(nodes)}
    last = {origins[given]: k for k, node in enumerate(nodes) for given in node.all_input_nodes}
    handed_on = [0] * (len(nodes) + 1)  # bytes, before each node
    for made, end in last.items():
        for k in range(place.get(made, end) + 1, end + 1):
            handed_on[k] += bytes_of(made)
    count = max(1, math.isqrt(len(nodes)))
    ends = [round(len(nodes) * (s + 0.5) / count) for s in range(count)]
    return [0, *(min(range(a, b), key=handed_on.__getitem__) for a, b in pairwise(ends)), len(nodes)]
