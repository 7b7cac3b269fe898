"""Cost: what a plan moves, in closed form, before there is a graph.

A parameter of Phi bytes (full, with the interior padding of uneven rows) is Phi / s on a rung of s pieces. A hop over
an axis of n ranks whose value is V on the inner side sends, on a ring or by any other optimal algorithm,

    all-gather, reduce-scatter    (n-1)/n V        all-reduce    2 (n-1)/n V

bytes a rank. The moves of the ladder, over the axes between two rungs, and how often in a step of M micro-batches:

    refresh            params <- optim         all-gather                                     once
    forward gather     full <- params          all-gather                                     M times
    backward gather    full <- after_forward   all-gather                                     M times
    reduce             full -> grads           reduce-scatter                                 M times
    sync               grads -> optim          reduce-scatter, then all-reduce over the rest  once

In AMSP's terms (arXiv 2311.00257): both gathers and reduce are T_p, sync is T_os0, refresh T_os1; an even shard makes
their all-reduce and broadcast a reduce-scatter and an all-gather. T_g is no move: gradients are reduced to their
own rung at once. In PaRO's (arXiv 2310.06003): T = M (2 t_param + t_grad) + t_sync_grad + t_sync_param.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from math import prod

from passes.layout import Layout
from shardc.model import compute_dtype
from shardc.plan import Parameter, Plan

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
    in `reduce_dtype`.
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


def _sent(plan: Plan, layout: Layout, parameter: Parameter) -> Iterator[tuple[str, str, int]]:
    """(move, axis, bytes) of every hop of one parameter."""
    _, dtype, trainable = parameter
    weight = compute_dtype(plan, dtype)
    yield from _chain("refresh", layout, weight.itemsize, layout.params, layout.optim)
    yield from _chain("forward gather", layout, weight.itemsize, 0, layout.params)
    yield from _chain("backward gather", layout, weight.itemsize, 0, layout.after_forward)
    if trainable:
        gradient = plan.reduce_dtype or weight
        yield from _chain("reduce", layout, gradient.itemsize, 0, layout.grads)
        yield from _chain("sync", layout, gradient.itemsize, layout.grads, layout.optim)
        yield from _whole("sync", layout, gradient.itemsize)


def _chain(move: str, layout: Layout, itemsize: int, low: int, high: int) -> Iterator[tuple[str, str, int]]:
    """All-gathers or reduce-scatters between two rungs: over axis i the value is Phi / (pieces on rung i)."""
    for rung, (axis, size) in enumerate(layout.axes[low:high], low):
        yield move, axis, _rung_bytes(layout, rung, itemsize) * (size - 1) // size


def _whole(move: str, layout: Layout, itemsize: int) -> Iterator[tuple[str, str, int]]:
    """All-reduces of the optim shard over the axes that hold copies of it."""
    for axis, size in layout.axes[layout.optim :]:
        yield move, axis, 2 * _rung_bytes(layout, layout.optim, itemsize) * (size - 1) // size


def _rung_bytes(layout: Layout, rung: int, itemsize: int) -> int:
    """Phi / (pieces on the rung)."""
    return layout.padded_rows * prod(layout.shape[1:]) * itemsize // layout.size(rung)
