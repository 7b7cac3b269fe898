"""Excerpt: one module's part of a graph, as a graph of its own, to be read.

    def forward(blocks_0_w: f32[4, 4], blocks_1_w: f32[4, 4], x: f32[2, 4]):
        'blocks.0'
        y: f32[2, 4] = mm(x, blocks_0_w)
        'blocks.1'
        z: f32[2, 4] = mm(y, blocks_1_w)
        return ([z], [])

becomes, for the module blocks.1,

    def forward(blocks_1_w: f32[4, 4], y: f32[2, 4]):
        'blocks.1'
        z: f32[2, 4] = mm(y, blocks_1_w)
        return [z]

Inputs are what comes from outside, parameters first; returned is what goes outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx
from torch.utils._pytree import tree_leaves


def excerpt(graph: fx.Graph, module: str, within: Collection[fx.Node] | None = None) -> fx.Graph:
    """The nodes whose module is `module` or lies in it, the hops of its parameters among them; only those of `within`
    where that is given. The graph returns nothing where there are none."""
    nodes = [n for n in graph.nodes if _belongs(n, module) and (within is None or n in within)]
    inside = set(nodes)
    new, env = fx.Graph(owning_module=graph.owning_module), {}
    for node in _from_outside(nodes, inside):
        env[node] = _input(new, node)
    for node in nodes:
        env[node] = new.node_copy(node, env.__getitem__)
        env[node].name = node.name
    new.output([env[n] for n in nodes if any(u not in inside and (within is None or u in within) for u in n.users)])
    return new


def needed(results: object) -> set[fx.Node]:
    """The nodes that `results` are computed from, themselves included: of a joint graph's results, its forward part."""
    left = [n for n in tree_leaves(results) if isinstance(n, fx.Node)]
    found: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _belongs(node: fx.Node, module: str) -> bool:
    path = node.meta.get("module", "")
    return node.op == "call_function" and (path == module or path.startswith(module + "."))


def _from_outside(nodes: Iterable[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    found = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    return sorted(found, key=lambda n: n.op != "placeholder")


def _input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.get_attr(str(node.target)) if node.op == "get_attr" else graph.placeholder(node.name)
    new.meta.update(node.meta)
    new.name = node.name
    return new
