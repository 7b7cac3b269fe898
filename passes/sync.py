"""Sync: once per update, gradients go from the grads rung to the optim rung and are made whole.

    def backward(x: f32[2, 8], tangents_1: f32[2, 4]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 4] = mm(t, tangents_1)
        r: f32[4, 4] = reduce_scatter(p, 'gpu', 2, purpose='reduce', params=['w'])
        g: f32[4, 4] = wait(r)
        return {'w': g}

becomes, for `w` with grads and optim on gpu (HSDP, MiCS),

    def backward(x: f32[2, 8], tangents_1: f32[2, 4]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 4] = mm(t, tangents_1)
        r: f32[4, 4] = reduce_scatter(p, 'gpu', 2, purpose='reduce', params=['w'])
        g: f32[4, 4] = wait(r)
        all_reduce: f32[4, 4] = all_reduce(g, 'node', 2, purpose='sync', params=['w'])
        wait: f32[4, 4] = wait(all_reduce)
        return {'w': wait}

a reduce-scatter over each axis of optim that grads lacks, then one all-reduce over all axes that optim lacks: hop by
hop, each rank would send as much over the slow ones as it sends over the fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import ops
from passes.build import Writer, behind, fake_mode, outputs, set_outputs
from passes.insert import Param, cast, descend


def sync(graph: fx.Graph, params: Mapping[str, Param]) -> fx.Graph:
    """`params` by parameter name: those to sync. Edits in place."""
    mode = fake_mode(graph)
    grads = dict(outputs(graph))
    for name in grads:
        if name in params:
            grads[name] = _sync(graph, grads[name], params[name], mode)
    set_outputs(graph, grads)
    return graph


def _sync(graph: fx.Graph, grad: fx.Node, param: Param, mode: FakeTensorMode) -> fx.Node:
    layout = param.layout
    write = Writer(graph, mode, grad.meta.get("module", ""))
    with graph.inserting_before(behind(grad)):
        g = cast(write, grad, param.reduce_dtype)
        g = descend(write, g, param, layout.grads, layout.optim, purpose="sync")
        axes = [axis for axis, size in layout.axes[layout.optim :] if size > 1]
        if axes:
            ranks = prod(size for _, size in layout.axes[layout.optim :])
            start = write(ops.all_reduce, g, "+".join(axes), ranks, purpose="sync", params=[layout.name])
            g = write(ops.wait, start)
        return cast(write, g, param.master_dtype)
