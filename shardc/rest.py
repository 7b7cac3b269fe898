"""Rest: what one rank holds between steps under a plan, and from a forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import torch

from passes.feedback import residual_shapes
from passes.layout import Layout
from passes.wire import NONE

if TYPE_CHECKING:
    from shardc.plan import Parameter, Plan

MIB = 2**20


def state_bytes(plan: Plan, named: Mapping[str, Parameter], optimizer_states: int = 2) -> dict[str, int]:
    """Bytes that one rank holds at rest under a plan, by kind; the interior padding of uneven rows counts.

    `named` gives (full shape, master dtype, trainable) by name.
    - master: parameters on the optim rung.
    - optimizer: `optimizer_states` values like the master for each trainable element (2 for Adam).
    - copies: compute parameters on the params rung in `param_dtype`, where params is below optim.
    - accumulators: gradients on the grads rung in `reduce_dtype`, where grads is not optim.
    - grads: `.grad`, on the optim rung in the dtype of the master.
    - residuals: what reductions have lost, in float32, where the plan has `error_feedback`.
    """
    total = dict.fromkeys(("master", "optimizer", "copies", "accumulators", "grads", "residuals"), 0)
    layouts = plan.layouts({name: (shape, trainable) for name, (shape, _, trainable) in named.items()})
    for name, layout in layouts.items():
        for kind, size in _layout_bytes(plan, layout, named[name][1], optimizer_states).items():
            total[kind] += size
    return total


def _layout_bytes(plan: Plan, layout: Layout, dtype: torch.dtype, optimizer_states: int) -> dict[str, int]:
    own, copy = prod(layout.rung_shape(layout.optim)), prod(layout.rung_shape(layout.params))
    accumulator = prod(layout.rung_shape(layout.grads)) * (layout.grads != layout.optim)
    wires = plan.wires(layout, dtype) if plan.error_feedback else NONE
    wire = plan.reduce_dtype or plan.param_dtype or dtype
    return {
        "master": own * dtype.itemsize,
        "optimizer": own * dtype.itemsize * optimizer_states * layout.trainable,
        "copies": copy * plan.compute_dtype(dtype).itemsize * (layout.params < layout.optim),
        "accumulators": accumulator * wire.itemsize,
        "grads": own * dtype.itemsize * layout.trainable,
        "residuals": sum(4 * prod(shape) for shape in residual_shapes(layout, wires)),
    }


def held_bytes(plan: Plan, named: Mapping[str, Parameter]) -> int:
    """Bytes of the values that the forward hands to the backward because after_forward is below params."""
    layouts = plan.layouts({name: (shape, trainable) for name, (shape, _, trainable) in named.items()})
    return sum(
        prod(layout.rung_shape(layout.after_forward)) * plan.compute_dtype(named[name][1]).itemsize
        for name, layout in layouts.items()
        if layout.after_forward < layout.params
    )


def rest_lines(plan: Plan, named: Mapping[str, Parameter], optimizer_states: int) -> list[str]:
    """A table: for each state its rung, the ranks that share one copy, and MiB a rank."""
    size, held = state_bytes(plan, named, optimizer_states), held_bytes(plan, named)
    lines = [
        f"{'state':<14} {'rung':<16} {'ranks a copy':>12} {'MiB a rank':>12}  what",
        _line(plan, "params", size["copies"], _copies_note(plan, size["copies"])),
        _line(plan, "after_forward", held, _held_note(held)),
        _line(plan, "grads", size["accumulators"], _accumulators_note(plan, size)),
        _line(plan, "optim", size["master"] + size["optimizer"], _split_note(size)),
    ]
    if plan.error_feedback:
        lines.append(_sum_line("residuals", size["residuals"], "of gradients that go down in a wire"))
    return [*lines, _sum_line("at rest", sum(size.values()), "with .grad, without after_forward")]


def _line(plan: Plan, state: str, size_bytes: int, note: str) -> str:
    rung = getattr(plan, state)
    name, shared = plan.topology.rung_name(rung), plan.topology.shared_by(rung)
    return f"{state:<14} {name:<16} {shared:>12} {mib(size_bytes):>12}  {note}"


def _copies_note(plan: Plan, copies_bytes: int) -> str:
    if not copies_bytes:
        return "same as optim"
    return "compute copies in " + (dtype_name(plan.param_dtype) or "the dtype of the master")


def _accumulators_note(plan: Plan, size: Mapping[str, int]) -> str:
    grad = f".grad {mib(size['grads'])} on optim's rung"
    if not size["accumulators"]:
        return "the accumulator is .grad; " + grad
    dtype = dtype_name(plan.reduce_dtype or plan.param_dtype) or "the dtype of the master"
    return f"accumulators in {dtype}; {grad}"


def _sum_line(what: str, size_bytes: int, note: str) -> str:
    return f"{what:<14} {'':<16} {'':>12} {mib(size_bytes):>12}  {note}"


def _held_note(held_bytes: int) -> str:
    return "held from a forward to its backward" if held_bytes else "nothing more than params"


def _split_note(size: dict[str, int]) -> str:
    return f"master {mib(size['master'])} + optimizer {mib(size['optimizer'])}"


def mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f}"


def dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
