"""Search: the plan that makes a step shortest, of all that are legal and fit.

Of every row of the ladder, with factors inside axes and with every wire that is allowed, closed forms say what it must
hold, and a time that no schedule of it can beat (`shardc.space`). Plans are then simulated on the real graph
(`shardc.predict`), a few, the most promising first, but none that cannot beat the best so far by more than a tolerance;
what those that move other bytes could be faster by at most is known. Those that are likely not to fit, judged by how
much more than the closed forms say the ones before them held, are put off. Of plans that move the same bytes in the
same calls only one is simulated: the one whose chains have fewest hops, and that holds least. At last, what memory the
best leaves over buys less communication, layer by layer (`shardc.refine`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log
from typing import Any

import torch
from torch import nn

from passes.errors import Error
from shardc.footprint import REMEDIES
from shardc.model import named
from shardc.plan import WIRE_EXCEPT, Plan, bytes_of
from shardc.predict import Prediction, Predictor
from shardc.refine import refined
from shardc.space import Factors, Space, Wiring, facts_of, rows, wirings
from shardc.timeline import duration, size
from shardc.topology import Topology

TOLERANCE = 0.01
"""By so much of a step a plan that was not simulated may be faster than the best."""
MOST = 8
"""Plans that are simulated."""
ALIKE = 0.005
"""Steps that differ by less are taken to be equal, until they are simulated."""
LISTED = 12
"""Plans that a table has."""

Say = Callable[[str], None]


@dataclass(eq=False)
class Candidate:
    """A plan that was looked at."""

    space: Space = field(repr=False)
    row: Factors
    wiring: Wiring
    bound_us: float
    """no schedule of its step is faster"""
    rest_bytes: int
    """that it holds between a forward and its backward, at least"""
    estimate_us: float
    """that its step is likely to take"""
    moves: tuple[float, ...] = field(repr=False)
    """what each call of a step moves over each axis"""
    prediction: Prediction | None = None
    """where it was simulated"""
    twin: Candidate | None = field(default=None, repr=False)
    """it was not, for this one moves the same, and by estimate is as fast"""

    @cached_property
    def plan(self) -> Plan:
        return self.prediction.plan if self.prediction else self.space.plan(self.row, self.wiring)

    @property
    def step_us(self) -> float:
        """Simulated, or the bound."""
        return self.prediction.step_us if self.prediction else self.bound_us

    @property
    def holds_bytes(self) -> float:
        """At the peak, or at least."""
        return self.prediction.peak_bytes if self.prediction else self.rest_bytes

    @property
    def order(self) -> tuple[int, int, float, int]:
        """The most promising first; of about equals what splits fewest axes, moves least, holds least."""
        return round(log(self.estimate_us) / ALIKE), self.space.cuts(self.row), sum(self.moves), self.rest_bytes


@dataclass(frozen=True)
class Found:
    """What a search found. `ranked`: plans that were simulated and fit, fastest first; then all others, by bound."""

    ranked: tuple[Candidate, ...]
    memory_bytes: int
    seconds: float

    @property
    def best(self) -> Candidate:
        return self.ranked[0]

    @property
    def plan(self) -> Plan:
        return self.best.plan

    @property
    def simulated(self) -> int:
        return sum(c.prediction is not None for c in self.ranked)

    @property
    def gap(self) -> float:
        """By what part of the best step a plan that moves something else than the simulated ones could be faster, at
        most. (One that moves the same, `Candidate.twin`, is taken to be as fast.)"""
        others = [c.bound_us for c in self.ranked if not c.prediction and not c.twin and self._may_fit(c)]
        return max(0.0, 1 - min(others, default=self.best.step_us) / self.best.step_us)

    def _may_fit(self, candidate: Candidate) -> bool:
        return candidate.holds_bytes <= self.memory_bytes

    def why(self, candidate: Candidate) -> str:
        """Why a plan is not the best."""
        if candidate is self.best:
            return ""
        if not self._may_fit(candidate):
            over = f"{size(candidate.holds_bytes - self.memory_bytes)} more than there is"
            return f"needs {over}" + (
                f", most for {_most(candidate.prediction)}" if candidate.prediction else " at least"
            )
        if candidate.twin:
            return f"moves what {_spelled(candidate.twin)} moves, and by estimate is no faster"
        if not candidate.prediction:
            return "not simulated: " + _bound_by(candidate, self.best)
        assert self.best.prediction
        return _slower(candidate.prediction, self.best.prediction)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def search(
    model: nn.Module,
    topology: Topology,
    *args: Any,
    memory: int | str | None = None,
    micro_batches: int = 1,
    gather_wires: Sequence[str] = (),
    reduce_wires: Sequence[str] = (),
    wire_except: Iterable[str] = WIRE_EXCEPT,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = None,
    optimizer_states: int = 2,
    most: int = MOST,
    progress: Say | None = None,
    **kwargs: Any,
) -> Found:
    """Ranks all plans for steps of `micro_batches` calls `model(*args, **kwargs)`. Nothing is computed; model and
    arguments may be on the meta device.

    topology: says how fast devices and axes are. memory: what a rank may hold, in bytes or as "80GB" (default: what the
    device has). gather_wires, reduce_wires: formats (`passes.wire`) that may be used; most lose precision, and none is
    by default. wire_except: patterns of parameters that travel as they are. optimizer_states: values for each element
    of a parameter (2 for Adam). most: plans that are simulated. progress: called with a line of text (default: writes
    to stderr).
    Raises `Error` for a topology without links, and where no plan fits, with the nearest.
    """
    began = time.perf_counter()
    say = progress or _to_stderr
    limit = bytes_of(memory, "memory") or int(topology.computes.memory_gb * 1e9)
    given: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "wire_except": wire_except}
    parameters = named(model)
    predictor = Predictor(model, base := Plan.zero3(topology, **given), *args, progress=say, **kwargs)
    options = {**given, "memory_limit": limit}
    space = Space(topology, facts_of(predictor, parameters, base), options, micro_batches, optimizer_states)
    legal = _legal(space, wirings(topology, gather_wires, reduce_wires))
    fitting = sum(it.rest_bytes <= limit for it in legal)
    say(f"{len(legal)} plans, of which {fitting} may fit {size(limit)}")

    def predict(plan: Plan) -> Prediction:
        return predictor(plan, micro_batches, optimizer_states=optimizer_states, memory_bytes=limit)

    ranked = _ranked(legal, predict, limit, most, say)
    best = ranked[0]
    assert best.prediction
    better = refined(best.prediction, predictor, parameters, micro_batches, limit, optimizer_states)
    if better:
        ranked.insert(0, replace(best, prediction=better))
    return Found(tuple(ranked), limit, time.perf_counter() - began)


def _legal(space: Space, wiring: Sequence[Wiring]) -> list[Candidate]:
    found = [
        Candidate(
            space,
            row,
            wires,
            space.bound_us(row, wires),
            space.rest_bytes(row),
            space.estimate_us(row, wires),
            space.signature(row, wires),
        )
        for row in rows(space.topology)
        for wires in wiring
        if space.is_legal(row, wires)
    ]
    return sorted(found, key=lambda c: c.order)


def _ranked(
    legal: Sequence[Candidate], predict: Callable[[Plan], Prediction], limit: int, most: int, say: Say
) -> list[Candidate]:
    """Simulates the most promising. Raises `Error` where none fits."""
    best_us, seen = inf, dict[tuple[float, ...], Candidate]()
    done = 0
    for candidate in _likely_first(legal, limit):
        candidate.twin = _twin(candidate, seen, limit)
        if candidate.twin:
            continue
        if done >= most:
            break
        if candidate.bound_us >= (1 - TOLERANCE) * best_us:
            continue
        _simulate(candidate, predict)
        done += 1
        seen[candidate.moves] = candidate
        if candidate.holds_bytes <= limit:
            best_us = min(best_us, candidate.step_us)
        say(_progress(done, most, best_us))
    if best_us == inf:
        best_us = _smallest(legal, predict, limit).step_us
    return sorted(legal, key=lambda c: (not c.prediction, c.holds_bytes > limit, c.step_us))


def _twin(candidate: Candidate, seen: Mapping[tuple[float, ...], Candidate], limit: int) -> Candidate | None:
    """One that was simulated and moves the same; not one that did not fit, where this one holds less."""
    other = seen.get(candidate.moves)
    if other and other.holds_bytes > limit and candidate.rest_bytes < other.rest_bytes:
        return None
    return other


def _likely_first(legal: Sequence[Candidate], limit: int) -> Iterator[Candidate]:
    """Those that may fit. Last come those that do not, if they hold as much beyond what closed forms say as the plans
    that were simulated before them."""
    beyond_bytes, put_off = inf, list[Candidate]()
    for candidate in legal:
        if candidate.rest_bytes > limit:
            continue
        if candidate.rest_bytes + beyond_bytes > limit and beyond_bytes < inf:
            put_off.append(candidate)
            continue
        yield candidate
        if candidate.prediction:
            beyond_bytes = min(beyond_bytes, candidate.prediction.peak_bytes - candidate.rest_bytes)
    yield from put_off


def _simulate(candidate: Candidate, predict: Callable[[Plan], Prediction]) -> None:
    candidate.prediction = predict(candidate.plan)


def _smallest(legal: Sequence[Candidate], predict: Callable[[Plan], Prediction], limit: int) -> Candidate:
    """The plan that holds least. Raises `Error` where it does not fit either."""
    candidate = min(legal, key=lambda c: (c.rest_bytes, c.order))
    if not candidate.prediction:
        _simulate(candidate, predict)
    assert candidate.prediction
    if candidate.holds_bytes > limit:
        held = ", ".join(f"{kind} {size(n)}" for kind, n in candidate.prediction.held_bytes.items())
        raise Error(
            f"No plan fits {size(limit)} a rank: the one that needs least needs "
            f"{size(candidate.holds_bytes - limit)} more ({held}).",
            where=str(candidate.plan),
            fix=f"More ranks, or less to hold. Most are {_most(candidate.prediction)}: "
            f"{REMEDIES[_most(candidate.prediction)]}.",
        )
    return candidate


def _most(prediction: Prediction) -> str:
    return max(prediction.held_bytes, key=prediction.held_bytes.__getitem__)


def _progress(done: int, most: int, best_us: float) -> str:
    bar = "#" * round(20 * done / most)
    best = f"; the best takes {duration(best_us)}" if best_us < inf else ""
    return f"[{bar:<20}] {done} of at most {most} plans simulated{best}"


def _to_stderr(text: str) -> None:
    print(f"shardc: {text}", file=sys.stderr, flush=True)


# The table


def _spelled(candidate: Candidate) -> str:
    """Factors, as AMSP writes them."""
    return "/".join(map(str, candidate.row))


def _bound_by(candidate: Candidate, best: Candidate) -> str:
    if candidate.bound_us >= best.step_us:
        return f"cannot take less than {duration(candidate.bound_us)}"
    return f"could be faster by {1 - candidate.bound_us / best.step_us:.1%} at most"


def _slower(prediction: Prediction, best: Prediction) -> str:
    """What costs most of the difference."""
    waits = {key: us - best.exposed_us.get(key, 0.0) for key, us in prediction.exposed_us.items()}
    more = {f"waits for {move} over {axis}": us for (move, axis), us in waits.items()}
    more["compute"] = prediction.compute_us - best.compute_us
    more["the optimizer's update"] = prediction.update_us - best.update_us
    what = max(more, key=more.__getitem__)
    return f"{duration(prediction.step_us - best.step_us)} slower, {duration(more[what])} of it {what}"


def _lines(found: Found) -> Iterator[str]:
    """The best, where its time goes and its memory; then the table."""
    best = found.best.prediction
    assert best
    yield (
        f"{len(found.ranked)} plans looked at, {found.simulated} simulated, in {found.seconds:.0f} s; what moves other "
        f"bytes than these could be faster by {found.gap:.1%} at most"
    )
    yield f"best      {best.plan}"
    yield (
        f"step      {duration(best.step_us)}: compute {duration(best.compute_us)}, waits "
        f"{duration(sum(best.exposed_us.values()))}, update {duration(best.update_us)}"
    )
    for (move, axis), us in best.moves_us.items():
        if us:
            exposed = best.exposed_us[move, axis]
            yield f"move      {move} over {axis}: {duration(us)}" + (
                f", exposed {duration(exposed)}" if exposed else ""
            )
    held = sorted(best.held_bytes.items(), key=lambda item: -item[1])
    yield f"memory    {size(best.peak_bytes)}: {', '.join(f'{kind} {size(n)}' for kind, n in held)}"
    yield ""
    head = ("params", "after_forward", "grads", "optim", "wires", "step", "exposed", "memory", "why not")
    table = [head, *(_cells(found, candidate) for candidate in found.ranked[:LISTED])]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(found: Found, it: Candidate) -> tuple[str, ...]:
    up, up_axes, down, down_axes = it.wiring
    axes = it.space.topology.axes
    wires = [f"gathers {up} over {'+'.join(axes[:up_axes])}"] * bool(up)
    wires += [f"reduces {down} over {'+'.join(axes[:down_axes])}"] * bool(down)
    exposed = duration(sum(it.prediction.exposed_us.values())) if it.prediction else ""
    step = duration(it.step_us) if it.prediction else f"> {duration(it.bound_us)}"
    held = size(it.holds_bytes) if it.prediction else f"> {size(it.holds_bytes)}"
    return (*map(str, it.row), ", ".join(wires), step, exposed, held, found.why(it))
