"""Profile: some training steps of a compiled model as they ran, over the step as it is foretold.

    profile = shardc.profile(model, batch)    # on all ranks together
    print(profile)                            # a line a collective, beside what was predicted of it
    profile.svg("profile.svg"), profile.chrome_trace("profile.json")

A step is what `shardc.simulate` takes it for: forwards and backwards of some micro-batches, all of the same arguments;
the first forward refreshes, the last backward syncs, no optimizer steps. The same graphs run in the same order, so the
n-th hop of a call on a lane is the n-th that is foretold there. Of several steps the median one is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map

from passes.errors import Error
from shardc.calibrate import slowest
from shardc.check import values_in
from shardc.explain import in_columns, why_exposed
from shardc.measure import check_parts
from shardc.model import runtime_of
from shardc.program import Program
from shardc.record import Call, DeviceTimer, HostTimer, Record, Recording, Timer
from shardc.simulate import Calls, names, timeline_of
from shardc.step import Runtime
from shardc.timeline import COMPUTE, Event, Lanes, Timeline, duration, size, write_picture, write_trace


def profile(model: nn.Module, *args: Any, steps: int = 3, micro_batches: int = 1, **kwargs: Any) -> Profile:
    """Runs `steps` steps of `model(*args, **kwargs)` under torch's profiler, after two that are not measured. All ranks
    call it together.

    What is differentiated is the sum of all floating values that the model returns. Parameters, gradients, buffers and
    random numbers are afterwards what they were; no optimizer is asked. torch's profiler costs a microsecond or two an
    op, which small models feel.
    Raises `Error` for a model that shardc did not compile or that returns nothing to differentiate, for less than one
    step or micro-batch, and for backend "inductor-whole", of which no part can be measured.
    """
    runtime = runtime_of(model)
    check_parts(runtime.lowering.backend, "shardc.profile(model, ...)")
    _check_count("steps", steps)
    _check_count("micro_batches", micro_batches)
    device = next((p.hollow.device for p in runtime.params.values()), torch.device("cpu"))
    batch = tree_map(_apart, (args, kwargs))
    with _as_it_was(model, runtime, device), torch.enable_grad():
        _step(model, runtime, batch, micro_batches)
        with _recorded(runtime, device) as record:
            _step(model, runtime, batch, micro_batches)
            with torch.profiler.profile(activities=_activities(device)) as profiler:
                found = [
                    _timed(record, runtime, lambda: _step(model, runtime, batch, micro_batches)) for _ in range(steps)
                ]
    program, calls = _identified(record.calls, runtime.programs)
    predicted = timeline_of(program, program.topology, calls) if program.topology.links else None
    slowest_us = slowest(_median(found).step_us, device)
    return Profile(tuple(found), predicted, dist.get_rank(), slowest_us, profiler)


def _check_count(name: str, count: int) -> None:
    if not isinstance(count, int) or count < 1:
        raise Error(
            f"There is nothing to measure in {name}={count!r}.",
            where=f"shardc.profile(model, ..., {name}={count!r})",
            fix=f"{name} is a whole number, 1 or more.",
        )


def _apart(value: Any) -> Any:
    """An argument that is differentiated, apart from what the user made it of."""
    differs = isinstance(value, Tensor) and value.requires_grad
    return value.detach().requires_grad_() if differs else value


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


# Steps


def _step(model: nn.Module, runtime: Runtime, batch: tuple[Any, Any], micro_batches: int) -> None:
    runtime.mark_stale()  # as an optimizer's step leaves it
    args, kwargs = batch
    trained = [p for p in model.parameters() if p.requires_grad]
    for i in range(micro_batches):
        with nullcontext() if i == micro_batches - 1 else runtime.no_sync():
            result = model(*args, **kwargs)
            if trained:
                # Not `backward`: hooks on accumulated gradients may be optimizers.
                torch.autograd.grad(_loss(result), trained, allow_unused=True)


def _loss(result: Any) -> Tensor:
    parts = [v for v in values_in(result) if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad]
    if not parts:
        raise Error(
            "The model returned nothing to differentiate.",
            where=f"a {type(result).__name__}",
            fix="Pass arguments with which it returns a loss, or other floating values that depend on its parameters.",
        )
    return sum(part if part.dim() == 0 else part.sum() for part in parts)


@contextmanager
def _as_it_was(model: nn.Module, runtime: Runtime, device: torch.device) -> Iterator[None]:
    """Inside there are no gradients and backwards sync; afterwards all is what it was before."""
    held = [(p, p.tensor.grad, p.accumulator, p.synced_grad) for p in runtime.params.values()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    (syncing, runtime.syncing), (first, runtime.first) = (runtime.syncing, True), (runtime.first, True)
    residuals, runtime.residuals = runtime.residuals, {}
    for p, *_ in held:
        p.tensor.grad = p.accumulator = p.synced_grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        runtime.syncing, runtime.first, runtime.residuals = syncing, first, residuals
        for p, grad, accumulator, synced_grad in held:
            p.tensor.grad, p.accumulator, p.synced_grad = grad, accumulator, synced_grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _recorded(runtime: Runtime, device: torch.device) -> Iterator[Record]:
    """Inside, what graphs do is written down."""
    timer: Timer = DeviceTimer(device) if device.type == "cuda" else HostTimer()
    record, before = Record(timer), runtime.lowering
    runtime.lowering = Recording(before, record)
    try:
        yield record
    finally:
        runtime.lowering = before
        timer.close()


def _timed(record: Record, runtime: Runtime, step: Callable[[], None]) -> Lanes:
    """A step that all ranks begin together."""
    record.calls.clear()
    dist.barrier()
    began = record.timer.now()
    step()
    ended = record.timer.now()
    _, calls = _identified(record.calls, runtime.programs)
    return record.lanes(names(calls), began, ended)


def _identified(calls: Sequence[Call], programs: Sequence[Program]) -> tuple[Program, Calls]:
    """Which program ran, and which of its variants."""
    made = {id(graph): (program, variant) for program in programs for variant, graph in program.made.items()}
    return made[id(calls[0].graph)][0], [(made[id(call.graph)][1], call.graph) for call in calls]


def _median(steps: Sequence[Lanes]) -> Lanes:
    """Of an even number, the faster of the two."""
    return sorted(steps, key=lambda step: step.step_us)[(len(steps) - 1) // 2]


# What was found

MEASURED = ("begins", "takes", "exposed")
TOLD = 1e-3
"""of a step: what is exposed for less, as every wait is for some microseconds, or late by less, is not explained"""
PREDICTED = ("predicted to begin", "to take", "to be exposed", "more exposed")


@dataclass(frozen=True)
class Profile:
    """Steps of this rank as they ran, and as they are predicted."""

    steps: tuple[Lanes, ...]
    predicted: Timeline | None
    """None where the plan's topology does not say how fast its axes and devices are"""
    rank: int
    slowest_us: float
    """the median step of the rank that took longest"""
    profiler: torch.profiler.profile
    """torch's own, of all steps: what goes on inside of stretches of compute"""

    @property
    def measured(self) -> Lanes:
        """The median step."""
        return _median(self.steps)

    @property
    def pairs(self) -> list[tuple[Event, Event | None]]:
        """The hops of the median step in the order in which they began, each with the one that is predicted."""
        if self.predicted is None:
            return [(event, None) for event in self.measured.events if event.hop]
        predicted = _numbered(self.predicted)
        return [(event, predicted[key]) for key, event in _numbered(self.measured).items()]

    def __str__(self) -> str:
        return f"{self._head()}\n\n{in_columns([*self._hops()])}\n{in_columns([*self._totals()])}"

    def _head(self) -> str:
        number, count = self.steps.index(self.measured) + 1, len(self.steps)
        head = f"step {number} of {count} (the median) of rank {self.rank}: {duration(self.measured.step_us)}; "
        head += f"of the slowest rank: {duration(self.slowest_us)}"
        if self.predicted is None:
            head += "\nnothing is predicted: the plan's topology does not say how fast it is "
            head += "(Topology.preset, .with_links, or shardc.calibrate)"
        return head

    def _hops(self) -> Iterator[tuple[str, ...]]:
        """A row a collective."""
        measured = self.measured
        computing = [event for event in measured.events if event.lane == COMPUTE]
        yield ("in", "moves", "by", "over", "sent", *MEASURED, *(PREDICTED if self.predicted else ()), "why")
        for event, predicted in self.pairs:
            assert event.hop
            cells = (event.graph, event.name, event.hop.kind, event.lane, size(event.sent_bytes), *_times(event))
            more = (*_times(predicted), _signed(event.exposed_us - predicted.exposed_us)) if predicted else ()
            why = _why(event, predicted, computing, TOLD * measured.step_us)
            yield (*cells, *more, "; ".join(why))

    def _totals(self) -> Iterator[tuple[str, ...]]:
        """A row a total."""
        measured, predicted = _sums(self.measured), _sums(self.predicted) if self.predicted else {}
        yield ("", "measured", *(("predicted", "difference") if predicted else ()))
        for name, us in measured.items():
            before_us = predicted.get(name, 0.0)
            yield (name, duration(us), *((duration(before_us), _signed(us - before_us)) if predicted else ()))

    def svg(self, path: str | Path) -> None:
        """Writes a picture: the lanes of the median step over those that are predicted, exposed time in red."""
        steps: dict[str, Lanes] = self._both()
        parts = (
            f"{name}: step {duration(it.step_us)}, exposed {duration(it.exposed_us)}" for name, it in steps.items()
        )
        write_picture(path, "; ".join(parts), steps)

    def chrome_trace(self, path: str | Path) -> None:
        """Writes a file for Perfetto (ui.perfetto.dev) and chrome://tracing: a process that was measured, and one that
        is predicted."""
        write_trace(path, (event for i, (name, it) in enumerate(self._both().items()) for event in it.trace(i, name)))

    def _both(self) -> dict[str, Lanes]:
        return {"measured": self.measured} | ({"predicted": self.predicted} if self.predicted else {})


def _numbered(lanes: Lanes) -> dict[tuple[str, str, str, int], Event]:
    """Hops by their call, lane, name, and number on the lane."""
    count: Counter[tuple[str, str]] = Counter()
    found = {}
    for event in lanes.events:
        if event.hop:
            found[event.graph, event.lane, event.name, count[event.graph, event.lane]] = event
            count[event.graph, event.lane] += 1
    return found


def _times(event: Event) -> tuple[str, str, str]:
    return duration(event.start_us), duration(event.us), duration(event.exposed_us) if event.exposed_us else ""


def _signed(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{duration(abs(us))}" if us else ""


def _why(event: Event, predicted: Event | None, computing: Sequence[Event], told_us: float) -> Iterator[str]:
    """Why a hop is exposed, and what was not predicted of it."""
    if event.exposed_us > told_us:
        yield from why_exposed(event, computing)
    if predicted and event.us > max(1.5 * predicted.us, predicted.us + told_us):
        yield f"takes {event.us / predicted.us:.1f} times as long as predicted"


def _sums(lanes: Lanes) -> dict[str, float]:
    """Microseconds of a step: of all of it, of its parts, and of what is busy."""
    busy_us = lanes.busy_us
    compute_us = busy_us.pop(COMPUTE, 0.0)
    neither_us = max(0.0, lanes.step_us - compute_us - lanes.exposed_us)
    parts = {"step": lanes.step_us, "compute": compute_us, "exposed": lanes.exposed_us, "neither": neither_us}
    return parts | {f"{lane} busy": busy_us[lane] for lane in lanes.lanes if lane != COMPUTE}
