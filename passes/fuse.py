"""Fuse: hops of a chain over neighbouring axes become one flat collective over all of their ranks.

    def joint(w: f32[2, 4], x: f32[2, 8]):
        ''
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
        b: f32[4, 4] = wait(a)
        c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
        d: f32[8, 4] = wait(c)
        y: f32[2, 4] = mm(x, d)
        return ([y], {})

becomes

    def joint(w: f32[2, 4], x: f32[2, 8]):
        ''
        all_gather: f32[8, 4] = all_gather(w, 'gpu+node', 4, purpose='gather', params=['w'], again=True)
        wait: f32[8, 4] = wait(all_gather)
        interleave: f32[8, 4] = interleave(wait, [2, 2])
        y: f32[2, 4] = mm(x, interleave)
        return ([y], {})

A flat collective has fewer hops and more steps, and holds all of its lanes. A group has its ranks in their own order,
outer axis first; on the ladder the inner axis comes first. So `interleave` brings the pieces into the ladder's order
behind a gather, and into the ranks' before a reduce-scatter, as part of copy-out and copy-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from torch import fx

from passes import ops
from passes.build import Writer, fake_mode, sort
from passes.chunk import chains

Pays = Callable[[Sequence[fx.Node]], bool]
"""Of the starts of hops that can be one: is it worth it?"""


def fuse(graph: fx.Graph, pays: Pays = lambda starts: True) -> fx.Graph:
    """Hops that only hand on to each other, of one move; before buckets. Edits in place."""
    write = Writer(graph, fake_mode(graph))
    for chain in list(chains(graph)):
        for starts in _runs(chain):
            if len(starts) > 1 and pays(starts):
                _fuse(graph, starts, write)
    sort(graph)
    graph.eliminate_dead_code()
    return graph


def _runs(chain: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The parts of a chain that are one move in one format, and whose inner values nobody else uses."""
    run: list[fx.Node] = []
    for start in chain:
        if run and not (_alike(run[-1]) == _alike(start) and _only_for(run[-1], start)):
            yield run
            run = []
        run.append(start)
    yield run


def _alike(start: fx.Node) -> tuple[object, ...]:
    hop = ops.hop(start)
    exchanged = start if start.target is ops.all_to_all else None  # summed in between
    return hop.kind, hop.purpose, hop.again, hop.wire, exchanged


def _only_for(start: fx.Node, following: fx.Node) -> bool:
    waits = list(start.users)
    return len(waits) == 1 and list(waits[0].users) == [following]


def _fuse(graph: fx.Graph, starts: Sequence[fx.Node], write: Writer) -> None:
    first, last = starts[0], next(iter(starts[-1].users))
    inner_first = starts[::-1] if first.target is ops.all_gather else starts
    hops = [ops.hop(start) for start in inner_first]
    sizes = [hop.size for hop in hops]
    axis, value = "+".join(hop.axis for hop in hops), first.args[0]
    write.module = first.meta.get("module", "")
    with graph.inserting_before(first):
        if first.target is ops.reduce_scatter:
            value = write(ops.interleave, value, sizes[::-1])
        result = write(ops.wait, write(first.target, value, axis, prod(sizes), **first.kwargs))
        if first.target is ops.all_gather:
            result = write(ops.interleave, result, sizes)
    last.replace_all_uses_with(result)
    for start in reversed(starts):
        graph.erase_node(next(iter(start.users)))
        graph.erase_node(start)
