"""Fit: how far hops may get away from the compute that needs them, or that they wait for, where memory is limited.

Calls that need too much are allowed less and less (`BOTH`). Where that does not suffice there are two ways on (`WAYS`):
gradients of one stretch alone may wait for their reduces, or nothing is gathered ahead any more. Which costs less time
depends on what moves most, gradients or what compute needs: of those that fit the one is taken that is foretold to be
faster.

Steps of one micro-batch come first: what calls of longer steps add has to fit beside theirs. Where it does not, the
forward that they share may do with less, as long as a step of one is not foretold to lose more than a little (`LOSES`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, TypeVar

from torch import fx

from passes.order import collective_order
from shardc.footprint import Footprint, footprint
from shardc.program import ALIKE, MOST, Allowance, Program, Variant
from shardc.simulate import clocked

Call = TypeVar("Call")
Found = TypeVar("Found")
Look = Callable[[Mapping[Call, Allowance]], tuple[Found, Collection[Call]]]
"""What becomes of steps under allowances of calls, and the calls that need too much all the same."""
Tried = tuple[dict[Call, Allowance], Found, Collection[Call]]
"""Allowances, and what a look at them found."""
Kept = dict[tuple[Variant, tuple[Allowance, Allowance]], fx.Graph]

BOTH = (MOST, Allowance(3, 1.0), Allowance(2, 0.5), Allowance(2, 0.25))
LEAST = Allowance(1, 0.0)
WAYS = ((Allowance(1, 0.5), Allowance(1, 0.25), LEAST), (Allowance(2, 0.0), LEAST))
"""The first is taken where links are not known."""
LOSES = 0.05
"""Of its time a step of one micro-batch, for longer ones to fit."""


def fit(program: Program, limit_bytes: int) -> None:
    """Gives each call the largest allowance with which no step, of however many micro-batches, needs more than a limit.
    Where there is none for steps of one, raises `Error` with what lives at the peak; where there is none for steps of
    more, calls that only these make will do so."""
    alone, *longer = (program.step(n) for n in range(1, ALIKE + 1))
    look = _Look(program, limit_bytes, (alone,), {})
    program.allowances, found, above = tried = narrowed(alone, look, _takes_us)
    if above:
        found.most.check(limit_bytes)
    while longer:
        calls = {*chain.from_iterable(longer)}
        both = replace(look, steps=(alone, *longer))
        allowances, found, above = for_longer(tried, calls, look, both, _takes_us)
        if not above:
            program.allowances = allowances
            return
        longest = longer.pop()
        program.unfit |= dict.fromkeys(set(longest).difference(alone, *longer), found.most)


def for_longer(
    alone: Tried[Call, Found],
    calls: Collection[Call],
    look_alone: Look[Call, Found],
    look: Look[Call, Found],
    takes_us: Callable[[Found], float],
) -> Tried[Call, Found]:
    """Allowances of the calls of longer steps, where those of a step of one micro-batch are known."""
    given, found, _ = alone
    tried = narrowed([call for call in calls if call not in given], look, takes_us, given)
    if not tried[-1]:
        return tried
    less = narrowed(calls, look, takes_us, given)
    is_close = not less[-1] and takes_us(look_alone(less[0])[0]) <= (1 + LOSES) * takes_us(found)
    return less if is_close else tried


def narrowed(
    calls: Collection[Call],
    look: Look[Call, Found],
    takes_us: Callable[[Found], float],
    given: Mapping[Call, Allowance] | None = None,
) -> Tried[Call, Found]:
    """The largest allowances of calls with which none needs too much, or else the least; `given` are those of the
    other calls of their steps."""
    tried = _down(BOTH[:1], calls, calls, look, given or {})
    if not tried[-1]:
        return tried
    least = _down((LEAST,), calls, calls, look, tried[0])  # where that does not suffice there is no more to try
    if least[-1]:
        return least
    tried = _down(BOTH[1:], calls, tried[-1], look, tried[0])
    if not tried[-1]:
        return tried
    ways = [_down(way, calls, tried[-1], look, tried[0]) for way in WAYS]
    return min((it for it in ways if not it[-1]), key=lambda it: takes_us(it[1]), default=least)


def _down(
    ladder: Sequence[Allowance],
    calls: Collection[Call],
    above: Collection[Call],
    look: Look[Call, Found],
    allowances: Mapping[Call, Allowance],
) -> Tried[Call, Found]:
    """One allowance after the other for those of the calls that are still above; for all, where only others are."""
    for allowed in ladder:
        left = [call for call in calls if call in above] or calls
        allowances = {**allowances, **dict.fromkeys(left, allowed)}
        found, above = look(allowances)
        if not above:
            break
    return dict(allowances), found, above


class _Steps(NamedTuple):
    program: Program
    steps: Sequence[Sequence[Variant]]
    footprints: list[Footprint]

    @property
    def most(self) -> Footprint:
        return max(self.footprints, key=lambda it: it.peak.bytes)


@dataclass(frozen=True)
class _Look:
    """At steps of a program. Graphs are made once for the same allowances."""

    program: Program
    limit_bytes: int
    steps: Sequence[Sequence[Variant]]
    kept: Kept

    def __call__(self, allowances: Mapping[Variant, Allowance]) -> tuple[_Steps, Collection[Variant]]:
        own = self._alone(allowances)
        found = [footprint(own, [(variant, own.graph(variant)) for variant in step]) for step in self.steps]
        self.kept.update({(variant, _allowances(own, variant)): graph for variant, graph in own.made.items()})
        above = {v for step, it in zip(self.steps, found, strict=True) for v in it.above(self.limit_bytes, step)}
        return _Steps(own, self.steps, found), above

    def _alone(self, allowances: Mapping[Variant, Allowance]) -> Program:
        """The program in the orders that this rank would offer, with graphs that were made for the same allowances."""
        own = replace(self.program, allowances=dict(allowances), made={}, orders=self.program.orders.own())
        own.made |= {v: graph for (v, both), graph in self.kept.items() if both == _allowances(own, v)}
        for variant, graph in own.made.items():
            if variant == own.whole(variant):
                own.orders.decide(own.shares(variant), collective_order(graph))
        return own


def _allowances(program: Program, variant: Variant) -> tuple[Allowance, Allowance]:
    """What the graph of a call depends on: its own allowance, and that of the call that its order is from."""
    return program.allowance(variant), program.allowance(program.whole(variant))


def _takes_us(steps: _Steps) -> float:
    """What the steps are foretold to take together; nothing, where links are not known."""
    program = steps.program
    if not program.topology.links:
        return 0.0
    calls = ([(variant, program.graph(variant)) for variant in step] for step in steps.steps)
    return sum(clocked(program, program.topology, it).now_us for it in calls)
