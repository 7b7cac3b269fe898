"""Beside: what hops on Gloo take of memory beside the values that they make.

A value for ranks that are near lies in a room until they have read it (`shardc.near`), and what such ranks gather is in
an arena until none of them needs it (`shardc.arena`). They may be behind: as far as the next wait, in this call or one
that follows, for a hop that they have yet to start, for no rank comes past that. Rooms and arenas keep their memory for
what comes next. Of what comes from other hosts to be summed there is a piece of each rank (`shardc.messages`), and
Gloo's all-reduces have scratch of their own.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import fx

from passes import ops
from passes.build import outputs, placeholders
from passes.memory import Life, lives
from passes.text import value_of
from shardc.arena import pages
from shardc.near import WASTE
from shardc.times import arrives_in_arena

if TYPE_CHECKING:
    from shardc.topology import Topology

AT_ONCE = 2
"""threads of a group of Gloo's, each with one collective"""
SEGMENT = 1 << 20
"""bytes at most that an all-reduce of Gloo's sends at once"""


class Flights:
    """Hops of calls that follow each other, by the positions of their starts and waits; positions go on from call to
    call."""

    def __init__(self, graphs: Sequence[fx.Graph]):
        self.begins = [0, *accumulate(len(graph.nodes) for graph in graphs)]
        """of each call, and the end of the last"""
        self.found: list[tuple[fx.Node, int, int]] = []
        for graph, begin in zip(graphs, self.begins, strict=False):
            position = {node: begin + i for i, node in enumerate(graph.nodes)}
            self.found += [(start, position[start], position[_wait_of(start)]) for start in ops.hops(graph)]
        along: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for start, begin, end in self.found:
            along[ops.hop(start).axis].append((begin, end))
        self.starts = {axis: [begin for begin, _ in flights] for axis, flights in along.items()}
        self.waits = {
            axis: [*accumulate((end for _, end in reversed(flights)), min)][::-1] for axis, flights in along.items()
        }
        """along each axis: of a hop or any that starts later, the first"""

    def until_others(self, position: int, axis: str) -> int:
        """Until when ranks along an axis may need what this one does until a position: they may be behind."""
        later = bisect_right(self.starts.get(axis, ()), position)
        return next(iter(self.waits.get(axis, ())[later : later + 1]), self.begins[-1])


def _wait_of(start: fx.Node) -> fx.Node:
    """That of a hop, or of the chain that it is in."""
    while (wait := ops.wait_of(start)) is None:
        start = next(iter(start.users))
    return wait


# Rooms


def rooms_bytes(graphs: Sequence[fx.Graph], shared: Topology) -> int:
    """As ranks make them in two steps of these calls, a room where none fits that is free."""
    rooms: dict[str, list[tuple[int, int]]] = defaultdict(list)
    """along each axis: how large they are, and until when they are read"""
    flights = Flights([*graphs, *graphs])
    for start, begin, end in flights.found:
        axis, size_bytes = ops.hop(start).axis, _sent_bytes(start, shared)
        if size_bytes:
            known = rooms[axis]
            fitting = (i for i, (size, _) in enumerate(known) if size_bytes <= size <= WASTE * pages(size_bytes))
            free = (i for i in fitting if known[i][1] < begin)
            at = min(free, key=lambda i: known[i][0], default=len(known))
            room_bytes = known[at][0] if at < len(known) else pages(size_bytes)
            known[at : at + 1] = [(room_bytes, flights.until_others(end, axis))]
    return sum(size for known in rooms.values() for size, _ in known)


def scratch_bytes(graphs: Sequence[fx.Graph]) -> int:
    """Of Gloo's own, for all-reduces: each receives into two segments, and along an axis so many go on at once."""
    segments: dict[str, list[int]] = defaultdict(list)
    for graph in graphs:
        for start in ops.hops(graph):
            hop = ops.hop(start)
            if hop.kind == "all_reduce":
                segments[hop.axis].append(min(SEGMENT, -(-value_of(start).nbytes // (2 * hop.size))))
    return sum(2 * sum(sorted(sizes)[-AT_ONCE:]) for sizes in segments.values())


def _sent_bytes(start: fx.Node, shared: Topology) -> int:
    """To ranks that are near, or may be, but for what is gathered in place: a gather the same to all, others each piece
    to another rank."""
    hop = ops.hop(start)
    in_place = hop.kind == "all_gather" and shared.is_near(hop.axis)
    if hop.kind == "all_reduce" or in_place or _is_far(hop, shared):
        return 0
    return value_of(start.args[0]).nbytes if hop.kind == "all_gather" else ops.moved_bytes(start)


def received(graph: fx.Graph, shared: Topology) -> Iterator[Life]:
    """From ranks of other hosts, to be summed."""
    for start, begin, end in Flights([graph]).found:
        if ops.hop(start).kind == "reduce_scatter" and _is_far(ops.hop(start), shared):
            yield Life(start, ops.moved_bytes(start), begin, end, {start})


def _is_far(hop: ops.Hop, shared: Topology) -> bool:
    """Whether ranks along the axis of a hop are on different hosts: where it is known which are near, the others."""
    return any(link.near for _, link in shared.links) and not any(map(shared.is_near, hop.axis.split("+")))


# Arenas


def in_arena(graph: fx.Graph, shared: Topology, given: Mapping[int, str]) -> dict[fx.Node, str]:
    """Of values in memory that ranks have in common, the axis along which these are, by the node that makes them, or a
    placeholder. What arrives in a part of one takes nothing more: no axis."""
    found = {node: given[i] for i, node in enumerate(placeholders(graph).values()) if i in given}
    for start in ops.hops(graph):
        hop = ops.hop(start)
        if hop.kind == "all_gather" and shared.is_near(hop.axis):
            found[start] = hop.axis
        elif arrives_in_arena(start, shared):
            found[start] = ""
    return found


def arena_bytes(graphs: Sequence[fx.Graph], shared: Topology) -> list[Counter[str]]:
    """Of each call, in two steps of them: how far what it gathers reaches in the arena of each axis, a rank's share.

    Blocks lie apart, so they reach farther than they are large; and as ranks that are behind still need some of the
    step before, they do not lie where they lay in that.
    """
    flights = Flights([*graphs, *graphs])
    length = flights.begins[len(graphs)]
    found = [Counter[str]() for _ in graphs]
    taken: dict[str, list[_Block]] = defaultdict(list)
    blocks = sorted(_blocks(graphs, shared), key=lambda block: block.birth)
    for step_begin in (0, length):
        for block in blocks:
            birth, death = step_begin + block.birth, step_begin + block.death
            there = taken[block.axis] = [other for other in taken[block.axis] if other.death >= birth]
            offset = _smallest_gap(there, block.bytes)
            there.append(replace(block, offset=offset, death=flights.until_others(death, block.axis)))
            found[block.call] |= {block.axis: (offset + block.bytes) // shared.group_size(block.axis)}
    return found


@dataclass(frozen=True)
class _Block:
    """Of an arena, by positions in a step."""

    axis: str
    bytes: int
    call: int
    birth: int
    death: int
    offset: int = 0


def _blocks(graphs: Sequence[fx.Graph], shared: Topology) -> list[_Block]:
    """Of one step. What a forward saves is there until its backward is through with it, a copy until the step ends."""
    found: list[_Block] = []
    begins = [0, *accumulate(len(graph.nodes) for graph in graphs)]
    saved: dict[int, int] = {}
    """of values that the forward before has saved, by position: which block they are in"""
    for call, (graph, begin) in enumerate(zip(graphs, begins, strict=False)):
        position, inputs = {node: i for i, node in enumerate(graph.nodes)}, list(placeholders(graph).values())
        axes = in_arena(graph, shared, {i: found[at].axis for i, at in saved.items()})
        of = {inputs[i]: at for i, at in saved.items()}
        for life in lives(graph, axes):
            if life.node in of:
                found[of[life.node]] = replace(found[of[life.node]], death=begin + life.death)
            elif axes.get(life.node):
                part = life.node.args[0]  # room for all is made when the first of it is asked for
                birth = position[part] if axes.get(part) == "" else life.birth
                of |= dict.fromkeys(life.values, len(found))
                found.append(_Block(axes[life.node], pages(life.bytes), call, begin + birth, begin + life.death))
        saved = {}
        if isinstance(outputs(graph), tuple):
            _, taken, copies = (*outputs(graph), {})[:3]
            kept = {of[node] for node in copies.values() if node in of}
            for at in kept:
                found[at] = replace(found[at], death=begins[-1])
            saved = {i: of[node] for i, node in enumerate(taken) if node in of and of[node] not in kept}
    return found


def _smallest_gap(there: Iterable[_Block], size_bytes: int) -> int:
    """Where the smallest gap begins that is large enough; the last has no end."""
    taken = sorted((block.offset, block.offset + block.bytes) for block in there)
    begins, ends = [0, *(end for _, end in taken)], [*(begin for begin, _ in taken), sys.maxsize]
    gaps = ((end - begin, begin) for begin, end in zip(begins, ends, strict=True))
    return min(gap for gap in gaps if gap[0] >= size_bytes)[1]
