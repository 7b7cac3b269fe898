"""Timeline: what lanes do in one optimizer step, when, and what memory it takes; to read and to look at. Several of
the same step are drawn underneath each other."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log10
from pathlib import Path
from typing import Any

from passes import ops
from shardc.footprint import Peak

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """What a lane does from one moment to another, in microseconds from the start of the step."""

    lane: str
    """an axis of the mesh, or compute"""
    name: str
    """of a hop, what it moves; of compute, the block of the model"""
    graph: str
    """forward or backward, and of which micro-batch"""
    start_us: float
    end_us: float
    hop: ops.Hop | None = None
    sent_bytes: int = 0
    """of a hop, by one rank"""
    issued_us: float = 0.0
    """when a hop was put on its lane; it starts when the lane is free"""
    exposed_us: float = 0.0
    """of a hop, for how long compute waited for it"""
    behind: str = ""
    """of a hop that could not begin when it was issued: the hop that it relays, or that was on its lane"""

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Bound:
    """What no order of the same compute and the same moves can beat, in microseconds."""

    lanes: dict[str, float]
    """by lane: all that it has to do at full bandwidth, and what must come before the first and after the last of it"""
    critical_us: float
    """the longest chain of values that need each other, a hop a parameter"""

    @property
    def us(self) -> float:
        return max([self.critical_us, *self.lanes.values()])

    @property
    def by(self) -> str:
        """What it is that binds."""
        lane = max(self.lanes, key=self.lanes.__getitem__)
        return f"lane {lane}" if self.lanes[lane] >= self.critical_us else "the critical path"


@dataclass(frozen=True)
class Lanes:
    """What lanes do in one optimizer step, without the optimizer's own arithmetic."""

    events: tuple[Event, ...]
    """by the time when they start"""
    step_us: float

    @property
    def exposed_us(self) -> float:
        """For how long compute waits in all."""
        return sum(event.exposed_us for event in self.events)

    @property
    def exposed(self) -> dict[str, float]:
        """Microseconds by what is moved over which axis, those that are exposed, longest first."""
        found: Counter[str] = Counter()
        for event in self.events:
            found[f"{event.lane} {event.name}"] += event.exposed_us  # type: ignore[assignment]
        return {name: us for name, us in found.most_common() if us > 0}

    @property
    def busy_us(self) -> dict[str, float]:
        """By lane."""
        found: dict[str, float] = {}
        for event in self.events:
            found[event.lane] = found.get(event.lane, 0.0) + event.us
        return found

    @property
    def utilisation(self) -> dict[str, float]:
        """By lane: the part of the step in which it is busy."""
        return {lane: us / self.step_us for lane, us in self.busy_us.items()}

    @property
    def lanes(self) -> list[str]:
        """Compute first, then axes."""
        return sorted({event.lane for event in self.events}, key=lambda lane: (lane != COMPUTE, lane))

    def trace(self, process: int = 0, name: str = "") -> Iterator[dict[str, Any]]:
        """As events of Chrome's trace format: a thread a lane, of a process that has a number and, maybe, a name."""
        if name:
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        numbers = {lane: i for i, lane in enumerate(self.lanes)}
        for lane, i in numbers.items():
            yield {"ph": "M", "pid": process, "tid": i, "name": "thread_name", "args": {"name": lane}}
            yield {"ph": "M", "pid": process, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}}
        for e in self.events:
            args: dict[str, Any] = {"graph": e.graph}
            if e.hop:
                args |= {"params": e.hop.params, "sent_bytes": e.sent_bytes, "exposed_us": e.exposed_us}
            place = {"pid": process, "tid": numbers[e.lane], "ts": e.start_us, "dur": e.us}
            yield {"ph": "X", "name": e.name, "cat": e.hop.purpose if e.hop else COMPUTE, **place, "args": args}


@dataclass(frozen=True)
class Timeline(Lanes):
    """One optimizer step as it is foretold."""

    bound: Bound
    memory: tuple[tuple[float, int], ...]
    """(microseconds, bytes of all that lives from then on), where it changes"""
    rest_bytes: int
    """of memory, what lives before and after the step too: master parameters and optimizer state"""
    peak: Peak

    @property
    def peak_bytes(self) -> int:
        return self.peak.bytes

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"step      {duration(self.step_us)}, of which {duration(self.exposed_us)} exposed communication"
        yield f"bound     {duration(self.bound.us)} ({self.bound.by}); bound/step {self.bound.us / self.step_us:.3f}"
        used = self.utilisation
        yield f"lanes     {', '.join(f'{lane} {used[lane]:.0%} busy' for lane in self.lanes)}"
        kinds = sorted(self.peak.by_kind.items(), key=lambda item: -item[1])
        yield f"memory    {size(self.peak_bytes)} at {self.peak.where}"
        yield f"          {', '.join(f'{kind} {size(held)}' for kind, held in kinds)}"
        for name, us in list(self.exposed.items())[:5]:
            yield f"exposed   {duration(us):>10}  {name}"

    def chrome_trace(self, path: str | Path) -> None:
        """Writes a file for Perfetto (ui.perfetto.dev) and chrome://tracing."""
        write_trace(path, self.trace())

    def trace(self, process: int = 0, name: str = "") -> Iterator[dict[str, Any]]:
        yield from super().trace(process, name)
        for us, size_bytes in self.memory:
            yield {"ph": "C", "pid": process, "name": "memory", "ts": us, "args": {"bytes": size_bytes}}

    def svg(self, path: str | Path) -> None:
        """Writes a picture: a row a lane, exposed time in red, memory underneath."""
        title = f"step {duration(self.step_us)}, exposed {duration(self.exposed_us)}, bound {duration(self.bound.us)} "
        title += f"({self.bound.by}), peak {size(self.peak_bytes)}"
        write_picture(path, title, {"": self}, self)


def write_trace(path: str | Path, events: Iterable[dict[str, Any]]) -> None:
    """Writes events of Chrome's trace format."""
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}))


def duration(us: float) -> str:
    """Microseconds, to read."""
    return f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def size(size_bytes: float) -> str:
    """Bytes, to read."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def label(params: Sequence[str], piece: tuple[int, int] = ops.WHOLE) -> str:
    """Parameters in short: 'layers.3 (9)' for those of one block, 'embed.weight 1/4' for a piece of one."""
    if piece != ops.WHOLE:
        return f"{label(params)} {piece[0] + 1}/{piece[1]}"
    shared = params[0].split(".")
    for name in params[1:]:
        parts = name.split(".")
        shared = shared[: next((i for i, (a, b) in enumerate(zip(shared, parts, strict=False)) if a != b), len(parts))]
    return params[0] if len(params) == 1 else f"{'.'.join(shared) or 'model'} ({len(params)})"


def named(hop: ops.Hop) -> str:
    """A hop in short: 'gather layers.3 (9)'."""
    return f"{hop.purpose} {label(hop.params, hop.piece)}"


PURPOSE_COLOURS = {"gather": "#4c9a6a", "refresh": "#8bbf4d", "reduce": "#c27d2c", "sync": "#8a63b8"}
COMPUTE_COLOURS = ("#6f9bd1", "#8fb3df")
"""Of one block and the next."""
EXPOSED_COLOUR = "#d43d3d"


def write_picture(path: str | Path, title: str, steps: Mapping[str, Lanes], memory: Timeline | None = None) -> None:
    """Writes the lanes of steps underneath each other, on one scale of time, each below its name; and underneath the
    memory of one that is foretold."""
    Path(path).write_text(_Picture(title, steps, memory).text())


class _Picture:
    """Left column of names, one row a lane, a curve, an axis of time."""

    LEFT, WIDTH, TOP, NAME, ROW, CURVE = 90, 1500, 50, 22, 34, 120

    def __init__(self, title: str, steps: Mapping[str, Lanes], memory: Timeline | None):
        self.heading, self.steps, self.memory = title, steps, memory
        self.end_us = max(lanes.step_us for lanes in steps.values())
        self.scale = self.WIDTH / max(self.end_us, 1e-9)
        self.bottom = self.TOP + sum(self.NAME * bool(n) + self.ROW * len(it.lanes) for n, it in steps.items())
        self.bottom += self.CURVE if memory else 0
        self.height = self.bottom + 70

    def x(self, us: float) -> float:
        return self.LEFT + us * self.scale

    def text(self) -> str:
        width = self.LEFT + self.WIDTH + 30
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{self.height}" '
        head += 'font-family="sans-serif" font-size="11">'
        curve = self.curve(self.memory) if self.memory else ()
        rows = [*self.title(), *self.rows(), *curve, *self.ticks()]
        return "\n".join([head, f'<rect width="{width}" height="{self.height}" fill="white"/>', *rows, "</svg>\n"])

    def title(self) -> Iterator[str]:
        yield f'<text x="{self.LEFT}" y="18" font-size="14">{escape(self.heading)}</text>'
        colours = {**PURPOSE_COLOURS, "exposed": EXPOSED_COLOUR}
        for i, (name, colour) in enumerate(colours.items()):
            x = self.LEFT + 80 * i
            yield f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>'
            yield f'<text x="{x + 14}" y="37">{name}</text>'

    def rows(self) -> Iterator[str]:
        y = self.TOP
        for name, lanes in self.steps.items():
            if name:
                yield f'<text x="8" y="{y + 15}" font-weight="bold">{escape(name)}</text>'
                y += self.NAME
            yield from self.of_step(lanes, y)
            y += self.ROW * len(lanes.lanes)

    def of_step(self, lanes: Lanes, top: float) -> Iterator[str]:
        shade: dict[str, int] = {}
        for i, lane in enumerate(lanes.lanes):
            y = top + self.ROW * i
            yield f'<text x="8" y="{y + 17}">{escape(lane)}</text>'
            for event in lanes.events:
                if event.lane == lane:
                    yield self.box(event, y, shade.setdefault(event.graph + event.name, len(shade)))

    def box(self, event: Event, y: float, number: int) -> str:
        colour = PURPOSE_COLOURS.get(event.hop.purpose if event.hop else "", COMPUTE_COLOURS[number % 2])
        note = f"{event.name} ({event.graph}): {duration(event.us)}"
        if event.hop:
            note += (
                f", {size(event.sent_bytes)} sent, {duration(event.exposed_us)} exposed\n{', '.join(event.hop.params)}"
            )
        x, w = self.x(event.start_us), max(event.us * self.scale, 0.3)
        parts = [f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="24" fill="{colour}"/>']
        if event.exposed_us:
            late = min(event.exposed_us, event.us)
            box = f'x="{self.x(event.end_us - late):.2f}" y="{y + 24}" width="{max(late * self.scale, 0.3):.2f}"'
            parts.append(f'<rect {box} height="4" fill="{EXPOSED_COLOUR}"/>')
        if w > 7 * len(event.name):
            parts.append(f'<text x="{x + 3:.2f}" y="{y + 16}" fill="white">{escape(event.name)}</text>')
        return f"<g><title>{escape(note)}</title>{''.join(parts)}</g>"

    def curve(self, it: Timeline) -> Iterator[str]:
        bottom = self.bottom
        factor = (self.CURVE - 20) / max(it.peak_bytes, 1)
        points: list[str] = []
        before = 0.0
        for us, size_bytes in it.memory:
            x, y = self.x(us), bottom - size_bytes * factor
            points += [f"{x:.2f},{before:.2f}"] if points else []
            points.append(f"{x:.2f},{y:.2f}")
            before = y
        area = f"{self.LEFT},{bottom} {' '.join(points)} {self.x(it.step_us):.2f},{before:.2f} "
        yield f'<polygon points="{area}{self.x(it.step_us):.2f},{bottom}" fill="#dde6ee" stroke="#7e93a8"/>'
        rest = bottom - it.rest_bytes * factor
        yield f'<line x1="{self.LEFT}" x2="{self.x(it.step_us):.2f}" y1="{rest}" y2="{rest}" stroke="#7e93a8"/>'
        yield f'<text x="8" y="{bottom - self.CURVE + 28}">memory</text>'
        peak = f"peak {size(it.peak_bytes)}: {escape(it.peak.where)}"
        yield f'<text x="{self.LEFT + 4}" y="{bottom - self.CURVE + 16}">{peak}</text>'

    def ticks(self) -> Iterator[str]:
        y = self.height - 50
        step = 10 ** ceil(log10(max(self.end_us, 1e-3) / 12))
        for i in range(int(self.end_us / step) + 1):
            x = self.x(i * step)
            yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y}" y2="{y + 5}" stroke="black"/>'
            yield f'<text x="{x:.2f}" y="{y + 18}" text-anchor="middle">{duration(i * step)}</text>'
