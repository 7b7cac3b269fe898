"""Simulate: the order of a program, run on lanes with a clock.

Compute goes node by node. A hop goes on the lane of its axis at its start (behind the hop before it on that lane, and
behind the one that it relays), for as long as its link takes; its wait holds compute up until then. What it holds up is
exposed communication. What launching it takes of compute follows its wait, as compute. What its bytes take slows
compute down for as long as the hop goes on: while compute waits for it, nothing. (Behind its wait it would come too
late: a backward has most of its waits at the end, so that compute came too early to what starts the last hops.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from torch import fx

from passes import ops
from passes.errors import Error
from passes.flights import LanesOf, axes_of
from passes.regions import blocks
from shardc.bound import bound_of
from shardc.footprint import footprint
from shardc.program import Program, Variant
from shardc.timeline import COMPUTE, Event, Timeline, named
from shardc.times import Times, bytes_us, without_bytes
from shardc.topology import Topology


def simulate(
    program: Program, topology: Topology | None = None, *, micro_batches: int = 1, optimizer_states: int = 2
) -> Timeline:
    """One optimizer step of `micro_batches` micro-batches: the first forward refreshes, the last backward syncs.

    topology: says how fast devices and axes are; by default the one that the program was compiled for.
    optimizer_states: values that the optimizer keeps for each element of a parameter (2 for Adam).
    Raises `Error` where the topology does not say, and for one of another shape.
    """
    topology = program.topology if topology is None else topology
    if topology.inner != program.topology.inner:
        raise Error(
            f"The program is for {program.topology}, not for {topology}.",
            fix="Trace it with a plan for the topology that is meant.",
        )
    return timeline_of(program, topology, calls_of(program, micro_batches), optimizer_states)


Calls = Sequence[tuple[Variant, fx.Graph]]
"""What a step calls, in order."""


def calls_of(program: Program, micro_batches: int) -> Calls:
    """Of an optimizer step."""
    return [(variant, program.graph(variant)) for variant in program.step(micro_batches)]


def timeline_of(program: Program, topology: Topology, calls: Calls, optimizer_states: int = 2) -> Timeline:
    """Of a step that makes these calls."""
    clock = clocked(program, topology, calls)
    held = footprint(program, calls, optimizer_states)
    points = (point for call in zip(clock.began, held.levels, strict=True) for point in zip(*call, strict=True))
    return Timeline(
        tuple(sorted(clock.events, key=lambda e: e.start_us)),
        clock.now_us,
        bound_of(program, topology, [variant for variant, _ in calls]),
        (*_changes(points), (clock.now_us, held.end_bytes)),
        held.rest_bytes,
        held.peak,
    )


def clocked(program: Program, topology: Topology, calls: Calls) -> Clock:
    """The clock that the calls of a step have gone through."""
    times = {variant: program.times_us(graph, variant.half, topology) for variant, graph in dict(calls).items()}
    times = {variant: without_bytes(us, topology) for variant, us in times.items()}
    clock = Clock(topology.lanes, lambda start: bytes_us(start, topology))
    for (variant, graph), name in zip(calls, names(calls), strict=True):
        clock.run(graph, times[variant], name)
    return clock


def names(calls: Calls) -> list[str]:
    """Of calls: forward, or forward 0 where there are several."""
    halves = [variant.half for variant, _ in calls]
    return [half if halves.count(half) == 1 else f"{half} {halves[:i].count(half)}" for i, half in enumerate(halves)]


class Clock:
    """Runs graphs one after the other and writes down events."""

    def __init__(self, lanes: LanesOf = axes_of, bytes_us: Callable[[fx.Node], float] = lambda start: 0.0) -> None:
        """`bytes_us`: what a hop takes of compute while it goes on, if compute does throughout."""
        self.lanes, self.bytes_us = lanes, bytes_us
        self.now_us = 0.0
        self.beside: list[tuple[float, float, float]] = []
        """of hops that may not be over: when they begin and end, and what they take of compute in each microsecond"""
        self.last: dict[str, Event] = {}
        """of each lane"""
        self.events: list[Event] = []
        self.computing = -1
        """the last event of compute"""
        self.began: list[list[float]] = []
        """of each graph, when each node began"""

    def run(self, graph: fx.Graph, us: Times, name: str) -> None:
        """Every hop that a graph starts it waits for, so nothing flies on into the next graph."""
        compute = [node for node in graph.nodes if node.op == "call_function" and not ops.is_hop(node)]
        block_at = dict(zip(compute, blocks(compute), strict=True))
        flying: dict[fx.Node, int] = {}
        began, block = [], ""
        for node in graph.nodes:
            began.append(self.now_us)
            if ops.is_start(node):
                source = ops.relayed(node)
                relayed = self.events[flying[source]] if source else None
                flying[node] = len(self.events)
                self._start(node, us[node], name, relayed)
            if ops.is_wait(node):
                self._wait(flying[node.args[0]])
            if us[node] > 0 and not ops.is_start(node):
                block = block_at.get(node, block)  # launches are of what they hold up
                self._compute(block, us[node], name)
        self.began.append(began)

    def _start(self, node: fx.Node, us: float, graph: str, relayed: Event | None) -> None:
        hop = ops.hop(node)
        lanes = self.lanes(hop.axis)
        before_it = (relayed, *map(self.last.get, lanes))
        first = [before for before in before_it if before and before.end_us > self.now_us]
        behind = max(first, key=lambda before: before.end_us, default=None)
        begin_us = behind.end_us if behind else self.now_us
        event = Event(
            hop.axis,
            named(hop),
            graph,
            begin_us,
            begin_us + us,
            hop,
            ops.moved_bytes(node),
            issued_us=self.now_us,
            behind=behind.name if behind else "",
        )
        self.last |= dict.fromkeys(lanes, event)
        self.events.append(event)
        if us and (takes_us := self.bytes_us(node)):
            self.beside.append((event.start_us, event.end_us, takes_us / us))

    def _wait(self, index: int) -> None:
        event = self.events[index]
        exposed_us = max(0.0, event.end_us - self.now_us)
        self.events[index] = replace(event, exposed_us=exposed_us)
        self.now_us = max(self.now_us, event.end_us)

    def _compute(self, block: str, us: float, graph: str) -> None:
        """Goes on with the event before where that is of the same block and has ended just now."""
        begin_us, self.now_us = self.now_us, self._over_us(us)
        before = self.events[self.computing] if self.computing >= 0 else None
        if before and (before.name, before.graph, before.end_us) == (block or "model", graph, begin_us):
            self.events[self.computing] = replace(before, end_us=self.now_us)
        else:
            self.computing = len(self.events)
            self.events.append(Event(COMPUTE, block or "model", graph, begin_us, self.now_us))

    def _over_us(self, us: float) -> float:
        """When compute is over that takes so long where no hop goes on beside it."""
        now_us = self.now_us
        self.beside = [it for it in self.beside if it[1] > now_us]
        while True:
            slower = 1.0 + sum(takes for begin_us, _, takes in self.beside if begin_us <= now_us)
            changes = (mark for begin_us, end_us, _ in self.beside for mark in (begin_us, end_us) if mark > now_us)
            until_us = min(changes, default=inf)
            if now_us + us * slower <= until_us:
                return now_us + us * slower
            us, now_us = us - (until_us - now_us) / slower, until_us
            self.beside = [it for it in self.beside if it[1] > now_us]


def _changes(points: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The largest level of each moment, where it is another one than before."""
    most: dict[float, int] = {}
    for us, level in points:
        most[us] = max(level, most.get(us, 0))
    before = -1
    for us, level in most.items():
        if level != before:
            yield us, level
        before = level
