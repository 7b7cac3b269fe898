"""Feedback: what a format loses of a gradient is added to the next one (error feedback, arXiv 1901.09847).

    def backward(x: f32[2, 8], tangents_1: f32[2, 8]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 8] = mm(t, tangents_1)
        m: u8[2, 20] = quantize(p, 'int4', 32, 2)
        a: u8[2, 20] = all_to_all(m, 'gpu', 2, purpose='reduce', params=['w'], wire='int4')
        b: u8[2, 20] = wait(a)
        y: f32[8, 8] = shardc.dequantize(b, 'int4', 32, [8, 8], f32)
        z: f32[4, 8] = fold(y, 2)
        return {'w': z}

becomes

    def backward(x: f32[2, 8], tangents_1: f32[2, 8], residual_0_w: f32[8, 8]):
        ''
        t: f32[8, 2] = permute(x, [1, 0])
        p: f32[8, 8] = mm(t, tangents_1)
        add: f32[8, 8] = add.Tensor(p, residual_0_w)
        lost: f32[8, 8] = lost(add, 'int4', 32, 2)
        m: u8[2, 20] = quantize(add, 'int4', 32, 2)
        a: u8[2, 20] = all_to_all(m, 'gpu', 2, purpose='reduce', params=['w'], wire='int4')
        b: u8[2, 20] = wait(a)
        y: f32[8, 8] = shardc.dequantize(b, 'int4', 32, [8, 8], f32)
        z: f32[4, 8] = fold(y, 2)
        return {'w': z, 'residual_0_w': lost}

A residual is on the rung from which its hop goes down (0 above), in float32, and is kept until the hop is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import fx

from passes import ops
from passes.build import Writer, fake_mode, outputs, set_outputs
from passes.insert import cast
from passes.layout import Layout
from passes.wire import LARGEST, Wires, lost, quantize

PREFIX = "residual_"


def feedback(graph: fx.Graph, layouts: Mapping[str, Layout]) -> fx.Graph:
    """`layouts` by placeholder name. Edits in place."""
    mode = fake_mode(graph)
    keys = {layout.name: key for key, layout in layouts.items()}
    returned = dict(outputs(graph))
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for message, hop in _messages(graph):
        key = keys[hop.params[0]]
        x, *how = message.args
        with graph.inserting_before(last.next):
            last = graph.placeholder(residual_name(layouts[key], key, hop.axis))
        write = Writer(graph, mode, message.meta.get("module", ""))
        with mode:
            last.meta["val"] = x.meta["val"].new_empty(x.meta["val"].shape, dtype=torch.float32)
        with graph.inserting_before(message):
            added = write(torch.ops.aten.add.Tensor, cast(write, x, torch.float32), last)
            returned[last.name] = write(lost, added, *how)
        message.args = (added, *how)
    set_outputs(graph, returned)
    return graph


def _messages(graph: fx.Graph) -> list[tuple[fx.Node, ops.Hop]]:
    """What is quantized to go down, and the hop that it goes by."""
    starts = [start for start in ops.hops(graph) if start.target is ops.all_to_all]
    return [(start.args[0], ops.hop(start)) for start in starts if start.args[0].target is quantize]


def residual_name(layout: Layout, key: str, axis: str) -> str:
    """Of the placeholder, and of what is returned in its place."""
    return f"{PREFIX}{[name for name, _ in layout.axes].index(axis)}_{key}"


def residual_of(node: fx.Node) -> tuple[int, str] | None:
    """The rung, and the placeholder name of its parameter, where a node is a residual as it comes in."""
    if node.op != "placeholder" or not node.name.startswith(PREFIX):
        return None
    rung, _, key = node.name.removeprefix(PREFIX).partition("_")
    return (int(rung), key) if rung.isdigit() else None


def residual_shapes(layout: Layout, wires: Wires) -> Iterator[tuple[int, ...]]:
    """Of each residual of a parameter."""
    for rung, (axis, size) in enumerate(layout.axes[: layout.optim]):
        if size > 1 and wires.down(axis) in LARGEST and layout.trainable:
            yield layout.padded_shape(rung)
