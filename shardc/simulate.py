"""Simulate: the order of a program, run on lanes with a clock.

Compute goes node by node. A hop goes on the lane of its axis at its start (behind the hop before it on that lane, and
behind the one that it relays), for as long as its link takes; its wait holds compute up until then. What it holds up is
exposed communication.

The bound is that of the plan, not of the order, nor of the buckets: it is taken from the graphs before they are
bucketed. Nothing that a lane has to do can begin before what leads to it, and what follows from it comes after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torch import fx

from passes import ops
from passes.accumulate import PREFIX
from passes.build import outputs, placeholders
from passes.errors import Error
from passes.regions import blocks
from shardc.footprint import footprint
from shardc.program import Program, Variant
from shardc.timeline import COMPUTE, Bound, Event, Timeline, label
from shardc.times import sent_us, times_us
from shardc.topology import Topology

Times = Mapping[fx.Node, float]


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
    calls = [(variant, program.graph(variant)) for variant in program.step(micro_batches)]
    times = {variant: times_us(graph, topology) for variant, graph in dict(calls).items()}
    clock = Clock()
    for i, (variant, graph) in enumerate(calls):
        clock.run(graph, times[variant], _name(variant, i, program, micro_batches))
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


def _name(variant: Variant, index: int, program: Program, micro_batches: int) -> str:
    number = index // (1 if program.halves[1] is None else 2)
    return variant.half if micro_batches == 1 else f"{variant.half} {number}"


class Clock:
    """Runs graphs one after the other and writes down events."""

    def __init__(self) -> None:
        self.now_us = 0.0
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
        began = []
        for node in graph.nodes:
            began.append(self.now_us)
            if ops.is_start(node):
                source = ops.relayed(node)
                relayed = self.events[flying[source]] if source else None
                flying[node] = len(self.events)
                self._start(node, us[node], name, relayed)
            elif ops.is_wait(node):
                self._wait(flying[node.args[0]])
            elif us[node] > 0:
                self._compute(block_at[node], us[node], name)
        self.began.append(began)

    def _start(self, node: fx.Node, us: float, graph: str, relayed: Event | None) -> None:
        hop = ops.hop(node)
        first = [before for before in (relayed, self.last.get(hop.axis)) if before and before.end_us > self.now_us]
        behind = max(first, key=lambda before: before.end_us, default=None)
        begin_us = behind.end_us if behind else self.now_us
        event = Event(
            hop.axis,
            f"{hop.purpose} {label(hop.params)}",
            graph,
            begin_us,
            begin_us + us,
            hop,
            ops.moved_bytes(node),
            issued_us=self.now_us,
            behind=behind.name if behind else "",
        )
        self.last[hop.axis] = event
        self.events.append(event)

    def _wait(self, index: int) -> None:
        event = self.events[index]
        self.events[index] = replace(event, exposed_us=max(0.0, event.end_us - self.now_us))
        self.now_us = max(self.now_us, event.end_us)

    def _compute(self, block: str, us: float, graph: str) -> None:
        """Goes on with the event before where that is of the same block and has ended just now."""
        begin_us, self.now_us = self.now_us, self.now_us + us
        before = self.events[self.computing] if self.computing >= 0 else None
        if before and (before.name, before.graph, before.end_us) == (block or "model", graph, begin_us):
            self.events[self.computing] = replace(before, end_us=self.now_us)
        else:
            self.computing = len(self.events)
            self.events.append(Event(COMPUTE, block or "model", graph, begin_us, self.now_us))


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


# The bound


@dataclass
class _Job:
    us: float
    lane: str
    work_us: float
    """at full bandwidth"""
    needs: list[int]
    head_us: float = 0.0
    """of the longest chain that leads to it"""
    tail_us: float = 0.0
    """of the longest chain that follows"""


def bound_of(program: Program, topology: Topology, variants: Iterable[Variant]) -> Bound:
    """Of a step that makes these calls."""
    step = _Step(program, topology)
    for variant in variants:
        step.add(variant)
    return step.bound()


class _Step:
    """All nodes of a step, before buckets, and what each needs, over the borders of calls too."""

    def __init__(self, program: Program, topology: Topology):
        self.program, self.topology = program, topology
        self.drafts: dict[Variant, tuple[fx.Graph, Times]] = {}
        self.jobs: list[_Job] = []
        self.results: list[int] = []
        self.saved: list[int | None] = []
        """of the forward before"""
        self.copies: dict[str, int] = {}
        self.sums: dict[str, int] = {}
        """by parameter name"""

    def add(self, variant: Variant) -> None:
        """A call after those before it."""
        if variant not in self.drafts:
            graph = self.program.draft(variant)
            self.drafts[variant] = graph, times_us(graph, self.topology)
        graph, us = self.drafts[variant]
        given = self._given(graph, variant)
        number: dict[fx.Node, int] = {}
        for node in graph.nodes:
            number[node] = len(self.jobs)
            needs = given.get(node, []) if node.op == "placeholder" else [number[n] for n in node.all_input_nodes]
            is_start = ops.is_start(node)
            work = sent_us(node, self.topology) if is_start else us[node]
            self.jobs.append(_Job(us[node], ops.hop(node).axis if is_start else COMPUTE, work, needs))
        if variant.half == "backward":
            self.sums = {name: number[node] for name, node in outputs(graph).items()}
        else:
            results, saved, copies = (*outputs(graph), {})[:3]
            self.results = [number[node] for node in results if isinstance(node, fx.Node)]
            self.saved = [number.get(node) for node in saved]
            self.copies |= {name: number[node] for name, node in copies.items()}

    def _given(self, graph: fx.Graph, variant: Variant) -> dict[fx.Node, list[int]]:
        """What a call's placeholders wait for: copies, or saved values, then tangents, then sums of gradients."""
        nodes = list(placeholders(graph).values())
        if variant.half == "forward":
            layouts = self.program.layouts
            names = {node: layouts[node.name].name for node in nodes if node.name in layouts}
            return {node: [self.copies[name]] for node, name in names.items() if name in self.copies}
        saved = {node: [i] for node, i in zip(nodes, self.saved, strict=False) if i is not None}
        sums = {PREFIX + name: p.layout.name for name, p in variant.accumulated}
        tangents = {node: self.results for node in nodes[len(self.saved) :] if node.name not in sums}
        return saved | tangents | {node: [self.sums[sums[node.name]]] for node in nodes if node.name in sums}

    def bound(self) -> Bound:
        for job in self.jobs:
            job.head_us = max((self.jobs[i].head_us + self.jobs[i].us for i in job.needs), default=0.0)
        for job in reversed(self.jobs):
            for i in job.needs:
                self.jobs[i].tail_us = max(self.jobs[i].tail_us, job.us + job.tail_us)
        lanes: dict[str, list[_Job]] = {}
        for job in self.jobs:
            if job.us > 0:
                lanes.setdefault(job.lane, []).append(job)
        critical_us = max((job.head_us + job.us + job.tail_us for job in self.jobs), default=0.0)
        return Bound({lane: _lane_bound(jobs) for lane, jobs in lanes.items()}, critical_us)


def _lane_bound(jobs: Sequence[_Job]) -> float:
    """Whichever jobs one takes: the first of them cannot begin before its head, the last leaves its tail to do."""
    best_us, work_us, tail_us = 0.0, 0.0, inf
    for job in sorted(jobs, key=lambda job: -job.head_us):
        work_us, tail_us = work_us + job.work_us, min(tail_us, job.tail_us)
        best_us = max(best_us, job.head_us + work_us + tail_us)
    return best_us
