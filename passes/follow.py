"""Follow: where on the ladder the values of a graph are, read from its hops.

    def forward(w: f32[2, 4], x: f32[2, 8]):
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])     w is sharded over gpu+node
        f: f32[4, 4] = wait(a)                                                      f over gpu

Nothing is judged here (`passes.verify` does): a hop that makes no sense is followed as it says.
A value may hold several shards (a bucket), so each node maps to a tuple of them. Sizes of 1 have no hops and are left
out everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import fx

from passes import ops
from passes.layout import Layout
from passes.wire import dequantize, quantize

aten = torch.ops.aten

TRANSPARENT = frozenset(
    (
        torch.ops.prims.convert_element_type.default,
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.view.default,
    )
)
"""Ops that may work on a shard as on the full value: casts, copies and views that keep the order of elements."""

LINEAR = TRANSPARENT | {aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor}
"""Ops that may stand anywhere between a gradient and its last hop: they commute with a sum over ranks."""

Padding = tuple[int, tuple[int, ...]]
"""Arguments of the `compact` that drops it: real rows, and sizes of the optim axes, inner axis first."""

Step = tuple[str, str, str]
"""One axis crossed: kind of the collective, purpose, axis."""


@dataclass(frozen=True)
class Shard:
    """A parameter on its way up: still sharded over `axes`, inner axis first."""

    param: str
    axes: tuple[str, ...]
    padding: Padding | None
    piece: tuple[int, int] = ops.WHOLE
    wire: str = ""
    """the format that it is in, where it has to be restored"""
    mixed: tuple[str, ...] = ()
    """axes along which its pieces are in the order of ranks"""

    @property
    def is_full(self) -> bool:
        """Every row is there and no other, in order."""
        return self == Shard(self.param, (), None)


@dataclass(frozen=True)
class Gradient:
    """A gradient on its way down, `param` empty before its first hop."""

    param: str
    crossed: tuple[Step, ...]
    padding: Padding | None
    piece: tuple[int, int] = ops.WHOLE
    wire: str = ""
    """the format that it is in, where it has to be restored"""
    folds: int = 1
    """so many pieces that are still to be summed"""
    mixed: tuple[int, ...] = ()
    """sizes of axes, outer axis first, along which its pieces are in the order of ranks"""


LOCAL = Gradient("", (), None)
"""A value that has crossed nothing."""

_Part = TypeVar("_Part", Shard, Gradient)
Parts = dict[fx.Node, tuple[_Part, ...]]


def axes_of(layout: Layout, start: int, end: int | None = None) -> tuple[str, ...]:
    """Axes with a hop between two rungs."""
    return tuple(axis for axis, size in layout.axes[start:end] if size > 1)


def hop_axes(start: fx.Node) -> tuple[str, ...]:
    """'gpu+node' -> gpu, node."""
    return tuple(ops.hop(start).axis.split("+"))


def padding_of(layout: Layout, rung: int) -> Padding | None:
    """What `compact` has to drop from a value gathered from a rung."""
    if rung == 0 or layout.row_table is None:
        return None
    return padding(layout.shape[0], [size for _, size in layout.axes[: layout.optim]])


def padding(rows: int, split: list[int]) -> Padding:
    return rows, tuple(size for size in split if size > 1)


def shard_of(layout: Layout, rung: int) -> Shard:
    """A parameter at rest on a rung."""
    return Shard(layout.name, axes_of(layout, 0, rung), padding_of(layout, rung))


def route_of(layout: Layout, synced: bool) -> tuple[Step, ...]:
    """The axes that a gradient has to cross, in order: to the grads rung; where synced, to optim and over the rest."""
    route = [("reduce_scatter", "reduce", axis) for axis in axes_of(layout, 0, layout.grads)]
    if synced:
        route += [("reduce_scatter", "sync", axis) for axis in axes_of(layout, layout.grads, layout.optim)]
        route += [("all_reduce", "sync", axis) for axis in axes_of(layout, layout.optim)]
    return tuple(route)


def stops_at_sum(layout: Layout) -> bool:
    """Whether a gradient has hops before it is added to an accumulator, and behind."""
    before, whole = len(route_of(layout, synced=False)), len(route_of(layout, synced=True))
    return 0 < before < whole


def gradient_of(layout: Layout, synced: bool) -> Gradient:
    """A gradient at rest on the grads rung, or on the optim rung and whole."""
    rung = layout.optim if synced else layout.grads
    return Gradient(layout.name, route_of(layout, synced), padding_of(layout, rung))


def shards(graph: fx.Graph, at_rest: Mapping[fx.Node, tuple[Shard, ...]]) -> Parts[Shard]:
    """The parameters in each node, from their placeholders to the full value that compute gets."""
    return _follow(graph, at_rest, _up)


def gradients(graph: fx.Graph, at_rest: Mapping[fx.Node, tuple[Gradient, ...]]) -> Parts[Gradient]:
    """The gradients in each node, from the first hop (or `expand`, or accumulator) to what is returned."""
    return _follow(graph, at_rest, _down)


def leading(graph: fx.Graph) -> set[fx.Node]:
    """Gathers and refreshes, their waits, and what leads to nothing but them."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_up = ops.is_hop(node) and ops.hop(node).purpose in ("gather", "refresh")
        if is_up or (node.op == "call_function" and node.users and all(u in found for u in node.users)):
            found.add(node)
    return found


def _follow(
    graph: fx.Graph,
    at_rest: Mapping[fx.Node, tuple[_Part, ...]],
    step: Callable[[fx.Node, Parts[_Part]], tuple[_Part, ...] | None],
) -> Parts[_Part]:
    found = dict(at_rest)
    for node in graph.nodes:
        if node.op == "call_function" and (parts := step(node, found)):
            found[node] = parts
    return found


def _up(node: fx.Node, found: Parts[Shard]) -> tuple[Shard, ...] | None:
    if not node.all_input_nodes or not all(n in found for n in node.all_input_nodes):
        return None
    if node.target is ops.all_gather:
        return tuple(_gathered(shard, hop_axes(node)) for shard in _input(node, found))
    if node.target is ops.compact:
        return tuple(replace(shard, padding=None) for shard in _input(node, found))
    if node.target in (quantize, dequantize):
        return _in_wire(node, _input(node, found))
    if node.target is ops.interleave:
        return tuple(replace(shard, mixed=()) for shard in _input(node, found))
    if ops.is_wait(node) or node.target in TRANSPARENT:
        return _input(node, found)
    return _repacked(node, found, ())


def _in_wire(node: fx.Node, parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
    return tuple(replace(part, wire=node.args[1] if node.target is quantize else "") for part in parts)


def _gathered(shard: Shard, axes: tuple[str, ...]) -> Shard:
    left = tuple(axis for axis in shard.axes if axis not in axes)
    return replace(shard, axes=left, mixed=axes if len(axes) > 1 else ())


def _down(node: fx.Node, found: Parts[Gradient]) -> tuple[Gradient, ...] | None:
    if node.target in (ops.reduce_scatter, ops.all_to_all, ops.all_reduce):
        return _crossed(node, found.get(node.all_input_nodes[0]))
    if node.target is quantize:
        return _in_wire(node, found.get(node.all_input_nodes[0], (LOCAL,)))
    if node.target is ops.interleave:
        before = found.get(node.all_input_nodes[0], (LOCAL,))
        return tuple(replace(part, mixed=tuple(node.args[1])) for part in before)
    if node.target is ops.expand:
        before = found.get(node.all_input_nodes[0], (LOCAL,))
        return tuple(replace(part, padding=padding(*node.args[1:])) for part in before)
    if _is_cut(node):
        return _pieces(found.get(node.all_input_nodes[0], (LOCAL,)), len(node.args[1]))
    if not any(n in found for n in node.all_input_nodes):
        return None
    if node.target is dequantize:
        return _in_wire(node, _input(node, found))
    if node.target is ops.fold:
        return tuple(replace(part, folds=part.folds // node.args[1]) for part in _input(node, found))
    if ops.is_wait(node) or node.target in LINEAR:
        return next(found[n] for n in node.all_input_nodes if n in found)
    return _repacked(node, found, (LOCAL,))


def _crossed(start: fx.Node, before: tuple[Gradient, ...] | None) -> tuple[Gradient, ...]:
    it = ops.hop(start)
    if before is None or len(before) != len(it.params):
        before = (LOCAL,) * len(it.params)
    kind, folds = ("reduce_scatter", it.size) if it.kind == "all_to_all" else (it.kind, 1)
    steps = tuple((kind, it.purpose, axis) for axis in hop_axes(start))
    return tuple(
        replace(part, param=param, crossed=part.crossed + steps, folds=part.folds * folds, mixed=())
        for param, part in zip(it.params, before, strict=True)
    )


def _repacked(node: fx.Node, found: Parts[_Part], other: tuple[_Part, ...]) -> tuple[_Part, ...] | None:
    """A bucket is packed by `cat` and unpacked by `split_with_sizes`; what goes in pieces, the other way round."""
    if node.target is aten.cat.default:
        return _joined(tuple(part for n in node.args[0] for part in found.get(n, other)))
    if node.target is aten.split_with_sizes.default:
        parts, count = _input(node, found), len(node.args[1])
        if _is_cut(node):
            return _pieces(parts, count)
        return parts if count == len(parts) else None
    if node.target is operator.getitem and type(node.args[1]) is int:
        return _input(node, found)[node.args[1] : node.args[1] + 1]
    return None


def _pieces(parts: tuple[_Part, ...], count: int) -> tuple[_Part, ...] | None:
    """Of one value that is whole."""
    if len(parts) != 1 or parts[0].piece != ops.WHOLE:
        return None
    return tuple(replace(parts[0], piece=(i, count)) for i in range(count))


def _joined(parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
    """All pieces of one, in order, are the whole of it."""
    pieces = tuple(replace(parts[0], piece=(i, len(parts))) for i in range(len(parts)))
    return (replace(parts[0], piece=ops.WHOLE),) if len(parts) > 1 and parts == pieces else parts


def _is_cut(node: fx.Node) -> bool:
    """Whether it is a split, of which a part goes to a hop that says that it carries a piece."""
    if node.target is not aten.split_with_sizes.default:
        return False
    users = [user for part in node.users for user in part.users]
    users += [user for copied in users if copied.target is aten.clone.default for user in copied.users]
    return any(ops.is_start(user) and ops.hop(user).piece != ops.WHOLE for user in users)


def _input(node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
    return found[node.all_input_nodes[0]]
