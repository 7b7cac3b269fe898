"""Hoist: what brings gradients down is issued as soon as its gradient is there, and queues up on its lane.

    def backward(x: f32[4, 4], tangents_1: f32[4, 4]):
        'layers.1'
        t: f32[4, 4] = mm(tangents_1, x)
        r: f32[2, 4] = reduce_scatter(t, 'node', 2, purpose='reduce', params=['v'])
        g: f32[4, 4] = mm(x, t)
        'layers.0'
        u: f32[4, 4] = mm(g, x)
        'layers.1'
        d: f32[2, 4] = wait(r)
        'layers.0'
        s: f32[2, 4] = reduce_scatter(g, 'node', 2, purpose='reduce', params=['w'])
        e: f32[2, 4] = wait(s)
        return {'v': d, 'w': e}

becomes

    def backward(x: f32[4, 4], tangents_1: f32[4, 4]):
        'layers.1'
        t: f32[4, 4] = mm(tangents_1, x)
        r: f32[2, 4] = reduce_scatter(t, 'node', 2, purpose='reduce', params=['v'])
        g: f32[4, 4] = mm(x, t)
        'layers.0'
        s: f32[2, 4] = reduce_scatter(g, 'node', 2, purpose='reduce', params=['w'])
        u: f32[4, 4] = mm(g, x)
        'layers.1'
        d: f32[2, 4] = wait(r)
        'layers.0'
        e: f32[2, 4] = wait(s)
        return {'v': d, 'w': e}

A schedule puts a hop where its lane will be idle by the clock, for only then is it known which should be next. When all
are in order, nothing is won by waiting that long: where compute takes longer than was foretold, the lane would stand
still until it comes by. Each lane keeps its order. What a hop brings takes memory from when it is issued: of a reduce a
part of the gradient, which lives until that is over in either case. Gathers stay where they are, and so does compute.
"""

from __future__ import annotations

from torch import fx

from passes import ops
from passes.build import behind
from passes.flights import LanesOf, axes_of


def hoist(graph: fx.Graph, lanes: LanesOf = axes_of) -> fx.Graph:
    """`lanes` says what a hop over an axis holds while it runs. Edits in place."""
    last: dict[str, fx.Node] = {}
    for start in ops.hops(graph):
        hop = ops.hop(start)
        held = lanes(hop.axis)
        place = behind(max([*start.all_input_nodes, *(last[lane] for lane in held if lane in last)]))
        if hop.kind != "all_gather" and place < start:
            place.prepend(start)
        last |= dict.fromkeys(held, start)
    return graph
