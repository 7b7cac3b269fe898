"""Bucket: hops of one kind, axis, purpose and dtype that are needed (or made) together become one collective.

    def forward(w: f32[4, 4], v: f32[2, 8], x: f32[2, 8]):
        'layers.0'
        a: f32[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 4] = wait(a)
        y: f32[2, 4] = mm(x, f)
        b: f32[4, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
        g: f32[4, 8] = wait(b)
        z: f32[2, 8] = mm(y, g)
        return ([z], [])

becomes

    def forward(w: f32[4, 4], v: f32[2, 8], x: f32[2, 8]):
        'layers.0'
        view: f32[1, 16] = view(w, [1, 16])
        view_1: f32[1, 16] = view(v, [1, 16])
        cat: f32[1, 32] = cat([view, view_1], 1)
        all_gather: f32[2, 32] = all_gather(cat, 'gpu', 2, purpose='gather', params=['w', 'v'], again=True)
        wait: f32[2, 32] = wait(all_gather)
        split_with_sizes = split_with_sizes(wait, [16, 16], 1)
        getitem: f32[2, 16] = split_with_sizes[0]
        clone: f32[2, 16] = clone(getitem, memory_format=contiguous_format)
        view_2: f32[8, 4] = view(clone, [8, 4])
        y: f32[2, 4] = mm(x, view_2)
        getitem_1: f32[2, 16] = split_with_sizes[1]
        clone_1: f32[2, 16] = clone(getitem_1, memory_format=contiguous_format)
        view_3: f32[4, 8] = view(clone_1, [4, 8])
        z: f32[2, 8] = mm(y, view_3)
        return ([z], [])

A bucket is [pieces, elements]: each parameter is so many columns, each rank's part so many whole rows. So the hops of a
chain pass it on as it is (gathers multiply the rows, reduce-scatters divide them), and copy-in and copy-out are
ordinary ops that a compiler fuses with casts. Parameters are packed in the order in which the model registers them.

What is together is read from the order of compute: gathers and refreshes whose parameters are first needed in one
stretch of a repeated block, reduces and syncs whose gradients are made in one, as far as that pays: a large parameter
that is gathered on its own needs no copies. In the stretches that gather first, and in those that reduce last, there is
little else to hide a hop behind, and large ones pay less. Or it is what the ranks agreed on (`passes.order`), where a
graph was traced for shapes of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from passes import ops
from passes.build import Writer, fake_mode, sort
from passes.follow import leading
from passes.order import contradiction, starts_by_hop, with_params
from passes.regions import blocks

aten = torch.ops.aten

Pays = Callable[[fx.Node, bool], bool]
"""Of a hop, which may be one of the first gathers or of the last reduces: is it worth its copies to be in a bucket?"""

ENDS = 4
"""Stretches, the first that gather and the last that reduce: an embedding's, and the three blocks next to it."""


def _anywhere(start: fx.Node, at_end: bool) -> bool:
    return True


def bucket(
    graph: fx.Graph, names: Sequence[str], order: Sequence[ops.Hop] | None = None, pays: Pays = _anywhere
) -> fx.Graph:
    """`names` are the parameters in the order in which the model registers them, `order` the one that the ranks agreed
    on, of buckets; `pays` says of a hop whether it is worth its copies to be in one. Edits in place."""
    mode = fake_mode(graph)
    packed: dict[fx.Node, Piece] = {}
    for starts in choose_buckets(graph, names, pays) if order is None else agreed_buckets(graph, order):
        merge(graph, starts, Writer(graph, mode), packed)
    stuck = sort(graph)
    if stuck:
        raise contradiction(stuck)
    graph.eliminate_dead_code()
    return graph


def agreed_buckets(graph: fx.Graph, order: Sequence[ops.Hop]) -> list[list[fx.Node]]:
    """The starts of each bucket of an order, of more than one, in the order of the graph."""
    starts = starts_by_hop(graph)
    whole = [hop for hop in order if hop.piece[0] == 0]
    groups = [[starts[with_params(hop, param)].pop() for param in hop.params] for hop in whole]
    return sorted((group for group in groups if len(group) > 1), key=min)


def choose_buckets(graph: fx.Graph, names: Sequence[str], pays: Pays = _anywhere) -> list[list[fx.Node]]:
    """The starts of each bucket of more than one, in the order of the graph."""
    place = {name: i for i, name in enumerate(names)}
    stretch = _stretches(graph)
    at_end = _at_ends(stretch)
    groups: dict[tuple[object, ...], list[fx.Node]] = {}
    for start in ops.hops(graph):
        if not pays(start, start in at_end):
            continue
        hop, value = ops.hop(start), start.args[0].meta["val"]
        key = (hop.kind, hop.axis, hop.purpose, hop.again, value.dtype, stretch[start])
        groups.setdefault(key, []).append(start)
    return [sorted(g, key=lambda start: place[ops.hop(start).params[0]]) for g in groups.values() if len(g) > 1]


def _stretches(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each start the stretch of compute of one block in which its parameter is first needed, or its gradient made.
    What leads to a gather (casts, earlier hops) is no compute of a block: it goes where the gather goes."""
    lead = leading(graph) | set(graph.find_nodes(op="call_function", target=ops.compact))
    compute = [n for n in graph.nodes if n.op == "call_function" and not ops.is_hop(n) and n not in lead]
    block_at = dict(zip(compute, blocks(compute), strict=True))
    at: dict[fx.Node, int] = {}
    count, block = 0, ""
    for node in graph.nodes:
        here = block_at.get(node, block)
        count, block = count + (here != block), here
        at[node] = count
    for node in reversed(graph.nodes):
        if node in lead:
            at[node] = min((at[user] for user in node.users), default=at[node])
    return {start: at[start] for start in ops.hops(graph)}


def _at_ends(stretch: dict[fx.Node, int]) -> set[fx.Node]:
    """The gathers of the first stretches that have any, and the reduces of the last ones."""
    climbs, descends = _directions(stretch)
    ends = {*sorted(set(climbs.values()))[:ENDS]}, {*sorted(set(descends.values()))[-ENDS:]}
    return {start for start, at in climbs.items() if at in ends[0]} | {s for s, at in descends.items() if at in ends[1]}


def outermost(graph: fx.Graph) -> set[fx.Node]:
    """The gathers of the first and the last stretch that have any, and the reduces of such ones."""
    found: set[fx.Node] = set()
    for places in _directions(_stretches(graph)):
        ends = (min(places.values(), default=0), max(places.values(), default=0))
        found |= {start for start, at in places.items() if at in ends}
    return found


def _directions(stretch: dict[fx.Node, int]) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    climbs = {start: at for start, at in stretch.items() if start.target is ops.all_gather}
    return climbs, {start: at for start, at in stretch.items() if start not in climbs}


@dataclass(frozen=True)
class Piece:
    """Where a value is in a bucket."""

    bucket: fx.Node
    """[rows, columns]"""
    columns: tuple[int, ...]
    """of each piece of the bucket"""
    index: int


def merge(graph: fx.Graph, starts: Sequence[fx.Node], write: Writer, packed: dict[fx.Node, Piece]) -> None:
    """One hop in the place of several. `packed` says which values are pieces of an earlier bucket."""
    first, waits = starts[0], [next(iter(start.users)) for start in starts]
    write.module = first.meta.get("module", "")
    carried = [name for start in starts for name in ops.hop(start).params]
    with graph.inserting_before(min(starts)):
        x, columns = _packed([start.args[0] for start in starts], rows_of(starts), write, packed)
        start = write(first.target, x, *first.args[1:], **{**first.kwargs, "params": carried})
        wait = write(ops.wait, start)
        parts = write(aten.split_with_sizes.default, wait, list(columns), 1)
    for i, old in enumerate(waits):
        with graph.inserting_before(min(old.users)):
            new = _unpacked(parts, i, old, write)
        packed[new] = Piece(wait, columns, i)
        old.replace_all_uses_with(new)
    for node in (*waits, *starts):
        graph.erase_node(node)


def rows_of(starts: Sequence[fx.Node]) -> int:
    """Into how many rows a value has to be packed: for a gather its own part is one; a reduce-scatter, and those that
    follow it directly, take rows apart; an all-to-all moves them."""
    rows = {_scattered(start) for start in starts}
    return rows.pop() if len(rows) == 1 else ops.hop(starts[0]).size


def _scattered(start: fx.Node) -> int:
    if start.target is ops.all_to_all:
        return ops.hop(start).size
    if start.target is not ops.reduce_scatter:
        return 1
    after = list(next(iter(start.users)).users)
    return ops.hop(start).size * (_scattered(after[0]) if len(after) == 1 and ops.is_start(after[0]) else 1)


def _packed(
    values: Sequence[fx.Node], rows: int, write: Writer, packed: dict[fx.Node, Piece]
) -> tuple[fx.Node, tuple[int, ...]]:
    """The bucket, and the columns of each value in it. Values that are a whole bucket already stay where they are."""
    first = packed.get(values[0])
    whole = [replace(first, index=i) for i in range(len(first.columns))] if first else None
    if first and [packed.get(v) for v in values] == whole and rows in (1, first.bucket.meta["val"].shape[0]):
        return first.bucket, first.columns
    columns = tuple(prod(v.meta["val"].shape) // rows for v in values)
    views = [write(aten.view.default, v, [rows, n]) for v, n in zip(values, columns, strict=True)]
    return write(aten.cat.default, views, 1), columns


def _unpacked(parts: fx.Node, index: int, old: fx.Node, write: Writer) -> fx.Node:
    """A piece of a bucket, shaped as the value that it takes the place of."""
    write.module = min(old.users).meta.get("module", write.module)
    part = write(operator.getitem, parts, index)
    if not part.meta["val"].is_contiguous():
        part = write(aten.clone.default, part, memory_format=torch.contiguous_format)
    return write(aten.view.default, part, list(old.meta["val"].shape))
