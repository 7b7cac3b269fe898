"""Turn: what a model needs behind its last block is used again at once, by a backward that begins there.

    def joint(w: f32[4, 4], v: f32[4, 8], x: f32[2, 4], tangents_1: f32[2, 8]):
        'layers.0'
        y: f32[2, 4] = mm(x, w)
        'head'
        z: f32[2, 8] = mm(y, v)
        t: f32[8, 4] = permute(v, [1, 0])
        g: f32[2, 4] = mm(tangents_1, t)
        'layers.0'
        u: f32[4, 4] = permute(w, [1, 0])
        h: f32[2, 4] = mm(g, u)
        return ([z], {'x': h})

Of `w` a shard rests between forward and backward, where the plan says so (`after_forward`). Were `v` sharded there, it
would be gathered twice with nothing but a loss between, and the second time there would be nothing to hide behind: it
stays in full. (FSDP2 does so with all that is outside of blocks.)
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from passes.build import placeholders
from passes.regions import blocks


def turned(graph: fx.Graph, params: Collection[str]) -> set[str]:
    """Of the parameter placeholders `params` of a joint graph, those that nothing uses but the forward behind its last
    block and the backward before its first. None of a model without blocks."""
    held = from_params(graph, params)
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in held]
    follows = _follows(graph)
    begin = next((i for i, node in enumerate(nodes) if node in follows), len(nodes))
    last = max((i for i, block in enumerate(blocks(nodes[:begin])) if block), default=-1)
    first = min((i for i, block in enumerate(blocks(nodes[begin:]), begin) if block), default=-1)
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in {name for n in node.all_input_nodes for name in held.get(n, ())}:
            uses.setdefault(name, []).append(i)
    return {name for name, at in uses.items() if 0 <= last < at[0] and at[-1] < first}


def from_params(graph: fx.Graph, params: Collection[str]) -> dict[fx.Node, set[str]]:
    """What is computed from parameters alone, views and casts above all, with their names."""
    found = {node: {name} for name, node in placeholders(graph).items() if name in params}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and inputs and all(n in found for n in inputs):
            found[node] = set().union(*(found[n] for n in inputs))
    return found


def _follows(graph: fx.Graph) -> set[fx.Node]:
    """What the backward computes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name.startswith("tangents_") or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
