"""Insert: parameters arrive as shards; a gather chain before the first use, a reduce chain after each gradient.

    def joint(w: f32[8, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
        ''
        y: f32[2, 4] = mm(x, w)
        t: f32[8, 2] = permute(x, [1, 0])
        g: f32[8, 4] = mm(t, tangents_1)
        return ([y], {'w': g})

becomes, for `w` with params, grads and optim on gpu+node of 2 x 2 and after_forward on gpu,

    def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
        ''
        all_gather: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=False)
        wait: f32[4, 4] = wait(all_gather)
        all_gather_1: f32[8, 4] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], again=True)
        wait_1: f32[8, 4] = wait(all_gather_1)
        y: f32[2, 4] = mm(x, wait_1)
        t: f32[8, 2] = permute(x, [1, 0])
        g: f32[8, 4] = mm(t, tangents_1)
        mul: f32[8, 4] = mul.Tensor(g, 0.25)
        reduce_scatter: f32[4, 4] = reduce_scatter(mul, 'gpu', 2, purpose='reduce', params=['w'])
        wait_2: f32[4, 4] = wait(reduce_scatter)
        reduce_scatter_1: f32[2, 4] = reduce_scatter(wait_2, 'node', 2, purpose='reduce', params=['w'])
        wait_3: f32[2, 4] = wait(reduce_scatter_1)
        return ([y], {'w': wait_3})

Casts to the compute dtype go before the first hop, so that the wire carries the small dtype. Gradients are scaled
before the first hop: sums of any number of micro-batches and ranks stay in range, and what rests is already a part of
the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import ops
from passes.build import Writer, behind, fake_mode, outputs, placeholders, set_outputs
from passes.layout import Layout
from passes.wire import CASTS, NONE, Wires, dequantize, quantize

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class Param:
    """A parameter of the graph: its layout and the dtypes it has at rest and on the way."""

    layout: Layout
    rest_dtype: torch.dtype
    """of the value on the params rung"""
    reduce_dtype: torch.dtype
    """of the gradient on the wire and in an accumulator"""
    master_dtype: torch.dtype
    """of the optim shard and of the synced gradient"""
    grad_scale: float
    """1 / number of ranks for the mean, 1 for the sum"""
    wires: Wires = NONE
    """in what it travels, where that is not its dtype"""

    @cached_property
    def has_copy(self) -> bool:
        """A compute copy rests on the params rung (else params and optim are one and the same)."""
        return self.layout.params < self.layout.optim

    @property
    def grad_is_accumulator(self) -> bool:
        """Gradients and optimizer state rest on the same rung: what accumulates takes the place of `.grad`."""
        return self.layout.grads == self.layout.optim

    @property
    def needs_sync(self) -> bool:
        """Something is left to do once per update: hops below the grads rung, or the way out of an accumulator."""
        layout = self.layout
        return not self.grad_is_accumulator or any(size > 1 for _, size in layout.axes[layout.optim :])


def insert(graph: fx.Graph, params: Mapping[str, Param]) -> fx.Graph:
    """`params` by placeholder name. The graph is edited in place and returned."""
    mode = fake_mode(graph)
    nodes = placeholders(graph)
    for name, param in params.items():
        _gather(graph, nodes[name], param, Writer(graph, mode, module_of(param.layout.name)))
    result, grads = outputs(graph)
    by_name = {param.layout.name: param for param in params.values()}
    reduced = {name: _reduce(graph, g, by_name[name], mode) if name in by_name else g for name, g in grads.items()}
    set_outputs(graph, (result, reduced))
    return graph


def module_of(parameter: str) -> str:
    """Path of the module that owns a parameter."""
    return parameter.rpartition(".")[0]


def _gather(graph: fx.Graph, node: fx.Node, param: Param, write: Writer) -> None:
    full, layout = node.meta["val"], param.layout
    users = list(node.users)
    with write.mode:
        node.meta["val"] = full.new_empty(layout.rung_shape(layout.params), dtype=param.rest_dtype)
    if not users:
        return
    with graph.inserting_before(min(users)):
        x = cast(write, node, full.dtype)
        x = climb(write, x, param, layout.params, 0, purpose="gather")
    for user in users:
        user.replace_input_with(node, x)


def climb(write: Writer, x: fx.Node, param: Param, start: int, end: int, purpose: str) -> fx.Node:
    """All-gather from one rung up to a finer-shared one, outer axis first (the small payload over the slow link). What
    is in a format on one axis stays in it on inner ones that have none: nothing more is lost, and fewer bytes go."""
    layout, dtype, wire = param.layout, x.meta["val"].dtype, ""
    for rung in reversed(range(end, start)):
        axis, size = layout.axes[rung]
        if size > 1:
            before, wire = wire, param.wires.up(axis) or wire
            if wire != before:
                x = _unwired(write, x, param, before, layout.padded_shape(rung + 1), dtype)
                x = _wired(write, x, param, wire, 1)
            said: dict[str, object] = {"again": rung < layout.after_forward} if purpose == "gather" else {}
            said |= {"wire": wire} if wire else {}
            x = write(ops.wait, write(ops.all_gather, x, axis, size, purpose=purpose, params=[layout.name], **said))
    x = _unwired(write, x, param, wire, layout.padded_shape(end), dtype)
    if end == 0 < start and layout.padded_rows != layout.shape[0]:
        x = write(ops.compact, x, layout.shape[0], split(layout))
    return x


def descend(write: Writer, x: fx.Node, param: Param, start: int, end: int, purpose: str) -> fx.Node:
    """Reduce-scatter from one rung down to another, inner axis first. What travels in another format is exchanged, and
    summed in float32 where it arrives."""
    layout, x = param.layout, contiguous(write, x)
    said = {"purpose": purpose, "params": [layout.name]}
    if start == 0 < end and layout.padded_rows != layout.shape[0]:
        x = write(ops.expand, x, layout.shape[0], split(layout))
    for axis, size in layout.axes[start:end]:
        wire = param.wires.down(axis)
        if size > 1 and wire:
            sent = _wired(write, x, param, wire, size)
            there = write(ops.wait, write(ops.all_to_all, sent, axis, size, **said, wire=wire))
            x = write(ops.fold, _unwired(write, there, param, wire, x.meta["val"].shape, torch.float32), size)
        elif size > 1:
            x = cast(write, x, param.reduce_dtype)
            x = write(ops.wait, write(ops.reduce_scatter, x, axis, size, **said))
    return cast(write, x, param.reduce_dtype)


def _wired(write: Writer, x: fx.Node, param: Param, wire: str, pieces: int) -> fx.Node:
    """A value as it travels; `pieces` of it to different ranks."""
    if wire in CASTS:
        return cast(write, x, CASTS[wire])
    return write(quantize, x, wire, param.wires.block, pieces) if wire else x


def _unwired(write: Writer, x: fx.Node, param: Param, wire: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
    if wire in CASTS:
        return cast(write, x, dtype)
    return write(dequantize, x, wire, param.wires.block, list(shape), dtype) if wire else x


def split(layout: Layout) -> list[int]:
    return [size for _, size in layout.axes[: layout.optim]]


def _reduce(graph: fx.Graph, grad: fx.Node, param: Param, mode: FakeTensorMode) -> fx.Node:
    write = Writer(graph, mode, grad.meta.get("module") or module_of(param.layout.name))
    with graph.inserting_before(behind(grad)):
        g = cast(write, grad, param.reduce_dtype)
        if param.grad_scale != 1:
            g = write(aten.mul.Tensor, g, param.grad_scale)
        return descend(write, g, param, 0, param.layout.grads, purpose="reduce")


def cast(write: Writer, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else write(prims.convert_element_type.default, x, dtype)


def contiguous(write: Writer, x: fx.Node) -> fx.Node:
    """Collectives move dense rows."""
    if x.meta["val"].is_contiguous():
        return x
    return write(aten.clone.default, x, memory_format=torch.contiguous_format)
