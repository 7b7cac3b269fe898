"""Bound: what no order of a step's compute and moves can beat.

It is that of the plan, not of an order, nor of buckets: it is taken from the graphs before they are bucketed. Nothing
can begin before what leads to it is over: the longest chain, and all that one lane has to do of it. Nothing can be the
last before what follows from it, which takes as long as its longest chain, and as all that one lane has to do of it.
The hops of a chain are taken to run side by side, as they could in pieces that are small enough (`passes.chunk`).

Between a forward and its backward parameters rest where the plan says (`after_forward`): a backward gathers them when
the forward is over, not before. The training loop makes one call after the other: none computes before the one before
it has computed, whatever their hops do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import fx

from passes import ops
from passes.accumulate import PREFIX
from passes.build import outputs, placeholders
from shardc.program import Program, Variant
from shardc.timeline import COMPUTE, Bound
from shardc.times import Times, sent_us
from shardc.topology import Topology


@dataclass
class _Job:
    us: float
    lanes: tuple[str, ...]
    """that it holds: of a flat hop, those of all its axes"""
    work_us: float
    """at full bandwidth"""
    needs: list[int]


def bound_of(program: Program, topology: Topology, variants: Iterable[Variant]) -> Bound:
    """Of a step that makes these calls."""
    step = _Step(program, topology)
    for variant in variants:
        step.add(variant)
    return _bound(step.jobs)


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
        self.computed: list[int] = []
        """the job that is over when all compute of the call before is"""

    def add(self, variant: Variant) -> None:
        """A call after those before it."""
        if variant not in self.drafts:
            graph = self.program.draft(variant)
            self.drafts[variant] = graph, self.program.times_us(graph, variant.half, self.topology)
        graph, us = self.drafts[variant]
        given = self._given(graph, variant)
        number: dict[fx.Node, int] = {}
        for node in graph.nodes:
            number[node] = len(self.jobs)
            needs = given.get(node, []) if node.op == "placeholder" else [number[n] for n in _needed(node)]
            is_start = ops.is_start(node)
            if is_start and variant.half == "backward":
                needs = needs + self.results
            elif _computes(node):
                needs = needs + self.computed
            takes_us = 0.0 if ops.is_wait(node) else us[node]  # buckets launch less often
            work = sent_us(node, self.topology) if is_start else takes_us
            lanes = self.topology.lanes(ops.hop(node).axis) if is_start else (COMPUTE,)
            self.jobs.append(_Job(takes_us, lanes, work, needs))
        self._compute_in_turn([i for node, i in number.items() if _computes(node)])
        if variant.half == "backward":
            self.sums = {name: number[node] for name, node in outputs(graph).items()}
        else:
            results, saved, copies = (*outputs(graph), {})[:3]
            self.results = [number[node] for node in results if isinstance(node, fx.Node)]
            self.saved = [number.get(node) for node in saved]
            self.copies |= {name: number[node] for name, node in copies.items()}

    def _compute_in_turn(self, numbers: list[int]) -> None:
        """All compute of a call, which takes as long as it does one by one, behind that of the call before."""
        whole = _Job(sum(self.jobs[i].us for i in numbers), (), 0.0, self.computed)
        over = _Job(0.0, (), 0.0, [*numbers, len(self.jobs)])
        self.computed = [len(self.jobs) + 1]
        self.jobs += [whole, over]

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


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and not ops.is_hop(node)


def _needed(node: fx.Node) -> list[fx.Node]:
    """A hop that takes another's result can run piece by piece beside it; both are over when it has been waited for."""
    if ops.is_start(node) and ops.is_wait(node.args[0]):
        return _needed(node.args[0].args[0])
    if not ops.is_wait(node):
        return node.all_input_nodes
    chain = [node.args[0]]
    while ops.is_wait(behind := chain[-1].args[0]):
        chain.append(behind.args[0])
    return chain


def _bound(jobs: Sequence[_Job]) -> Bound:
    followers: list[list[int]] = [[] for _ in jobs]
    for i, job in enumerate(jobs):
        for before in job.needs:
            followers[before].append(i)
    heads_us = _before_us(jobs, [job.needs for job in jobs])
    tails_us = _before_us(jobs[::-1], [_mirrored(f, len(jobs)) for f in reversed(followers)])[::-1]
    lanes: dict[str, list[tuple[float, float, float]]] = {}
    critical_us = 0.0
    for job, head_us, tail_us in zip(jobs, heads_us, tails_us, strict=True):
        critical_us = max(critical_us, head_us + job.us + tail_us)
        for lane in job.lanes if job.us > 0 else ():
            lanes.setdefault(lane, []).append((head_us, job.work_us, tail_us))
    return Bound({lane: _lane_bound(jobs) for lane, jobs in lanes.items()}, critical_us)


def _lane_bound(jobs: Iterable[tuple[float, float, float]]) -> float:
    """The least time in which a lane does jobs (head, work, tail), if it may put one down to do another: whichever is
    ready and has the longest tail comes first (Jackson's preemptive schedule; Carlier, 1982)."""
    coming = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now_us = end_us = 0.0
    while coming or ready:
        if not ready:
            now_us = max(now_us, coming[-1][0])
        while coming and coming[-1][0] <= now_us:
            _, work_us, tail_us = coming.pop()
            heappush(ready, (-tail_us, work_us))
        tail_us, work_us = heappop(ready)
        done_us = min(work_us, coming[-1][0] - now_us) if coming else work_us
        now_us += done_us
        if done_us < work_us:
            heappush(ready, (tail_us, work_us - done_us))
        else:
            end_us = max(end_us, now_us - tail_us)
    return end_us


def _mirrored(numbers: Iterable[int], count: int) -> list[int]:
    return [count - 1 - i for i in numbers]


def _before_us(jobs: Sequence[_Job], needs: Sequence[Sequence[int]]) -> list[float]:
    """When each job can begin at the earliest: behind the longest chain that leads to it, and behind all that any one
    lane has to do before it. Jobs come behind those that they need."""
    loads_us = _loads_us(jobs, needs)
    begin_us: list[float] = []
    for i, load_us in enumerate(loads_us):
        begin_us.append(max([load_us, *(begin_us[n] + jobs[n].us for n in needs[i])]))
    return begin_us


ROWS = 512
"""of the matrix of who needs whom that are looked at together"""


def _loads_us(jobs: Sequence[_Job], needs: Sequence[Sequence[int]]) -> list[float]:
    """Of all that each job needs, however far back, what the busiest lane has to do."""
    working = [i for i, job in enumerate(jobs) if job.work_us > 0]
    bit = {i: 1 << column for column, i in enumerate(working)}
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(lane for job in jobs for lane in job.lanes))}
    width = len(working) // 8 + 1
    work_us = torch.zeros(8 * width, len(lanes), dtype=torch.float64)
    for column, i in enumerate(working):
        for lane in jobs[i].lanes:
            work_us[column, lanes[lane]] = jobs[i].work_us
    reached: list[int] = []
    for of_job in needs:
        bits = 0
        for n in of_job:
            bits |= reached[n] | bit.get(n, 0)
        reached.append(bits)
    loads_us: list[float] = []
    for first in range(0, len(reached), ROWS):
        rows = b"".join(bits.to_bytes(width, "little") for bits in reached[first : first + ROWS])
        matrix = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, width, 1) >> torch.arange(8) & 1
        loads_us += (matrix.flatten(1).double() @ work_us).amax(1).tolist()
    return loads_us
