"""Beside: what hops on Gloo take of memory beside the values that they make.

A value for ranks that are near lies in a room until they have read it (`shardc.near`), and what such ranks gather is in
an arena until none of them needs it (`shardc.arena`). They may be behind: as far as the next wait for a hop that they
have yet to start, for no rank comes past that. Rooms and arenas keep their memory for what comes next. Of what comes
from other hosts to be summed there is a piece of each rank (`shardc.messages`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import fx

from passes import ops
from passes.build import outputs, placeholders
from passes.memory import Life, levels_of, lives
from passes.text import value_of
from shardc.arena import pages
from shardc.near import WASTE
from shardc.times import arrives_in_arena

if TYPE_CHECKING:
    from shardc.topology import Topology


class Flights:
    """Hops of a graph, by the positions of their starts and waits."""

    def __init__(self, graph: fx.Graph):
        position = {node: i for i, node in enumerate(graph.nodes)}
        self.last = len(position) - 1
        self.found = {start: (position[start], position[_wait_of(start)]) for start in ops.hops(graph)}
        along: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for start, flight in self.found.items():
            along[ops.hop(start).axis].append(flight)
        self.starts = {axis: [begin for begin, _ in flights] for axis, flights in along.items()}
        self.waits = {
            axis: [*accumulate((end for _, end in reversed(flights)), min)][::-1] for axis, flights in along.items()
        }
        """along each axis: of a hop or any that starts later, the first"""

    def life(self, start: fx.Node, size_bytes: int) -> Life:
        """Of bytes that live from the start of a hop to its wait."""
        return Life(start, size_bytes, *self.found[start], {start})

    def until_others(self, life: Life, axis: str) -> Life:
        """Of what ranks along an axis need, too, that may be behind."""
        later = bisect_right(self.starts.get(axis, ()), life.death)
        return replace(life, death=next(iter(self.waits.get(axis, ())[later : later + 1]), self.last))


def _wait_of(start: fx.Node) -> fx.Node:
    """That of a hop, or of the chain that it is in."""
    while (wait := ops.wait_of(start)) is None:
        start = next(iter(start.users))
    return wait


# Rooms


def rooms_bytes(graphs: Iterable[fx.Graph], shared: Topology) -> int:
    """As ranks make them, a room where none fits that is free."""
    rooms: dict[str, list[Life]] = {}
    for graph in graphs:
        rooms = {axis: [replace(room, death=-1) for room in known] for axis, known in rooms.items()}
        for life in _sent(graph, shared):
            known = rooms.setdefault(ops.hop(life.node).axis, [])
            fitting = (i for i, it in enumerate(known) if life.bytes <= it.bytes <= WASTE * pages(life.bytes))
            at = next((i for i in fitting if known[i].death < life.birth), len(known))
            size_bytes = known[at].bytes if at < len(known) else pages(life.bytes)
            known[at : at + 1] = [replace(life, bytes=size_bytes)]
    return sum(room.bytes for known in rooms.values() for room in known)


def _sent(graph: fx.Graph, shared: Topology) -> Iterator[Life]:
    """To ranks that are near, or may be, but for what is gathered in place: a gather the same to all, others each piece
    to another rank."""
    flights = Flights(graph)
    for start in flights.found:
        hop = ops.hop(start)
        in_place = hop.kind == "all_gather" and shared.is_near(hop.axis)
        if hop.kind != "all_reduce" and not in_place and not _is_far(hop, shared):
            size_bytes = value_of(start.args[0]).nbytes if hop.kind == "all_gather" else ops.moved_bytes(start)
            yield flights.until_others(flights.life(start, size_bytes), hop.axis)


def received(graph: fx.Graph, shared: Topology) -> Iterator[Life]:
    """From ranks of other hosts, to be summed."""
    flights = Flights(graph)
    for start in flights.found:
        if ops.hop(start).kind == "reduce_scatter" and _is_far(ops.hop(start), shared):
            yield flights.life(start, ops.moved_bytes(start))


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


def arena_bytes(graphs: Sequence[fx.Graph], shared: Topology) -> list[int]:
    """In each call, a rank's share of the most that is there at once."""
    most, copies_bytes = [], 0
    given: dict[int, str] = {}
    for graph in graphs:
        axes, flights = in_arena(graph, shared, given), Flights(graph)
        there = [
            replace(life, bytes=life.bytes // shared.group_size(axes[life.node]))
            for life in lives(graph, axes)
            if axes.get(life.node)
        ]
        late = (flights.until_others(life, axes[life.node]) for life in there)
        most.append(copies_bytes + max(levels_of(late, len(graph.nodes))))
        given = {}
        if isinstance(outputs(graph), tuple):
            _, taken, copies = (*outputs(graph), {})[:3]
            kept = set(copies.values())
            if kept:
                copies_bytes = sum(life.bytes for life in there if not life.values.isdisjoint(kept))
            of = {node: axes[life.node] for life in there if life.values.isdisjoint(kept) for node in life.values}
            given = {i: of[node] for i, node in enumerate(taken) if node in of}
    return most
