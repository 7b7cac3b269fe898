"""Predict: a step of a model under many plans, captured once, and of a deep model from two shallow ones.

The order that `passes.schedule` finds for a stack of equal layers repeats itself with every layer, but for the first
and the last few. So a deep model is captured with a few layers and with some more; what a plan makes of both is
simulated, and goes on to the model's own depth in a straight line: times, bytes that are moved, memory. A model without
such a stack is captured as it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf, prod
from typing import Any

from torch import nn

from passes.build import copy
from passes.order import Orders
from shardc import _torch
from shardc.compile import paused_gc, planned
from shardc.fit import for_longer, narrowed
from shardc.footprint import footprint
from shardc.model import named, params_of
from shardc.plan import Plan
from shardc.program import ALIKE, MOST, Allowance, Program
from shardc.runner import Runner
from shardc.simulate import calls_of, clocked
from shardc.stacks import shortened, stacks
from shardc.timeline import COMPUTE, Event
from shardc.times import busy_us, load_of
from shardc.trace import trace

DEPTHS = (8, 11)
"""Layers that a stack is captured with, at least: what is gathered ahead, four layers of large ones, and what the ends
of a stack have of their own, has to be there in both."""


@dataclass(frozen=True)
class Prediction:
    """An optimizer step of some micro-batches, as it is foretold; microseconds and bytes of one rank."""

    plan: Plan
    step_us: float
    """with the optimizer's own reads and writes"""
    compute_us: float
    update_us: float
    """of the optimizer"""
    lanes_us: dict[str, float]
    """by axis: how long it is busy"""
    moves_us: dict[tuple[str, str], float]
    """by (move, axis), on their lanes"""
    exposed_us: dict[tuple[str, str], float]
    """by (move, axis): how long compute waits"""
    peak_bytes: float
    held_bytes: dict[str, float]
    """by kind, at the peak"""
    calls_bytes: dict[int, float] = field(default_factory=dict)
    """the peak of each call, of up to `ALIKE` micro-batches"""


class Predictor:
    """Captures a model's call once, for all plans of a topology that says how fast it is."""

    def __init__(
        self,
        model: nn.Module,
        base: Plan,
        *args: Any,
        progress: Callable[[str], None] = lambda text: None,
        **kwargs: Any,
    ):
        """`base` is any plan; those that are asked for differ from it in rungs, topology and wires."""
        self.topology = base.topology
        self.topology.computes  # noqa: B018 (it raises where there are no links)
        self.stacks = found = stacks(model)
        self.depth = len(found[0].layers) if found else 0
        self.traced: dict[int, Program] = {}
        self.parameters: dict[int, dict[str, nn.Parameter]] = {}
        self.loads: dict[Plan, dict[str, float]] = {}
        """of each half, as the whole model has them"""
        for depth in self._depths(found[0].period, max(s.front for s in found)) if found else [0]:
            progress(f"tracing with {depth} of {self.depth} layers" if depth != self.depth else "tracing")
            with shortened(found if depth != self.depth else [], depth):
                self.traced[depth] = trace(model, base, *args, keep=True, **kwargs)
                self.parameters[depth] = named(model)

    def _depths(self, period: int, front: int) -> list[int]:
        """Two that end with the same kind of layer as the model does; its own, where that is no deeper."""
        first = max(DEPTHS[0], front + period)
        first += (self.depth - first) % period
        second = first + -(-(DEPTHS[1] - DEPTHS[0]) // period) * period
        return [first, second] if second < self.depth else [self.depth]

    def __call__(
        self, plan: Plan, micro_batches: int = 1, *, optimizer_states: int = 2, memory_bytes: int | None = None
    ) -> Prediction:
        """Of a step under a plan. Less is gathered ahead in a call (see `shardc.fit`), if that is needed to stay below
        `memory_bytes`."""
        with paused_gc(), _torch.lazy_code():
            programs = {depth: self.program(plan, depth) for depth in self.traced}
            self.loads[plan] = loads = self._loads(programs)
            weighted = [(weight, replace(programs[depth], loads=loads)) for depth, weight in self._weights().items()]

            def look(n: int, allowances: Mapping[int, Allowance]) -> tuple[Prediction, list[int]]:
                for _, program in weighted:
                    _allow(program, n, allowances)
                found = line_through([(w, predicted(it, n, optimizer_states)) for w, it in weighted])
                peaks = zip(_places(n), found.calls_bytes.values(), strict=False)
                return found, [place for place, size in peaks if size > (memory_bytes or inf)]

            prediction, above = look(micro_batches, dict.fromkeys(_places(micro_batches), MOST))
            if not above:
                return prediction
            look_alone, look_on = partial(look, 1), partial(look, micro_batches)
            alone = narrowed(_places(1), look_alone, _step_us)
            if micro_batches == 1:
                return alone[1]
            return for_longer(alone, _places(micro_batches), look_alone, look_on, _step_us)[1]

    def on_line(self, of: Callable[[Program], float]) -> float:
        """A number of the captured programs, as it is of the whole model."""
        values = {depth: of(program) for depth, program in self.traced.items()}
        return sum(weight * values[depth] for depth, weight in self._weights().items())

    def changed(
        self, before: Prediction, plan: Plan, micro_batches: int = 1, *, optimizer_states: int = 2
    ) -> Prediction:
        """What becomes of one of its predictions, where layers of the deepest capture have other rows."""
        depth = max(self.traced)
        programs = (replace(self.program(it, depth), loads=self.loads[before.plan]) for it in (before.plan, plan))
        was, now = (predicted(program, micro_batches, optimizer_states) for program in programs)
        per_layer = self.depth / depth if self.depth else 1.0
        return _sum([(1.0, before), (per_layer, now), (-per_layer, was)])

    def layer_of(self, name: str) -> str:
        """The layer of a stack that a parameter is of, or ''."""
        for stack in self.stacks:
            if name.startswith(f"{stack.name}."):
                return f"{stack.name}.{name.removeprefix(stack.name + '.').split('.')[0]}"
        return ""

    def program(self, plan: Plan, depth: int) -> Program:
        """The captured call of so many layers under a plan."""
        traced = self.traced[depth]
        params = params_of(plan, self.parameters[depth])
        joint = copy(traced.after("decompose")[0])
        return planned(traced.captured, joint, params, plan, Runner(), Orders())

    def _loads(self, programs: Mapping[int, Program]) -> dict[str, float]:
        """What pays for a bucket depends on how busy lanes are; in a few layers they are less so than in many."""
        found = {}
        for half in ("forward", "backward")[: 1 + (next(iter(programs.values())).halves[1] is not None)]:
            busy: Counter[str] = Counter()
            for depth, weight in self._weights().items():
                for lane, us in _busy_us(programs[depth], half).items():
                    busy[lane] += weight * us  # type: ignore[assignment]
            found[half] = load_of(busy)
        return found

    def _weights(self) -> dict[int, float]:
        """Of the captured depths, on the straight line through them to the model's own."""
        if len(self.traced) == 1:
            return dict.fromkeys(self.traced, 1.0)
        low, high = sorted(self.traced)
        at = (self.depth - low) / (high - low)
        return {low: 1 - at, high: at}


def _busy_us(program: Program, half: str) -> dict[str, float]:
    variant = next(variant for variant in program.step() if variant.half == half)
    return busy_us(program.times_us(program.draft(variant), half), program.topology)


def _step_us(prediction: Prediction) -> float:
    return prediction.step_us


def _places(micro_batches: int) -> Sequence[int]:
    """Of the calls of a step. The forward of a step of one is the first of longer ones, too, its backward its own."""
    return (0, -1) if micro_batches == 1 else range(2 * min(micro_batches, ALIKE))


def _allow(program: Program, micro_batches: int, allowances: Mapping[int, Allowance]) -> None:
    """Allowances of calls by their places, and of those of a step of one micro-batch, whose orders the others keep
    to."""
    program.allowances = {
        call: allowances[place]
        for n in (1, micro_batches)
        for place, call in zip(_places(n), program.step(min(n, ALIKE)), strict=False)
        if place in allowances
    }
    program.made, program.orders = {}, Orders()


def _sum(terms: Sequence[tuple[float, Prediction]]) -> Prediction:
    """Weighted. Nothing is less than nothing."""
    first = terms[0][1]
    values: dict[str, Any] = {}
    for name, value in vars(first).items():
        if isinstance(value, dict):
            keys = dict.fromkeys(key for _, it in terms for key in getattr(it, name))
            sums = {key: sum(weight * getattr(it, name).get(key, 0.0) for weight, it in terms) for key in keys}
            values[name] = {key: max(0.0, total) for key, total in sums.items()}
        elif name != "plan":
            values[name] = sum(weight * getattr(it, name) for weight, it in terms)
    values["held_bytes"] = _shared_out(values["peak_bytes"], values["held_bytes"])
    return replace(first, **values)


def line_through(found: Sequence[tuple[float, Prediction]]) -> Prediction:
    """Of captures with weights, the deepest last. It may wait less than the others do; a model with more layers yet is
    not taken to wait less than that."""
    line, (_, deepest) = _sum(found), found[-1]
    busy_us, waits_us = line.compute_us + line.update_us, _waits_us(deepest)
    if _waits_us(line) >= waits_us:
        return line
    return replace(line, step_us=busy_us + waits_us, exposed_us=deepest.exposed_us)


def _waits_us(prediction: Prediction) -> float:
    return prediction.step_us - prediction.compute_us - prediction.update_us


def _shared_out(total: float, parts: dict[str, float]) -> dict[str, float]:
    """What is at the peak of one depth may be of another kind than what is at that of the other."""
    return {kind: part * total / sum(parts.values()) for kind, part in parts.items()}


def predicted(program: Program, micro_batches: int, optimizer_states: int = 2) -> Prediction:
    """Of a program as it is, by simulation."""
    simulated = min(micro_batches, ALIKE)
    calls = calls_of(program, simulated)
    clock = clocked(program, program.topology, calls)
    begins_us = [began[0] for began in clock.began]
    took_us = [end - begin for begin, end in pairwise([*begins_us, clock.now_us])]
    times = [_stands_for(i * simulated // len(calls), micro_batches) for i in range(len(calls))]
    busy: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    exposed: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in clock.events:
        n = _stands_for(int((*event.graph.split(), "0")[1]), micro_batches)
        busy[event.lane] += n * event.us
        if event.hop:
            moved[move_of(event), event.lane] += n * event.us
            exposed[move_of(event), event.lane] += n * event.exposed_us
    update_us = _update_us(program, optimizer_states)
    step_us = sum(n * us for n, us in zip(times, took_us, strict=True)) + update_us
    compute_us = busy.pop(COMPUTE, 0.0)
    memory = footprint(program, calls, optimizer_states)
    held = {kind: float(size) for kind, size in memory.peak.by_kind.items()}
    return Prediction(
        program.plan,
        step_us,
        compute_us,
        update_us,
        dict(busy),
        dict(moved),
        dict(exposed),
        float(memory.peak.bytes),
        held,
        {i: float(max(levels)) for i, levels in enumerate(memory.levels)},
    )


def _stands_for(batch: int, micro_batches: int) -> int:
    """How many micro-batches one that is simulated stands for: the second for all but the first and the last."""
    return micro_batches - ALIKE + 1 if batch == 1 and micro_batches > ALIKE else 1


def move_of(event: Event) -> str:
    """Of the ladder, as `shardc.cost.MOVES` calls them."""
    assert event.hop
    purpose = event.hop.purpose
    return f"{event.graph.split()[0]} gather" if purpose == "gather" else purpose


def _update_us(program: Program, optimizer_states: int) -> float:
    """Nothing else happens while the optimizer goes from parameter to parameter."""
    trained = [it for it in program.registered.values() if it.layout.trainable]
    own = (prod(it.layout.rung_shape(it.layout.optim)) * it.master_dtype.itemsize for it in trained)
    return sum(program.topology.computes.updated_us(size, optimizer_states) for size in own)
