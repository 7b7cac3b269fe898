"""Record: a lowering whose graphs write down what they do, and when. Nothing else pays for it.

Compute is written down stretch by stretch: what one block does between two hops, which is a region where Inductor
compiles them. A stretch is between two marks, which are nodes of the graph. Of a hop is written down when it is put on
its lane, when it has come, and from when to when compute stood still in its wait.

When a hop has come is seen by who waits for it besides compute: on a GPU a stream of the lane, elsewhere a thread of
the lane. Compiled compute keeps Python from running other threads, so what comes behind the back of one kernel is seen
when that is over, but no later than compute has it.

A lane does one thing after the other, as NCCL does: a hop begins when it was put on its lane, and what it relays and
the hop before it on the lane have come. Where Gloo is at two of a lane at once, the second begins when the first has
come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import getitem
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import fx
from torch.profiler import record_function

from passes import ops
from passes.build import copy
from passes.regions import blocks, is_view
from shardc.lanes import Flying, Lane
from shardc.lower import Lowering, Run, emit
from shardc.timeline import COMPUTE, Event, Lanes, named

Mark = Any
"""A moment, as a timer has it."""


class Timer(Protocol):
    """Of the device that computes."""

    def now(self) -> Mark: ...

    def come(self, axis: str, flying: Flying) -> Mark:
        """When a hop has come; it may not have yet. A lane's hops are asked for in their order."""

    def us(self, begin: Mark, mark: Mark) -> float:
        """From one mark to another, when both are reached; until then this waits. Raises what a hop has raised."""

    def close(self) -> None: ...


class HostTimer:
    """Marks are nanoseconds, those of arrivals are futures."""

    def __init__(self) -> None:
        self.queues: dict[str, SimpleQueue[tuple[Flying, Future[int]] | None]] = {}

    def now(self) -> int:
        return time.perf_counter_ns()

    def come(self, axis: str, flying: Flying) -> Future[int]:
        if axis not in self.queues:
            self.queues[axis] = SimpleQueue()
            threading.Thread(target=_see_all, args=(self.queues[axis],), daemon=True).start()
        seen: Future[int] = Future()
        self.queues[axis].put((flying, seen))
        return seen

    def us(self, begin: int, mark: int | Future[int]) -> float:
        return ((mark.result() if isinstance(mark, Future) else mark) - begin) / 1e3

    def close(self) -> None:
        for queue in self.queues.values():
            queue.put(None)


def _see_all(queue: SimpleQueue[tuple[Flying, Future[int]] | None]) -> None:
    while item := queue.get():
        flying, seen = item
        try:
            flying.come()
            seen.set_result(time.perf_counter_ns())
        except Exception as error:
            seen.set_exception(error)
        del flying, item  # what it brought may be large


class DeviceTimer:
    """Marks are events on streams of a GPU, reached when what is before them there is done."""

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: dict[str, torch.cuda.Stream] = {}

    def now(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def come(self, axis: str, flying: Flying) -> torch.cuda.Event:
        if axis not in self.streams:
            self.streams[axis] = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self.streams[axis]):
            flying.come()
            return self.now()

    def us(self, begin: torch.cuda.Event, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return begin.elapsed_time(mark) * 1e3

    def close(self) -> None:
        torch.cuda.synchronize(self.device)


@dataclass(eq=False)
class Flight:
    """A hop, and when it was where."""

    hop: ops.Hop
    relayed: Flight | None
    issued: Mark
    come: Mark = None
    waited: tuple[Mark, ...] = ()
    """from and to; of a hop that only other hops wait for, nothing"""


@dataclass(eq=False)
class Stretch:
    """Compute of one block, without a hop in between."""

    block: str
    begin: Mark
    end: Mark = None


@dataclass(eq=False)
class Call:
    """One run of a graph."""

    graph: fx.Graph
    """as the program has it"""
    stretches: list[Stretch] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    """in the order of their starts"""


class Record:
    """What was written down. In torch's own trace, stretches and hops are ranges of the same names."""

    def __init__(self, timer: Timer):
        self.timer = timer
        self.calls: list[Call] = []

    def begin_stretch(self, block: str) -> None:
        self.range = record_function(block or "model")
        self.range.__enter__()
        self.calls[-1].stretches.append(Stretch(block, self.timer.now()))

    def end_stretch(self) -> None:
        self.calls[-1].stretches[-1].end = self.timer.now()
        self.range.__exit__(None, None, None)

    def lanes(self, names: Sequence[str], began: Mark, ended: Mark) -> Lanes:
        """A step of the calls so far, which have these names."""
        us = partial(self.timer.us, began)
        events: list[Event] = []
        last: dict[str, Event] = {}
        for call, name in zip(self.calls, names, strict=True):
            events += [Event(COMPUTE, s.block or "model", name, us(s.begin), us(s.end)) for s in call.stretches]
            of: dict[Flight | None, Event] = {}
            for start, flight in zip(ops.hops(call.graph), call.flights, strict=True):
                assert ops.hop(start) == flight.hop, f"{flight.hop} ran in the place of {ops.hop(start)}"
                before = [e for e in (of.get(flight.relayed), last.get(flight.hop.axis)) if e]
                of[flight] = last[flight.hop.axis] = _event(flight, name, ops.moved_bytes(start), before, us)
            events += of.values()
        return Lanes(tuple(sorted(events, key=lambda e: e.start_us)), us(ended))


def _event(flight: Flight, graph: str, sent_bytes: int, before: Iterable[Event], us: Callable[[Mark], float]) -> Event:
    """`before`: what it relays, and what is on its lane."""
    hop, issued_us, waited_us = flight.hop, us(flight.issued), [us(mark) for mark in flight.waited]
    behind = max((e for e in before if e.end_us > issued_us), key=lambda e: e.end_us, default=None)
    begin_us = behind.end_us if behind else issued_us
    return Event(
        hop.axis,
        named(hop),
        graph,
        begin_us,
        max(begin_us, min([us(flight.come), *waited_us[1:]])),
        hop,
        sent_bytes,
        issued_us=issued_us,
        exposed_us=waited_us[1] - waited_us[0] if waited_us else 0.0,
        behind=behind.name if behind else "",
    )


# What runs


class Recording(Lowering):
    """Lowers as another lowering does, which it shares compiled regions and lanes with, and has it written down."""

    def __init__(self, lowering: Lowering, record: Record):
        super().__init__(lowering.backend, lowering.groups, lowering.progress, lowering.known, lowering.compiled)
        self.lanes = {axis: RecordedLane(lane, record) for axis, lane in lowering.lanes.items()}
        self.record = record

    def lowered(self, graph: fx.Graph, name: str) -> Run:
        outer = copy(graph) if self.backend == "eager" else self.outer(graph, name)
        run = emit(marked(outer, self.record), name, self)

        def recorded(args: list[Any]) -> Any:
            self.record.calls.append(Call(graph))
            return run(args)

        return recorded


def marked(graph: fx.Graph, record: Record) -> fx.Graph:
    """With a mark where a stretch begins, and one where it ends. Edits in place."""
    begin, end = record.begin_stretch, record.end_stretch
    for block, nodes in stretches(graph):
        with graph.inserting_before(nodes[0]):
            graph.call_function(begin, (block,))
        with graph.inserting_after(nodes[-1]):
            graph.call_function(end)
    return graph


def stretches(graph: fx.Graph) -> list[tuple[str, list[fx.Node]]]:
    """Of each block, compute without a hop in between; views alone are none."""
    called = [node for node in graph.nodes if node.op == "call_function"]
    compute = [node for node in called if not ops.is_hop(node)]
    block_at = dict(zip(compute, blocks(compute), strict=True))
    found = [(block, list(nodes)) for block, nodes in groupby(called, block_at.get)]
    return [(block, nodes) for block, nodes in found if block is not None and any(map(_takes_time, nodes))]


def _takes_time(node: fx.Node) -> bool:
    return node.target is not getitem and not is_view(node)


class RecordedLane(Lane):
    """A lane whose hops are written down."""

    def __init__(self, lane: Lane, record: Record):
        super().__init__(lane.group)
        self.lane, self.record = lane, record

    def start(
        self, hop: ops.Hop, source: Any, *, in_place: bool = False, into: tuple[Lane, ops.Hop] | None = None
    ) -> Any:
        """What it returns is for `wait` and for `start`, as what a lane returns."""
        relayed = source if isinstance(source, _Recorded) else None
        with record_function(str(hop)):
            flight = Flight(hop, relayed.flight if relayed else None, self.record.timer.now())
            taken = relayed.flying if relayed else source
            flying = self.lane.start(hop, taken, in_place=in_place, into=into)
        flight.come = self.record.timer.come(hop.axis, flying)
        self.record.calls[-1].flights.append(flight)
        return _Recorded(flying, flight, self.record.timer)


@dataclass(eq=False)
class _Recorded:
    """A hop under way. The record keeps the flight, and not what flies."""

    flying: Flying
    flight: Flight
    timer: Timer

    def wait(self) -> torch.Tensor:
        with record_function(f"wait for {self.flight.hop}"):
            begin = self.timer.now()
            out = self.flying.wait()
            self.flight.waited = begin, self.timer.now()
        return out
