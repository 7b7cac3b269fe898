"""Schedule: one order of compute and hops, so that hops run behind compute.

Lanes run side by side: one for compute, one for each process group. A hop is on its lane from its start to its wait:

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['layers.0.w'], again=True)
        f: f32[8, 8] = wait(a)
        y: f32[4, 8] = mm(x, f)
        'layers.1'
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.1.v'], again=True)
        g: f32[8, 8] = wait(b)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])

becomes

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['layers.0.w'], again=True)
        'layers.1'
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.1.v'], again=True)
        'layers.0'
        f: f32[8, 8] = wait(a)
        y: f32[4, 8] = mm(x, f)
        'layers.1'
        g: f32[8, 8] = wait(b)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])

Compute keeps its order. A stretch of it is a repeated block, or the part of one from where a gather is first needed, or
up to where a reduce is fed, to the next such place; hops go between stretches. There a lane that will be idle during
the next stretch, or would be if that took a little longer (`MARGIN`), gets its next hop: a gather that is urgent, else
a reduce (which frees memory; not a long one right before a gather that compute would have to wait for), else the gather
that is needed next, as long as what is gathered ahead fits a window of bytes. A gather is waited for right before the
stretch that needs it, everything else at the first border where that surely costs nothing (`_is_over`), for compute may
take less than it should, too; where no times are known, behind the first stretch that it went beside. Compute does not
go on while more gradients wait for their reduces than the window holds, and more than a pile of stretches makes. Which
of several gathers or reduces goes first is a rule; all `RULES` are tried, and the order that ends first is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from torch import fx

from passes import ops
from passes.build import rearrange
from passes.flights import Cost, Flight, LanesOf, axes_of, bytes_of, claimed_bytes, lay_out, needed_bytes, rest_us

MARGIN = 0.25
"""By so much of its time a stretch may take longer than it should before a lane is idle for want of a hop."""
LATER = 1.0
"""By so much of its time a reduce may take longer than it should before compute stands still for it."""
PILE = 8
"""Stretches whose gradients may wait for their reduces: those of two or three blocks."""


def schedule(
    graph: fx.Graph,
    us: Cost | None = None,
    window_bytes: int | None = None,
    pile: int = PILE,
    lanes: LanesOf = axes_of,
) -> fx.Graph:
    """Edits the order in place. `us` is what each node takes; without it a stretch takes as long as four hops.
    `window_bytes` bounds what is gathered ahead of the stretch that needs it (default: what the four largest need).
    Gradients of `pile` stretches, of those that make most, may wait for their reduces. `lanes` says what a hop over an
    axis holds while it runs."""
    constants = graph.find_nodes(op="get_attr")
    laid_out = lay_out(graph, lanes)
    best: list[fx.Node] = []
    best_us = inf
    for rules in _telling(laid_out[1]):
        tried = Lanes(*laid_out, us, window_bytes, pile, rules)
        order = tried.order(best_us)
        if order is not None:
            best, best_us = order, tried.now_us
    rearrange(graph, [*constants, *best])
    return graph


def default_window(graph: fx.Graph) -> int:
    """Bytes that the four stretches need that need most."""
    return needed_bytes(lay_out(graph)[1], 4)


HORIZON = 16
"""How many hops of a lane are looked at, in one direction."""


def by_latest(flight: Flight, latest_us: float, takes_us: float) -> tuple[float, float]:
    """By when a gather must have ended, for what follows it to be in time (Jackson's rule)."""
    return latest_us + takes_us, flight.due


def by_slack(flight: Flight, latest_us: float, takes_us: float) -> tuple[float, float]:
    """By when a gather must begin."""
    return latest_us, flight.due


def by_need(flight: Flight, latest_us: float, takes_us: float) -> tuple[float, float]:
    """In the order of compute."""
    return flight.due, latest_us


def by_age(flight: Flight, tail_us: float) -> tuple[float, float]:
    """The oldest gradient first: it has held memory for longest."""
    return flight.ready, -tail_us


def by_tail(flight: Flight, tail_us: float) -> tuple[float, float]:
    """The gradient first that has most left to do on other lanes."""
    return -tail_us, flight.ready


class Rules(NamedTuple):
    """Which goes first, of gathers and of reduces. No rule is the best for all programs: all are tried."""

    gathers: Callable[[Flight, float, float], tuple[float, float]]
    reduces: Callable[[Flight, float], tuple[float, float]]
    patient: bool
    """a lane may stay idle for a gradient that will be there soon and has more left to do"""


RULES = [
    Rules(gathers, reduces, patient)
    for gathers in (by_latest, by_slack, by_need)
    for reduces, patient in ((by_age, False), (by_tail, False), (by_tail, True))
]


def _telling(flights: Sequence[Flight]) -> list[Rules]:
    """Those that can make a difference."""
    climbs, descends = any(f.climbs for f in flights), any(not f.climbs for f in flights)
    first = RULES[0]
    return [r for r in RULES if (climbs or r.gathers is first.gathers) and (descends or r[1:] == first[1:])]


@dataclass
class Lane:
    """By the clock."""

    left_us: float = 0.0
    """that it is yet to be busy for"""
    free_us: float = 0.0
    """when it has ended what it has"""
    passed_us: float = -inf
    """it has ended what it had then, for that was waited for"""
    gathers: int = 0
    """that are yet to be waited for"""


def _lanes(flights: Sequence[Flight], us: Cost) -> dict[str, Lane]:
    lanes: defaultdict[str, Lane] = defaultdict(Lane)
    for flight in flights:
        for name in flight.lanes:
            lanes[name].left_us += us(flight.start)
            lanes[name].gathers += flight.climbs
    return dict(lanes)


class Pile:
    """Gradients whose reduces were not waited for yet. Those of `stretches` may be, of those that make most; and as
    many as a window holds."""

    def __init__(self, flights: Sequence[Flight], window_bytes: int, stretches: int):
        self.made: Counter[int] = Counter()
        """bytes of gradients, by the stretch that makes them"""
        for flight in flights:
            self.made[flight.ready] += flight.makes_bytes
        self.frees = _freed(flights)
        """bytes of gradients, by what is waited for"""
        self.most_bytes = max(window_bytes, sum(sorted(self.made.values())[-stretches:]))
        self.bytes = self.made[-1]

    def takes(self, i: int) -> bool:
        """Whether there is room for what stretch `i` makes."""
        return self.bytes + self.made[i] <= self.most_bytes

    def add(self, i: int) -> None:
        self.bytes += self.made[i]

    def free(self, flight: Flight) -> None:
        self.bytes -= self.frees[flight]


def _freed(flights: Sequence[Flight]) -> Counter[Flight]:
    """Bytes of gradients that each wait frees: a chain of reduces is waited for where it ends."""
    freed: Counter[Flight] = Counter()
    for flight in flights:
        freed[flight] = flight.makes_bytes + sum(freed.pop(f) for f in flight.after if f in freed and not f.wait)
    return freed


class Lanes:
    """Goes through the stretches with a clock, and writes down the order."""

    def __init__(
        self,
        stretches: Sequence[list[fx.Node]],
        flights: Sequence[Flight],
        us: Cost | None,
        window_bytes: int | None,
        pile: int,
        rules: Rules,
    ):
        self.rules, self.is_timed = rules, us is not None
        self.stretches, self.us = stretches, us or (lambda node: 0.25 * ops.is_start(node))
        self.takes_us = [sum(map(us, nodes)) if us else 1.0 for nodes in stretches]
        self.begin_us = [0.0, *accumulate(self.takes_us)]
        """of each stretch, were there no hops"""
        self.rest_us, self.claims = rest_us(flights, self.us), claimed_bytes(flights)
        self.window_bytes = needed_bytes(flights, 4) if window_bytes is None else window_bytes
        self.crowd_bytes = min(needed_bytes(flights, 2), self.window_bytes)
        """of gradients that may wait for gathers"""
        self.pile = Pile(flights, self.window_bytes, pile)
        self.now_us, self.border = 0.0, 0
        self.lanes = _lanes(flights, self.us)
        self.grounded = sorted(flights, key=lambda f: f.due if f.climbs else f.ready)
        """by when they are needed, or were made"""
        self.waiting = set(flights)
        """the same"""
        self.source = {flight: flight.source for flight in flights}
        self.flying: dict[Flight, float] = {}
        """with the time when each ends"""
        self.launched_us: dict[Flight, float] = {}
        self.landed: set[Flight] = set()
        self.finished: set[fx.Node] = set()
        """of what comes of flights"""
        self.ahead: Counter[int] = Counter()
        """bytes gathered for a later stretch"""
        self.nodes: list[fx.Node] = []

    def order(self, before_us: float = inf) -> list[fx.Node] | None:
        """All compute and hops; None as soon as it cannot end before a time."""
        for i, nodes in enumerate(self.stretches):
            if self._least_us(i) >= before_us:
                return None
            self._at_border(i)
            self.nodes += nodes
            self.now_us += self.takes_us[i]
            self.pile.add(i)
        while self.grounded:
            self._at_border(len(self.stretches))
        for flight in sorted(self.flying, key=self.flying.__getitem__):
            self._land(flight)
        return self.nodes if self.now_us < before_us else None

    def _least_us(self, i: int) -> float:
        """When all can have ended, before stretch `i`: compute that is left, and each lane's hops, alone."""
        lanes = (max(self.now_us, lane.free_us) + lane.left_us for lane in self.lanes.values())
        return max(self.now_us + self.begin_us[-1] - self.begin_us[i], *lanes, 0.0)

    def _at_border(self, i: int) -> None:
        """Before stretch `i`: what has ended is waited for, idle lanes get hops, and what is due is waited for."""
        self.border = i
        self.ahead = Counter({due: size for due, size in self.ahead.items() if due > i})
        self._land_ended()
        self._launch_idle(i)
        while i < len(self.stretches) and (flight := self._in_the_way(i)):
            self._land(flight)
            self._launch_idle(i)
        due = [f for f in self.grounded if f.due <= i]
        for flight in due if i < len(self.stretches) else due[:1]:
            if flight in self.grounded:
                self._launch(flight)
        for flight in [f for f in self.flying if f.due == i < len(self.stretches)]:
            self._land(flight)
        self._land_ended()

    def _launch_idle(self, i: int) -> None:
        """All that idle lanes get before stretch `i`."""
        while chosen := self._choose(i):
            self._launch(chosen)

    def _in_the_way(self, i: int) -> Flight | None:
        """The reduce to wait for, where stretch `i` would make more gradients than may be there: of those in flight the
        first to end, or else the oldest that was made."""
        if self.pile.takes(i):
            return None
        flying = [f for f in self.flying if self.pile.frees[f]]
        oldest = next((f for f in self.grounded if self.pile.frees[f] and f.ready < i), None)
        if not flying and oldest:
            self._launch(oldest)
            flying = [oldest]
        return min(flying, key=self.flying.__getitem__, default=None)

    def _land_ended(self) -> None:
        """Reduces and syncs free memory as soon as they are waited for."""
        for flight in [f for f in self.flying if not f.climbs and self._is_over(f)]:
            self._land(flight)

    def _is_over(self, flight: Flight) -> bool:
        """Whether compute would not stand still for a reduce, however long it takes itself: a gather that went behind
        it on a lane was waited for; or, where no gather is to come, it has long been over by the clock. A clock that
        knows no times is not asked for more than its word."""
        end_us, began_us = self.flying[flight], self.launched_us[flight]
        if not self.is_timed:
            return end_us <= self.now_us
        lanes = [self.lanes[name] for name in flight.lanes]
        if any(lane.passed_us > end_us for lane in lanes):
            return True
        to_come = sum(lane.gathers for lane in lanes)
        return not to_come and end_us + LATER * (end_us - began_us) <= self.now_us

    def _choose(self, i: int) -> Flight | None:
        """The next hop for a lane that would be idle before stretch `i` ends."""
        near = self._near(i)
        end_us = self._end_us(i, near)
        fitting = self._fitting(i, near)
        soon = [f for f in near if self._is_able(f) and (f.due <= i or not f.climbs or f.goes_on or f in fitting)]
        able = [f for f in soon if self._begin_us(f) < end_us + MARGIN * self._takes_us(i)]
        able = [f for f in able if f.climbs or not any(self._yields(f, to, i) for to in soon if to.climbs)]
        if self.rules.patient:
            able = [f for f in able if f.climbs or not self._held_back(f, i, end_us)]
        able = [f for f in able if self._can_follow(f, able)]
        crowded = sum(bytes_of(f.start) * f.size for f in able if not f.climbs) > self.crowd_bytes
        chosen = min(able, key=lambda f: self._urgency(f, i, able, crowded), default=None)
        if chosen and self._grounded_source(chosen):
            root = self._root(chosen)
            rivals = [f for f in able if f.meets(root) and not self._grounded_source(f)]
            chosen = min(rivals, key=lambda f: self._urgency(f, i, able, crowded))
        while chosen and (shorter := self._in_front_of(chosen, able)):
            chosen = shorter
        return chosen

    def _yields(self, flight: Flight, gather: Flight, i: int) -> bool:
        """Whether a reduce had better go behind a gather that can begin soon: compute would wait for longer than the
        lane stays idle."""
        begin_us, there_us = self._begin_us(flight), self._begin_us(gather)
        over_us, latest_us = begin_us + self.us(flight.start), self._latest_us(gather, i)
        waits_us = max(over_us, latest_us) - max(there_us, latest_us)
        return flight.meets(gather) and waits_us > there_us - begin_us > 0

    def _held_back(self, flight: Flight, i: int, end_us: float) -> bool:
        """Whether a reduce had better go behind one that is made in stretch `i`, if the two were alone."""
        over_us = self._begin_us(flight) + self.us(flight.start)
        own_us = self.rest_us[flight]
        for soon in self.grounded:
            if soon.ready == i and soon.meets(flight) and not soon.climbs and not self.source[soon]:
                takes_us = self.us(soon.start)
                first = max(over_us - self.us(flight.start) + own_us, max(over_us, end_us) + self.rest_us[soon])
                last = max(end_us + self.rest_us[soon], end_us + takes_us + own_us)
                if last < first:
                    return True
        return False

    def _in_front_of(self, flight: Flight, able: Sequence[Flight]) -> Flight | None:
        """What would be over on the same lane before a hop can begin that has to wait for what it relays."""
        begin_us = self._begin_us(flight)
        others = (f for f in able if f.meets(flight) and self._begin_us(f) < begin_us)
        return next((f for f in others if self._begin_us(f) + self.us(f.start) <= begin_us), None)

    def _grounded_source(self, flight: Flight) -> Flight | None:
        """What has to start before a hop can relay it."""
        source = self.source[flight]
        return source if source in self.waiting else None

    def _root(self, flight: Flight) -> Flight:
        """What has to start first of all before a hop can."""
        source = self._grounded_source(flight)
        return self._root(source) if source else flight

    def _can_follow(self, flight: Flight, able: Sequence[Flight]) -> bool:
        """All that it relays has started, or can."""
        source = self._grounded_source(flight)
        return source is None or (source in able and self._can_follow(source, able))

    def _begin_us(self, flight: Flight) -> float:
        """When its lane is free and what it relays is there."""
        source = self.source[flight]
        if source is None:
            return max(self.now_us, self._free_us(flight))
        grounded = source in self.waiting
        there_us = self._begin_us(source) + self.us(source.start) if grounded else self.flying.get(source, 0.0)
        return max(self.now_us, self._free_us(flight), there_us)

    def _free_us(self, flight: Flight) -> float:
        return max(self.lanes[name].free_us for name in flight.lanes)

    def _near(self, i: int) -> list[Flight]:
        """What could be started before stretch `i`: the first few of each lane and direction, so that time does not
        grow with the square of the hops."""
        room: defaultdict[tuple[str, bool], int] = defaultdict(lambda: HORIZON)
        found = []
        for flight in self.grounded:
            if flight.ready < i and room[flight.axis, flight.climbs]:
                room[flight.axis, flight.climbs] -= 1
                found.append(flight)
        return found

    def _takes_us(self, i: int) -> float:
        return self.takes_us[i] if i < len(self.stretches) else 0.0

    def _end_us(self, i: int, near: Sequence[Flight]) -> float:
        """When stretch `i` ends, as far as can be told."""
        if i == len(self.stretches):
            return inf
        flying = (end for f, end in self.flying.items() if f.due == i)
        grounded = (self._begin_us(f) + self.rest_us[f] for f in near if f.due <= i)
        return max([self.now_us, *flying, *grounded]) + self.takes_us[i]

    def _is_able(self, flight: Flight) -> bool:
        late = [f for f in flight.after if f not in self.landed and self.flying.get(f, inf) > self.now_us]
        return all(f is self.source[flight] and (f in self.flying or self._is_able(f)) for f in late)

    def _fitting(self, i: int, near: Sequence[Flight]) -> set[Flight]:
        """The first hops of chains of gathers whose last values fit the window, beside all that is needed before them:
        nothing small takes the place of something larger. A later hop has its place since the first."""
        ahead_bytes, found = self.ahead.total(), set()
        for flight in near:
            if flight.climbs and flight.due > i and not flight.goes_on:
                ahead_bytes += self.claims[flight]
                if ahead_bytes <= self.window_bytes:
                    found.add(flight)
        return found

    def _urgency(self, flight: Flight, i: int, able: Sequence[Flight], crowded: bool) -> tuple[int, float, float]:
        """Gathers go first where one of them cannot wait for a reduce, else reduces do; then by the rules."""
        if not flight.climbs:
            return (0, *self.rules.reduces(flight, self.rest_us[flight] - self.us(flight.start)))
        rivals = [f for f in able if f.meets(flight)]
        rivals_us = max((self.us(f.start) for f in rivals if not f.climbs), default=0.0)
        late = any(self._latest_us(f, i) < self._begin_us(f) + rivals_us for f in rivals if f.climbs)
        rank = -1 if late and not crowded else 1
        return (rank, *self.rules.gathers(flight, self._latest_us(flight, i), self.us(flight.start)))

    def _latest_us(self, flight: Flight, i: int) -> float:
        """When a gather must begin for compute not to wait."""
        return self.now_us + self.begin_us[flight.due] - self.begin_us[i] - self.rest_us[flight]

    def _launch(self, flight: Flight) -> None:
        for earlier in flight.after:
            if earlier in self.grounded:
                self._launch(earlier)
        landing = [f for f in flight.after if f in self.flying and f is not self.source[flight]]
        for earlier in landing:
            self._wait_for(earlier)
        self.grounded.remove(flight)
        self.waiting.remove(flight)
        self._compute(flight.before)
        self.nodes.append(flight.start)
        end_us = self._begin_us(flight) + self.us(flight.start)
        self.flying[flight] = end_us
        self.launched_us[flight] = self.now_us
        for name in flight.lanes:
            self.lanes[name].free_us = end_us
            self.lanes[name].left_us -= self.us(flight.start)
        if flight.climbs and not flight.goes_on and flight.due > self.border:
            self.ahead[flight.due] += self.claims[flight]
        for earlier in landing:
            self._finish(earlier)

    def _land(self, flight: Flight) -> None:
        self._wait_for(flight)
        self._finish(flight)

    def _finish(self, flight: Flight) -> None:
        """What comes of it, and of others that have landed."""
        nodes = [n for n, flights in flight.behind.items() if flights <= self.landed and n not in self.finished]
        self._compute(nodes)
        self.finished |= {*nodes}

    def _wait_for(self, flight: Flight) -> None:
        end_us = self.flying.pop(flight)
        self.landed.add(flight)
        self.pile.free(flight)
        for name in flight.lanes:
            lane = self.lanes[name]
            lane.passed_us = max(end_us, lane.passed_us)
            lane.gathers -= flight.climbs
        if flight.wait:
            self.now_us = max(self.now_us, end_us) + self.us(flight.wait)
            self.nodes.append(flight.wait)

    def _compute(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes += nodes
        self.now_us += sum(map(self.us, nodes))
