"""Order: ranks must issue the same collectives in the same order, whatever shapes each is fed.

The order is decided once. `align` brings a graph traced for another shape to that order, by a stable topological sort with one more
dependency: each start comes after the start before it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from torch import fx

from passes import ops
from passes.build import rearrange
from passes.errors import Error

Key = tuple[object, ...]


def collective_order(graph: fx.Graph) -> list[Key]:
    """Keys of the starts, in order."""
    return [ops.hop(node).key for node in ops.hops(graph)]


def align(graph: fx.Graph, order: Sequence[Key]) -> fx.Graph:
    """Edits the graph in place so that its starts come in `order` (a permutation of its own). Raises where data
    dependencies contradict it."""
    own = collective_order(graph)
    if own == list(order):
        return graph
    if Counter(own) != Counter(order):
        raise ValueError("order is not a permutation of the graph's collectives")
    chain = _chain(graph, order)
    _sort(graph, dict(zip(chain[1:], chain, strict=False)))
    return graph


def _chain(graph: fx.Graph, order: Sequence[Key]) -> list[fx.Node]:
    by_key: dict[Key, list[fx.Node]] = {}
    for node in reversed(ops.hops(graph)):
        by_key.setdefault(ops.hop(node).key, []).append(node)
    return [by_key[key].pop() for key in order]


def _sort(graph: fx.Graph, before: dict[fx.Node, fx.Node]) -> None:
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    needs = {node: {*node.all_input_nodes, *([before[node]] if node in before else [])} for node in nodes}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node, inputs in needs.items():
        for value in inputs:
            users[value].append(node)
    missing = {node: len(inputs) for node, inputs in needs.items()}
    ready = [position[node] for node in nodes if not missing[node]]
    done: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        done.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    if len(done) < len(nodes):
        _raise_contradiction(next(node for node in nodes if missing[node] and ops.is_start(node)))
    rearrange(graph, done)


def _raise_contradiction(node: fx.Node) -> None:
    raise Error(
        "The order of collectives that the ranks agreed on contradicts this graph's data dependencies.",
        where=f"{node.name}: {ops.hop(node)}",
        fix="Feed batches for which the model uses its parameters in the same order on every rank.",
    )
