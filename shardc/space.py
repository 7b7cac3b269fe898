"""Space: every legal plan on a topology, factors inside axes included, and what closed forms say of each.

A factor is the number of ranks that share one copy of a state (AMSP, arXiv 2311.00257); one that lies inside an axis
splits it. Of Phi bytes the hops of a move from factor h to factor l send, over all parts of an axis together,

    Phi (1/l - 1/h)        with l and h brought into the range of factors of the axis

in however many hops; a flat all-reduce over the other n ranks, 2 (n-1)/n of Phi over the optimizer's factor.

Two numbers say how good a plan can be. It holds at least what rests between a forward and its backward. And its step
takes at least as long as its busiest lane, and as compute with what nothing can hide: gathers of what the first op
needs, and reductions of what the last op makes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise, product
from operator import mul
from typing import Any, NamedTuple

from torch import fx, nn

from passes import ops
from passes.build import outputs, placeholders
from passes.flights import Flight, lay_out
from passes.memory import lives
from passes.turn import from_params
from passes.wire import BITS, CASTS, SCALE_BYTES
from shardc.cost import MOVES
from shardc.plan import WIRE_BLOCK, Plan
from shardc.predict import Predictor
from shardc.program import Program, Variant
from shardc.times import PIECES
from shardc.topology import Topology

ONCE = ("refresh", "sync")
"""Moves of a step; the others are of each of its micro-batches."""


class Factors(NamedTuple):
    """How many ranks share one copy of each state."""

    params: int
    after_forward: int
    grads: int
    optim: int


class Wiring(NamedTuple):
    """A format over the outermost axes, so many of them, up and down the ladder."""

    up: str = ""
    up_axes: int = 0
    down: str = ""
    down_axes: int = 0


def rows(topology: Topology) -> Iterator[Factors]:
    """Every legal row: 7 on an axis of 2, 2431 on 128 hosts of 8."""
    known = topology.factors()
    for optim in known:
        below = [factor for factor in known if factor <= optim]
        for params, grads in product(below, repeat=2):
            for after_forward in (factor for factor in below if factor <= params):
                row = Factors(params, after_forward, grads, optim)
                if all(b % a == 0 for a, b in pairwise(sorted({*row}))):
                    yield row


def wirings(topology: Topology, up: Collection[str], down: Collection[str]) -> list[Wiring]:
    """Without any, and with each format over the outermost axis, the outermost two, and so on."""
    counts = range(1, len(topology.axes) + 1)
    ups = [("", 0), *product(up, counts)]
    downs = [("", 0), *product(down, counts)]
    return [Wiring(*u, *d) for u, d in product(ups, downs)]


class Group(NamedTuple):
    """What parameters have in common."""

    elements: int
    """of one parameter"""
    rows: int
    """of dim 0, which is split"""
    master_bytes: int
    """of an element"""
    weight_bytes: int
    gradient_bytes: int
    trainable: bool
    regathered: bool
    """the backward needs it in full"""
    wired: bool
    """it may travel in a wire"""
    first: bool
    """the first op needs it"""
    last: bool
    """its gradient is made last"""


@dataclass(frozen=True)
class Facts:
    """What closed forms need to know of a model's call."""

    groups: Mapping[Group, int]
    """with their elements"""
    forward_us: float
    """of compute"""
    backward_us: float
    saved_bytes: float
    """of activations, between a forward and its backward"""
    chains: float
    """in which a forward gathers, once parameters are in buckets"""


class Call(NamedTuple):
    """A forward or a backward of a step. What it moves it waits for; nothing goes on into the next."""

    times: int
    compute_us: float
    lanes_us: tuple[float, ...]
    """by axis, at full bandwidth"""
    end_us: tuple[float, ...]
    """by axis: what the first op waits for, or what is left to do when the last is over"""
    whole_us: tuple[float, ...]
    """by axis: of the all-reduce after it"""
    reach: int
    """the factor that this begins with, or ends at"""
    between: tuple[tuple[int, int], ...]
    """factors, of each move"""


class Space:
    """Of a model on a topology."""

    def __init__(self, topology: Topology, facts: Facts, options: Mapping[str, Any], micro_batches: int, states: int):
        """`options`: of each plan, besides rungs and wires. `states`: of the optimizer, for each element."""
        self.topology, self.facts, self.options = topology, facts, dict(options)
        self.micro_batches, self.states = micro_batches, states
        ends = [*accumulate((size for _, size in topology.inner), mul, initial=1)]
        self.ranges = list(zip((axis for axis, _ in topology.inner), ends, ends[1:], strict=False))
        """(axis, factor below it, factor with it), inner first"""
        self.up, self.down, self.whole = cache(self._up), cache(self._down), cache(self._whole)
        self.padded = cache(self._padded)
        self.calls = lru_cache(1)(self._calls)

    def plan(self, row: Factors, wiring: Wiring) -> Plan:
        """Raises `Error` for a wire over what is all-reduced."""
        split = self.topology.split({*row})
        rung = {split.shared_by(n): n for n in reversed(range(len(split.axes) + 1))}
        states: dict[str, Any] = {state: rung[factor] for state, factor in row._asdict().items()}
        up = self._wire(split, wiring.up, wiring.up_axes)
        down = self._wire(split, wiring.down, wiring.down_axes)
        return Plan(split, **states, gather_wire=up, reduce_wire=down, **self.options)

    def cuts(self, row: Factors) -> int:
        """How many axes are split, and how often."""
        return len({*row} - {1, *(end for *_, end in self.ranges)})

    def _wire(self, split: Topology, form: str, axes: int) -> dict[str, str]:
        own = {lane for axis in self.topology.axes[:axes] for lane in self.topology.lanes(axis)}
        return {axis: form for axis in split.axes if own & {*split.lanes(axis)}}

    def is_legal(self, row: Factors, wiring: Wiring) -> bool:
        """Gradients in a wire are scattered over its axes."""
        return not wiring.down_axes or row.optim == self.topology.world

    # Bytes

    def _padded(self, optim: int) -> list[tuple[Group, int]]:
        """Each group, and its elements with the padding of rows that do not divide by the optimizer's factor."""
        groups = self.facts.groups.items()
        return [(group, n // group.rows * -(-group.rows // optim) * optim) for group, n in groups]

    def moved(self, row: Factors, wiring: Wiring) -> dict[str, tuple[float, ...]]:
        """Microseconds for which each move keeps each axis (inner first) busy in a step, at full bandwidth."""
        found = self._once(row, wiring)
        return {move: found[move] if move in ONCE else _times(self.micro_batches, found[move]) for move in MOVES}

    def _once(self, row: Factors, wiring: Wiring) -> dict[str, tuple[float, ...]]:
        params, after_forward, grads, optim = row
        up, down = wiring[:2], wiring[2:]
        return {
            "refresh": self.up("trainable", params, optim, optim, up),
            "forward gather": self.up("", 1, params, optim, up),
            "backward gather": self.up("regathered", 1, after_forward, optim, up),
            "reduce": self.down("trainable", 1, grads, optim, down),
            "sync": _sum(self.down("trainable", grads, optim, optim, down), self.whole(optim)),
        }

    def _up(self, kind: str, low: int, high: int, optim: int, wire: tuple[str, int]) -> tuple[float, ...]:
        """All-gathers of a kind of parameters, once."""
        return tuple(
            self._us(axis, "all_gather", share * self._climbing_bytes(kind, i, high, optim, wire))
            for i, (axis, share) in enumerate(self._gathered_shares(low, high).items())
        )

    def _shares(self, low: int, high: int) -> dict[str, float]:
        """Of the full value, what a rank sends over each axis between two factors."""
        return {
            axis: 1 / min(max(low, start), end) - 1 / min(max(high, start), end) for axis, start, end in self.ranges
        }

    def _gathered_shares(self, low: int, high: int) -> dict[str, float]:
        """Without what an outer hop receives into memory that ranks share."""
        arrives = {axis for axis, _, end in self.ranges if end < high and self.topology.is_near(axis)}
        return {axis: 0.0 if axis in arrives else share for axis, share in self._shares(low, high).items()}

    def _climbing_bytes(self, kind: str, i: int, high: int, optim: int, wire: tuple[str, int]) -> float:
        """Of all parameters of a kind in full. What an outer axis has quantized stays so on inner ones."""
        form, axes = wire
        first = len(self.ranges) - axes
        reached = max((j for j, (_, start, _) in enumerate(self.ranges) if start < high), default=0)
        quantized = form and (i >= first or reached >= first)
        return sum(
            elements * (_element_bytes(form, group.weight_bytes) if quantized and group.wired else group.weight_bytes)
            for group, elements in self.padded(optim)
            if not kind or getattr(group, kind)
        )

    def _down(self, kind: str, low: int, high: int, optim: int, wire: tuple[str, int]) -> tuple[float, ...]:
        """Reduce-scatters of the gradients of a kind of parameters, once."""
        form, axes = wire
        found = []
        for i, (axis, share) in enumerate(self._shares(low, high).items()):
            quantized = form and i >= len(self.ranges) - axes
            total = sum(
                n * (_element_bytes(form, g.gradient_bytes) if quantized and g.wired else g.gradient_bytes)
                for g, n in self.padded(optim)
                if g.trainable and getattr(g, kind)
            )
            found.append(self._us(axis, "all_to_all" if quantized else "reduce_scatter", share * total))
        return tuple(found)

    def _whole(self, optim: int, kind: str = "trainable") -> tuple[float, ...]:
        """The all-reduce over what the optimizer's rung lacks, once: it holds all lanes until it is over."""
        groups, ranks = self.padded(optim), self.topology.world // optim
        total = sum(n * g.gradient_bytes for g, n in groups if g.trainable and getattr(g, kind)) / optim
        over = {axis: max(start, optim) // optim for axis, start, end in self.ranges if end > max(start, optim)}
        sent_bytes = 2 * (ranks - 1) / ranks * total
        each_us = [self._us(axis, "all_reduce", sent_bytes / inside) for axis, inside in over.items()]
        takes_us = max(each_us, default=0.0)
        return tuple(takes_us * (axis in over) for axis, *_ in self.ranges)

    def _us(self, axis: str, kind: str, sent_bytes: float) -> float:
        return self.topology.link(axis).sent_us(kind, sent_bytes) if sent_bytes else 0.0

    def signature(self, row: Factors, wiring: Wiring) -> tuple[float, ...]:
        """What each call moves: where it is the same, so is the schedule, but for the hops of a split axis."""
        return tuple(round(us, 3) for call in self.calls(row, wiring) for us in call.lanes_us)

    # What follows

    def _calls(self, row: Factors, wiring: Wiring) -> list[Call]:
        """Of a step: the first forward refreshes, the last backward syncs."""
        refresh, gather, again, reduce, sync = self._once(row, wiring).values()
        params, after_forward, grads, optim = row
        forward, backward, others = self.facts.forward_us, self.facts.backward_us, self.micro_batches - 1
        first, last, whole = (
            partial(self._first, row, wiring),
            partial(self._last, row, wiring),
            self.whole(optim, "last"),
        )
        nothing = _times(0, whole)
        gathers, reduces = (1, params), ((1, after_forward), (1, grads))
        found = [
            Call(1, forward, _sum(refresh, gather), first(optim), nothing, optim, ((params, optim), gathers)),
            Call(1, backward, _sum(again, reduce, sync), last(optim), whole, optim, (*reduces, (grads, optim))),
        ]
        if others:
            found.append(Call(others, forward, gather, first(params), nothing, params, (gathers,)))
            found.append(Call(others, backward, _sum(again, reduce), last(grads), nothing, grads, reduces))
        return found

    def _first(self, row: Factors, wiring: Wiring, high: int) -> tuple[float, ...]:
        return self.up("first", 1, high, row.optim, wiring[:2])

    def _last(self, row: Factors, wiring: Wiring, low: int) -> tuple[float, ...]:
        return self.down("last", 1, low, row.optim, wiring[2:])

    def bound_us(self, row: Factors, wiring: Wiring) -> float:
        """No schedule of a step is faster."""
        calls = self.calls(row, wiring)
        return self.update_us(row) + sum(
            c.times * max(c.compute_us + max(_sum(c.end_us, c.whole_us)), *c.lanes_us) for c in calls
        )

    def estimate_us(self, row: Factors, wiring: Wiring) -> float:
        """What a schedule is likely to take: with the latencies of hops, what issuing them takes of compute, and copies
        of rows that are padded."""
        copies_us, total = self._copies_us(row) / 2, self.update_us(row)
        for call in self.calls(row, wiring):
            ends_us = self._in_pieces_us(row, call.reach, call.end_us) + max(call.whole_us)
            computes_us = call.compute_us + copies_us + self._overheads_us(row, call) + ends_us
            latencies_us = _times(self.facts.chains, self._latencies_us(row, call.between))
            total += call.times * max(computes_us, *_sum(call.lanes_us, latencies_us))
        return total

    def _in_pieces_us(self, row: Factors, high: int, moved_us: Sequence[float]) -> float:
        """Of a chain with nothing beside it: a piece behind the other, or one after another. Parts of one axis share
        its lane."""
        latencies_us = self._latencies_us(row, [(1, high)])
        return min(
            sum(each := [us / pieces + latency_us for us, latency_us in zip(moved_us, latencies_us, strict=True)])
            + (pieces - 1) * max(each)
            for pieces in (1, PIECES)
        )

    def _overheads_us(self, row: Factors, call: Call) -> float:
        """What all hops of a call take of compute, with as many chains for each move as a forward has gathers."""
        hops = [self.topology.link(axis) for low, high in call.between for axis, *_ in self._hops(row, low, high)]
        links = [self.topology.link(axis) for axis, *_ in self.ranges]
        sent_mb = [us / link.sent_us("all_gather", 1e6) for us, link in zip(call.lanes_us, links, strict=True)]
        sending_us = sum(
            mb * (link.gather_us_per_mb + link.reduce_us_per_mb) / 2 for mb, link in zip(sent_mb, links, strict=True)
        )
        return self.facts.chains * sum(link.launch_us for link in hops) + sending_us

    def _copies_us(self, row: Factors) -> float:
        """Of uneven rows: in the forward, in the backward, and of gradients; each reads and writes."""
        uneven = sum(n * g.weight_bytes for g, n in self.padded(row.optim) if g.rows % row.optim)
        return self.topology.computes.memory_us(4 * uneven)

    def _hops(self, row: Factors, low: int, high: int) -> Iterator[tuple[str, int, int]]:
        """(axis, factor below, factor with it) of each hop between two factors."""
        for axis, start, end in self.ranges:
            cuts = sorted({min(max(factor, start), end) for factor in (*row, low, high, start, end)})
            yield from ((axis, a, b) for a, b in pairwise(cuts) if low <= a and b <= high)

    def _latency_us(self, axis: str, low: int, high: int) -> float:
        return (high // low - 1) * self.topology.link(axis).latency_us

    def _latencies_us(self, row: Factors, between: Iterable[tuple[int, int]]) -> tuple[float, ...]:
        """By axis: of all hops of moves between factors; all-reduces are not counted."""
        found = dict.fromkeys((axis for axis, *_ in self.ranges), 0.0)
        for low, high in between:
            for axis, a, b in self._hops(row, low, high):
                found[axis] += self._latency_us(axis, a, b)
        return tuple(found.values())

    def update_us(self, row: Factors) -> float:
        """Of a step's parameters, by the optimizer."""
        own = ((g, g.elements // g.rows * -(-g.rows // row.optim)) for g in self.facts.groups if g.trainable)
        updated_us = self.topology.computes.updated_us
        return sum(self.facts.groups[g] / g.elements * updated_us(n * g.master_bytes, self.states) for g, n in own)

    def rest_bytes(self, row: Factors) -> int:
        """Between a forward and its backward: masters, optimizer state, copies, shards kept for the backward, sums of
        gradients, activations."""
        params, after_forward, grads, optim = row
        total = self.facts.saved_bytes
        for group, n in self.padded(optim):
            if group.trainable:
                total += n * group.master_bytes * (1 + self.states) / optim
                total += n * group.weight_bytes / params * (params < optim)
                total += n * group.gradient_bytes / grads * (self.micro_batches > 1)
            else:
                total += n * group.master_bytes / params
            total += n * group.weight_bytes / after_forward * (group.regathered and after_forward < params)
        return int(total)


def _element_bytes(form: str, own: int) -> float:
    if form in CASTS:
        return min(own, CASTS[form].itemsize)
    return min(own, (BITS[form] * WIRE_BLOCK / 8 + SCALE_BYTES) / WIRE_BLOCK)


def _times(n: float, values: Sequence[float]) -> tuple[float, ...]:
    return tuple(n * value for value in values)


def _sum(*values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*values, strict=True)))


# From a model


def facts_of(predictor: Predictor, parameters: Mapping[str, nn.Parameter], base: Plan) -> Facts:
    """What is known once a call has been captured under ZeRO-3."""
    programs = list(predictor.traced.values())
    deepest = programs[-1]
    names = {
        "regathered": _names(ops.hops(backward, "gather")) if (backward := deepest.halves[1]) else set(),
        "first": _names(f.start for f in _ends(deepest, "forward") if f.climbs),
        "last": _names(f.start for f in _ends(deepest, "backward") if not f.climbs),
    }
    groups: Counter[Group] = Counter()
    for name, parameter in parameters.items():
        groups[_group(base, name, parameter, {key: _star(name) in found for key, found in names.items()})] += (
            parameter.numel()
        )
    forward_us, backward_us = (predictor.on_line(partial(_compute_us, half=half)) for half in ("forward", "backward"))
    saved_bytes, chains = predictor.on_line(_saved_bytes), predictor.on_line(_chains)
    return Facts(groups, forward_us, backward_us, saved_bytes, chains)


def _names(starts: Iterable[fx.Node]) -> set[str]:
    return {_star(name) for start in starts for name in ops.hop(start).params}


def _star(name: str) -> str:
    """Of equal parameters of all layers."""
    return re.sub(r"\d+", "*", name)


def _ends(program: Program, half: str) -> list[Flight]:
    """What the first stretch of a forward waits for, or what the last one of a backward makes."""
    if half == "backward" and program.halves[1] is None:
        return []
    stretches, flights = lay_out(program.draft(Variant(half)))
    if half == "forward":
        return [flight for flight in flights if flight.due == 0]
    return [flight for flight in flights if flight.ready == len(stretches) - 1]


def _group(base: Plan, name: str, parameter: nn.Parameter, which: Mapping[str, bool]) -> Group:
    weight = base.compute_dtype(parameter.dtype)
    return Group(
        parameter.numel(),
        parameter.shape[0] if parameter.ndim else 1,
        parameter.dtype.itemsize,
        weight.itemsize,
        (base.reduce_dtype or weight).itemsize,
        parameter.requires_grad,
        wired=not any(fnmatchcase(name, pattern) for pattern in base.wire_except),
        **which,
    )


def _compute_us(program: Program, half: str) -> float:
    """Without what only some plans need: hops, and copies of rows that are padded."""
    variant = next((v for v in program.step() if v.half == half), None)
    if not variant:
        return 0.0
    us = program.times_us(program.draft(variant), half).items()
    return sum(t for node, t in us if not ops.is_hop(node) and node.target not in (ops.compact, ops.expand))


def _chains(program: Program) -> float:
    """Of a forward under ZeRO-3, each of one hop over every axis."""
    return len(ops.hops(program.after("bucket")[0])) / len(program.topology.axes)


def _saved_bytes(program: Program) -> float:
    """Of activations that the forward hands to the backward. What it hands on of parameters depends on the plan."""
    graph = program.draft(Variant("forward"))
    kept = set(outputs(graph)[1]) - {*placeholders(graph).values()} - {*from_params(graph, program.layouts)}
    return float(sum(life.bytes for life in lives(graph) if life.values & kept))
