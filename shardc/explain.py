"""Explain: a line a collective of one optimizer step. What it moves, how long that takes, what hides it, and where
nothing does, why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from passes import ops
from passes.insert import Param
from passes.regions import block_of
from shardc.plan import Plan
from shardc.timeline import COMPUTE, Event, Timeline, duration, size

HEAD = ("in", "moves", "by", "over", "sent", "takes", "hidden behind", "exposed", "why")


@dataclass(frozen=True)
class Line:
    """One collective, or several of equal layers."""

    cells: tuple[str, ...]
    """as in HEAD"""
    layer: str
    """of the first of them; empty for what belongs to no layer"""
    exposed_us: float
    count: int = 1


def explain(timeline: Timeline, *, fold: bool = True) -> str:
    """A table, in the order in which hops begin; those of equal layers that fare alike are one line, if `fold`."""
    lines = [_line(e, timeline.events) for e in timeline.events if e.hop]
    shown = _folded(lines) if fold else lines
    return f"{timeline}\n\n{_table(shown)}"


def as_they_are(plan: Plan, params: Iterable[Param]) -> str:
    """The parameters that do not travel in the plan's wires, a line for each reason; empty where all do."""
    reasons: dict[str, list[str]] = {}
    for param in params:
        layout, wires = param.layout, param.wires
        up = [axis for axis, _ in layout.axes[: layout.optim] if dict(plan.gather_wire).get(axis, "") != wires.up(axis)]
        down = [axis for axis, _ in layout.axes if dict(plan.reduce_wire).get(axis, "") != wires.down(axis)]
        if up or (down and layout.trainable):
            reasons.setdefault(_why_as_it_is(plan, param), []).append(layout.name)
    return "".join(f"as they are: {_named_few(names)}: {reason}\n" for reason, names in reasons.items())


def _why_as_it_is(plan: Plan, param: Param) -> str:
    pattern = next((it for it in plan.wire_except if fnmatchcase(param.layout.name, it)), None)
    if pattern:
        return f"wire_except has {pattern!r}"
    if not param.master_dtype.is_floating_point:
        return "no floating numbers"
    if plan.leaves_blocks_empty(param.layout, param.master_dtype):
        return f"too few elements a shard to fill blocks of {plan.wire_block}"
    return "as narrow already, or all-reduced over an axis of reduce_wire"


def _named_few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} others"


def _line(event: Event, events: Sequence[Event]) -> Line:
    assert event.hop is not None
    computing = [e for e in events if e.lane == COMPUTE]
    behind = [e for e in _over(computing, event) if e.us > event.us / 20]
    cells = (
        event.graph,
        event.name,
        f"{event.hop.kind} in {event.hop.wire}" if event.hop.wire else event.hop.kind,
        event.lane,
        size(event.sent_bytes),
        duration(event.us),
        _named(behind) or "nothing",
        duration(event.exposed_us) if event.exposed_us else "",
        "; ".join([*why_exposed(event, computing), *_alone(event, events)]),
    )
    layer = re.search(r"\d+", event.name)
    return Line(cells, layer[0] if layer else "", event.exposed_us)


def _over(computing: Sequence[Event], event: Event) -> list[Event]:
    """Compute while a hop is on its lane."""
    return [e for e in computing if e.end_us > event.start_us and e.start_us < event.end_us]


def _named(computing: Iterable[Event]) -> str:
    names = list(dict.fromkeys(e.name for e in computing))
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def why_exposed(event: Event, computing: Sequence[Event]) -> Iterator[str]:
    """Why a hop is exposed, beside the compute of its step."""
    if event.exposed_us:
        own = [e for e in computing if e.graph == event.graph]
        if event.behind:
            late = duration(event.start_us - event.issued_us)
            yield f"began {late} after it was issued, behind {event.behind}"
        if not any(e.end_us <= event.issued_us + event.us and e.us > event.us / 10 for e in own):
            yield "nothing before it to hide behind"
        elif not any(e.start_us >= event.end_us and e.us > event.us / 10 for e in own):
            yield "nothing after it to hide behind"
        elif event.us > (beside := sum(e.us for e in _over(computing, event))):
            yield f"takes longer than the {duration(beside)} of compute beside it"
        else:
            yield "issued too late, for memory or behind what is more urgent"


def _alone(event: Event, events: Sequence[Event]) -> Iterator[str]:
    """Why a hop of one parameter is in no bucket."""
    if event.hop and event.hop.piece != ops.WHOLE:
        yield "in pieces, so that the hops of its chain run side by side"
    elif event.hop and len(event.hop.params) == 1:
        like = [e for e in events if e is not event and e.graph == event.graph and _kind(e) == _kind(event)]
        if like:
            yield "not in a bucket: first, last, of another dtype, of many latencies, or its copies cost more than one"
        else:
            yield "alone: no other of its kind and axis in its block"


def _kind(event: Event) -> tuple[str, ...]:
    hop = event.hop
    return (hop.kind, hop.axis, hop.purpose, block_of(hop.params[0])) if hop else ()


def _folded(lines: Sequence[Line]) -> list[Line]:
    """Lines that differ in nothing but the number of a layer become one, at the place of the first."""
    found: dict[tuple[str, ...], Line] = {}
    for line in lines:
        key = tuple(re.sub(r"\d+", "*", cell) for cell in (line.cells[1], *line.cells[6:7], line.cells[8]))
        key = (*line.cells[:1], *key, *line.cells[2:6], str(bool(line.exposed_us)))
        first = found.setdefault(key, line)
        if first is not line:
            total = first.exposed_us + line.exposed_us
            cells = (*first.cells[:7], duration(total) if total else "", first.cells[8])
            found[key] = Line(cells, first.layer, total, first.count + 1)
    return list(found.values())


def _table(lines: Sequence[Line]) -> str:
    return in_columns([HEAD, *((*line.cells[:1], _times(line), *line.cells[2:]) for line in lines)])


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each, a line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(text) + "\n"


def _times(line: Line) -> str:
    return line.cells[1] if line.count == 1 else f"{line.cells[1]} and {line.count - 1} like it"
