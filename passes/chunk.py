"""Chunk: a parameter travels in pieces where there is nothing else to hide the hops of its chain behind.

    def forward(w: f32[2, 4], x: f32[2, 8]):
        'layers.0'
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
        f: f32[4, 4] = wait(a)
        b: f32[8, 4] = all_gather(f, 'gpu', 2, purpose='gather', params=['w'])
        g: f32[8, 4] = wait(b)
        y: f32[2, 4] = mm(x, g)
        return [y]

becomes, in two pieces,

    def forward(w: f32[2, 4], x: f32[2, 8]):
        'layers.0'
        view: f32[1, 8] = view(w, [1, 8])
        split_with_sizes = split_with_sizes(view, [4, 4], 1)
        getitem: f32[1, 4] = split_with_sizes[0]
        view_1: f32[1, 8] = view(w, [1, 8])
        split_with_sizes_1 = split_with_sizes(view_1, [4, 4], 1)
        getitem_1: f32[1, 4] = split_with_sizes_1[1]
        all_gather: f32[2, 4] = all_gather(getitem, 'node', 2, purpose='gather', params=['w'], piece=[0, 2])
        all_gather_1: f32[2, 4] = all_gather(getitem_1, 'node', 2, purpose='gather', params=['w'], piece=[1, 2])
        wait: f32[2, 4] = wait(all_gather)
        wait_1: f32[2, 4] = wait(all_gather_1)
        all_gather_2: f32[4, 4] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], piece=[0, 2])
        all_gather_3: f32[4, 4] = all_gather(wait_1, 'gpu', 2, purpose='gather', params=['w'], piece=[1, 2])
        wait_2: f32[4, 4] = wait(all_gather_2)
        wait_3: f32[4, 4] = wait(all_gather_3)
        cat: f32[4, 8] = cat([wait_2, wait_3], 1)
        view_2: f32[8, 4] = view(cat, [8, 4])
        y: f32[2, 4] = mm(x, view_2)
        return [y]

Each hop of a piece follows the one before it (`passes.relay`), so that the hop over nodes of one piece runs while the
hop inside a node of another does: HO-Ring (PaRO, arXiv 2310.06003), for what a schedule cannot hide.

A piece is columns of the value as a bucket would hold it, [pieces of the rung, elements]; so all ranks cut at the same
places, and the hops of a chain pass a piece on as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from passes import ops
from passes.bucket import outermost, rows_of
from passes.build import Writer, fake_mode, sort
from passes.order import with_params

aten = torch.ops.aten

Pieces = Callable[[list[fx.Node]], int]
"""Into how many pieces a chain of starts is to be cut, with nothing to hide behind."""


def chunk(graph: fx.Graph, pieces: Pieces, order: Sequence[ops.Hop] | None = None) -> fx.Graph:
    """Cuts what is gathered first and what is reduced last, or what the ranks agreed on (`passes.order`), where they
    have an order. Chains of one hop, and buckets, stay whole. Edits in place."""
    write = Writer(graph, fake_mode(graph))
    ends = outermost(graph)
    agreed = {with_params(hop, *hop.params): hop.piece[1] for hop in order or ()}
    for chain in list(chains(graph)):
        if order is not None:
            count = agreed[ops.hop(chain[0])]
        else:
            count = pieces(chain) if len(chain) > 1 and chain[0] in ends else 1
        if count > 1:
            _cut(graph, chain, count, write)
    sort(graph)
    return graph


def chains(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The starts that take each other's results, of one parameter."""
    for start in ops.hops(graph):
        if ops.is_wait(start.args[0]) or len(ops.hop(start).params) > 1:
            continue
        chain = [start]
        while following := [s for wait in chain[-1].users for s in wait.users if ops.is_start(s)]:
            chain.append(following[0])
        yield chain


def _cut(graph: fx.Graph, chain: Sequence[fx.Node], count: int, write: Writer) -> None:
    write.module = chain[0].meta.get("module", "")
    value, rows = chain[0].args[0], rows_of(chain[:1])
    columns = value.meta["val"].numel() // rows
    count = min(count, columns)
    sizes = [columns * (i + 1) // count - columns * i // count for i in range(count)]
    with graph.inserting_before(chain[0]):
        carried = [_taken(value, rows, sizes, i, write) for i in range(count)]
    for start in chain:
        old = next(iter(start.users))
        with graph.inserting_before(old):
            starts = [_piece(start, x, (i, count), write) for i, x in enumerate(carried)]
            carried = [write(ops.wait, it) for it in starts]
        others = [user for user in old.users if user not in chain]
        if others:
            with graph.inserting_before(min(others)):
                write.module = min(others).meta.get("module", write.module)
                whole = write(aten.cat.default, carried, 1)
                whole = write(aten.view.default, whole, list(old.meta["val"].shape))
            old.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in chain)
    for start in reversed(chain):
        graph.erase_node(next(iter(start.users)))
        graph.erase_node(start)


def _taken(value: fx.Node, rows: int, sizes: list[int], index: int, write: Writer) -> fx.Node:
    """A piece of a value. Nothing that leads to one is shared with others, so that none has to come first."""
    flat = write(aten.view.default, value, [rows, sum(sizes)])
    part = write(operator.getitem, write(aten.split_with_sizes.default, flat, sizes, 1), index)
    if part.meta["val"].is_contiguous():
        return part
    return write(aten.clone.default, part, memory_format=torch.contiguous_format)


def _piece(start: fx.Node, x: fx.Node, piece: tuple[int, int], write: Writer) -> fx.Node:
    return write(start.target, x, *start.args[1:], **{**start.kwargs, "piece": list(piece)})
