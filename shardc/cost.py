"""Cost: what a plan moves, in closed form, before there is a graph.

A parameter of Phi bytes (full, with the interior padding of uneven rows) is Phi / s on a rung of s pieces. A hop over
an axis of n ranks whose value is V on the inner side sends, on a ring or by any other optimal algorithm,

    all-gather, reduce-scatter    (n-1)/n V        all-reduce    2 (n-1)/n V

bytes a rank. The moves of the ladder, over the axes between two rungs, and how often in a step of M micro-batches:

    refresh            params <- optim         all-gather                                     once
    forward gather     full <- params          all-gather                                     M times
    backward gather    full <- after_forward   all-gather                                     M times
    reduce             full -> grads           reduce-scatter                                 M times
    sync               grads -> optim          reduce-scatter, then flat all-reduce of the rest  once

In AMSP's terms (arXiv 2311.00257): both gathers and reduce are T_p, sync is T_os0, refresh T_os1; an even shard makes
their all-reduce and broadcast a reduce-scatter and an all-gather. T_g is no move: gradients are reduced to their
own rung at once. In PaRO's (arXiv 2310.06003): T = M (2 t_param + t_grad) + t_sync_grad + t_sync_param.

`step_hops` says all this once. Bytes of real parameters, in integers, and closed forms in symbols both come from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod
from operator import mul
from typing import Any, NamedTuple

import sympy
import torch

from passes.layout import Layout
from passes.wire import CASTS, LARGEST, Wires, message_bytes
from shardc.plan import Parameter, Plan
from shardc.times import is_faster_flat
from shardc.topology import Topology

MOVES = ("refresh", "forward gather", "backward gather", "reduce", "sync")
"""What moves bytes, in the order of a step."""

Moved = dict[tuple[str, str], int]
"""(move, axis) -> bytes that one rank sends over the axis."""


def step_bytes(
    plan: Plan,
    parameters: Mapping[str, Parameter],
    micro_batches: int,
    *,
    regathered: Collection[str] | None = None,
    used: Collection[str] | None = None,
) -> Moved:
    """Bytes that one rank sends in one optimizer step of `micro_batches` micro-batches, only the last of them synced.

    `parameters` gives (full shape, master dtype, trainable) by name. `used` are those that the forward uses (default:
    all), `regathered` those of them that the backward needs in full (default: all); a bias is not one of those, nor is
    the weight of a first layer, whose input needs no gradient. Gathers and refreshes travel in `param_dtype`, gradients
    in `reduce_dtype`, or in the plan's wires, scales included.
    """
    total: Counter[tuple[str, str]] = Counter()
    for index in range(micro_batches):
        total.update(micro_step_bytes(plan, parameters, micro_batches, index, regathered=regathered, used=used))
    return dict(total)


def micro_step_bytes(
    plan: Plan,
    parameters: Mapping[str, Parameter],
    micro_batches: int,
    index: int,
    *,
    regathered: Collection[str] | None = None,
    used: Collection[str] | None = None,
) -> Moved:
    """The part of `step_bytes` that falls to micro-batch `index`: the first refreshes, the last syncs."""
    moves = set(MOVES)
    if index > 0:
        moves.remove("refresh")
    if index < micro_batches - 1:
        moves.remove("sync")
    total = Counter({(move, axis): 0 for move in MOVES for axis in plan.topology.axes})
    layouts = plan.layouts({name: (shape, trainable) for name, (shape, _, trainable) in parameters.items()})
    for name in parameters if used is None else used:
        again = regathered is None or name in regathered
        for move, axis, size_bytes in _sent(plan, layouts[name], parameters[name]):
            if move in moves and (again or move != "backward gather"):
                total[move, axis] += size_bytes
    return dict(total)


def by_axis(moved: Moved) -> dict[str, int]:
    """Bytes of all moves together: axis -> bytes."""
    total: dict[str, int] = {}
    for (_, axis), size_bytes in moved.items():
        total[axis] = total.get(axis, 0) + size_bytes
    return total


def crossing(moved: Moved, topology: Topology) -> dict[str, float]:
    """Bytes of all moves that one rank sends over each axis, on the average: of the ranks inside an axis only one at a
    time crosses it in a flat collective."""
    total = dict.fromkeys(topology.axes, 0.0)
    for axis, sent_bytes in by_axis(moved).items():
        inside = 1
        for name in _names(axis):
            total[name] += sent_bytes / inside
            inside *= topology.group_size(name)
    return total


def _sent(plan: Plan, layout: Layout, parameter: Parameter) -> Iterator[tuple[str, str, int]]:
    """(move, axis, bytes) of every hop of one parameter."""
    _, dtype, trainable = parameter
    weight = plan.compute_dtype(dtype)
    gradient = plan.reduce_dtype or weight
    wires = plan.wires(layout, dtype)
    row = (layout.params, layout.after_forward, layout.grads, layout.optim)
    hops = (hop for hop in step_hops(row, layout.axes, trainable) if hop.size > 1)
    for _, group in groupby(hops, lambda hop: _fused(plan, layout, wires, hop)):
        first, *others = group
        if first.move in ("reduce", "sync"):
            value_bytes = first.rounds * _descending_bytes(layout, first, wires, gradient)
        else:
            value_bytes = _climbing_bytes(layout, first, wires, weight)
        yield from _over(plan, first, others, value_bytes)


def _fused(plan: Plan, layout: Layout, wires: Wires, hop: StepHop) -> tuple[Any, ...]:
    """What hops share that can be one flat collective."""
    if plan.chain == "hop" or hop.rounds == 2:
        return hop
    rung = _rung(layout, hop.axis)
    if hop.move in ("reduce", "sync"):
        return hop.move, hop.rounds, wires.down(hop.axis) and hop.axis
    return hop.move, hop.move == "forward gather" and rung < layout.after_forward, _wire_up(layout, hop, wires)


def _over(plan: Plan, first: StepHop, others: Sequence[StepHop], value_bytes: int) -> Iterator[tuple[str, str, int]]:
    """One flat collective, or each hop for itself; `first` is the innermost, with the largest value."""
    sizes = {hop.axis: hop.size for hop in (first, *others)}
    kind = "reduce_scatter" if first.move in ("reduce", "sync") else "all_gather"
    ranks = prod(sizes.values())
    if others and (plan.chain == "flat" or is_faster_flat(plan.topology, kind, sizes, value_bytes)):
        yield first.move, "+".join(sizes), value_bytes * (ranks - 1) // ranks
        return
    for hop in (first, *others):
        yield hop.move, hop.axis, value_bytes * (hop.size - 1) // hop.size
        value_bytes //= hop.size


def _elements(layout: Layout, rung: int) -> int:
    return prod(layout.padded_shape(rung))


def _descending_bytes(layout: Layout, hop: StepHop, wires: Wires, dtype: torch.dtype) -> int:
    """Of what goes into a hop: in a scaled format a message to each rank."""
    wire, rung = wires.down(hop.axis), _rung(layout, hop.axis)
    if wire in LARGEST:
        return hop.size * message_bytes(_elements(layout, rung + 1), wire, wires.block)
    itemsize = CASTS[wire].itemsize if wire else dtype.itemsize
    return _elements(layout, 0) * itemsize // hop.pieces


def _climbing_bytes(layout: Layout, hop: StepHop, wires: Wires, dtype: torch.dtype) -> int:
    """Of what a hop brings; in a scaled format, messages of the shards of the axis that it has it from."""
    rung, (wire, start) = _rung(layout, hop.axis), _wire_up(layout, hop, wires)
    if wire not in LARGEST:
        return _elements(layout, rung) * (CASTS[wire].itemsize if wire else dtype.itemsize)
    messages = layout.size(start) // layout.size(rung)
    return messages * message_bytes(_elements(layout, start), wire, wires.block)


def _wire_up(layout: Layout, hop: StepHop, wires: Wires) -> tuple[str, int]:
    """The format of a hop up, which stays from the axis that has it to the inner ones that have none, and the rung
    where it begins."""
    wire, start = "", 0
    for rung in reversed(range(_rung(layout, hop.axis), layout.optim if hop.move == "refresh" else layout.params)):
        axis, size = layout.axes[rung]
        if size > 1 and wires.up(axis) not in ("", wire):
            wire, start = wires.up(axis), rung + 1
    return wire, start


def _rung(layout: Layout, axis: str) -> int:
    return [name for name, _ in layout.axes].index(_names(axis)[0])


class StepHop(NamedTuple):
    """A hop of a move; numbers are integers or symbols."""

    move: str
    axis: str
    """or several, inner first ("gpu+node")"""
    size: Any
    """ranks"""
    pieces: Any
    """of the full value: its value on the inner side is one of them"""
    rounds: int
    """times around the ring: 2 for an all-reduce, else 1"""


def step_hops(row: Sequence[int], axes: Sequence[tuple[str, Any]], trainable: bool = True) -> Iterator[StepHop]:
    """The moves of the ladder for a row (params, after_forward, grads, optim) on axes (name, size), inner first."""
    params, after_forward, grads, optim = row
    yield from _chain("refresh", axes, params, optim)
    yield from _chain("forward gather", axes, 0, params)
    yield from _chain("backward gather", axes, 0, after_forward)
    if trainable:
        yield from _chain("reduce", axes, 0, grads)
        yield from _chain("sync", axes, grads, optim)
        whole = [(axis, size) for axis, size in axes[optim:] if size != 1]
        if whole:
            names, sizes = zip(*whole, strict=True)
            yield StepHop("sync", "+".join(names), prod(sizes), _pieces(axes, optim), 2)


def _chain(move: str, axes: Sequence[tuple[str, Any]], low: int, high: int) -> Iterator[StepHop]:
    """All-gathers or reduce-scatters between two rungs: over axis i the value is Phi / (pieces on rung i)."""
    for rung in range(low, high):
        yield StepHop(move, *axes[rung], _pieces(axes, rung), 1)


def _pieces(axes: Sequence[tuple[str, Any]], rung: int) -> Any:
    return prod(size for _, size in axes[:rung])


# With symbols


@dataclass(frozen=True)
class Symbols:
    """What closed forms are in; axes inner first."""

    axes: tuple[str, ...]

    @property
    def micro_batches(self) -> sympy.Symbol:
        return sympy.Symbol("M", positive=True, integer=True)

    @property
    def elements(self) -> sympy.Symbol:
        """Phi, of all parameters."""
        return sympy.Symbol("Phi", positive=True)

    @property
    def weight_bytes(self) -> sympy.Symbol:
        """Of one element of a parameter in compute and on the wire; also of one of a gradient."""
        return sympy.Symbol("w", positive=True)

    def size(self, axis: str) -> sympy.Symbol:
        """Ranks of an axis."""
        return sympy.Symbol(f"n_{axis}", positive=True, integer=True)

    def bandwidth(self, axis: str) -> sympy.Symbol:
        """Bytes a second that one rank sends over an axis."""
        return sympy.Symbol(f"B_{axis}", positive=True)

    def latency(self, axis: str) -> sympy.Symbol:
        """Seconds of a step of a ring."""
        return sympy.Symbol(f"a_{axis}", nonnegative=True)


def move_seconds(row: Sequence[int], axes: Sequence[str]) -> dict[str, sympy.Expr]:
    """Seconds of each move, once, nothing overlapped: the bytes of its hops over the bandwidths of their axes, and a
    latency for each step of their rings. For all parameters in one bucket, evenly sharded.

    `row` is (params, after_forward, grads, optim) in numbers of inner axes, `axes` their names, inner first. (PaRO's
    t_param, t_grad, t_sync_grad and t_sync_param are forward gather, reduce, sync and refresh.)
    """
    of = Symbols(tuple(axes))
    total: dict[str, sympy.Expr] = dict.fromkeys(MOVES, sympy.Integer(0))
    for hop in step_hops(row, [(axis, of.size(axis)) for axis in axes]):
        sent_bytes = hop.rounds * of.elements * of.weight_bytes / hop.pieces * (hop.size - 1) / hop.size
        steps = hop.rounds * (hop.size - 1)
        total[hop.move] += sent_bytes / _bandwidth(of, hop.axis) + steps * sympy.Max(*map(of.latency, _names(hop.axis)))
    return total


def _bandwidth(of: Symbols, axis: str) -> sympy.Expr:
    """A flat ring crosses an axis at as many places as there are ranks inside it."""
    names = _names(axis)
    inside = accumulate(map(of.size, names), mul, initial=sympy.Integer(1))
    return sympy.Min(*(of.bandwidth(name) * ranks for name, ranks in zip(names, inside, strict=False)))


def _names(axis: str) -> list[str]:
    return axis.split("+")


def step_seconds(row: Sequence[int], axes: Sequence[str]) -> sympy.Expr:
    """Seconds of all moves of a step of M micro-batches, nothing overlapped (PaRO: T = M (2 t_param + t_grad) +
    t_sync_grad + t_sync_param)."""
    once = move_seconds(row, axes)
    each = once["forward gather"] + once["backward gather"] + once["reduce"]
    return Symbols(tuple(axes)).micro_batches * each + once["refresh"] + once["sync"]


def rest_bytes(row: Sequence[int], axes: Sequence[str], optimizer_bytes: int = 12) -> sympy.Expr:
    """Bytes a rank at rest between micro-batches: compute copies and accumulators where their rungs are not optim's,
    and master parameters with optimizer state (`optimizer_bytes` an element; 12 for Adam with fp32 masters). AMSP's
    2 Phi/s_p + 2 Phi/s_g + 12 Phi/s_os, less what needs no second home. Without `.grad`."""
    of = Symbols(tuple(axes))
    sizes = [(axis, of.size(axis)) for axis in axes]
    params, _, grads, optim = row
    total = optimizer_bytes * of.elements / _pieces(sizes, optim)
    for rung in (params, grads):
        if rung != optim:
            total += of.weight_bytes * of.elements / _pieces(sizes, rung)
    return total
