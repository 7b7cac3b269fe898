"""How much the wires of a plan lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from passes import ops
from passes.errors import Error
from passes.insert import Param
from passes.wire import CASTS, dequantize, quantize
from shardc.program import Program


class Lost(NamedTuple):
    """Relative errors (norm of the difference to norm of the value) of one parameter."""

    gather: float
    """of the weight that compute gets"""
    reduce: float | None
    """of its gradient; None where there is none"""


def quantization_error(program: Program, parameters: Mapping[str, torch.Tensor]) -> dict[str, Lost]:
    """What a program's wires make of real values, by parameter name; those that travel as they are have no line.

    `parameters` are full ones, `dict(model.named_parameters())` of the plain model, with the `.grad` of a backward. No
    ranks are needed, whatever the plan's world: values are cut as its ranks have them. A gradient is taken to be the
    same on all ranks, so that errors add up; where they differ they partly cancel. Raises `Error` for a parameter that
    is missing or of another shape.
    """
    found: dict[str, Lost] = {}
    for param in program.params.values():
        name = param.layout.name
        value = parameters.get(name)
        if value is None or tuple(value.shape) != param.layout.shape:
            raise Error(
                f"quantization_error lacks {name!r} of shape {list(param.layout.shape)}",
                fix="pass dict(model.named_parameters()) of the plain model",
            )
        if param.wires.gather or param.wires.reduce:
            grad = value.grad if param.layout.trainable else None
            reduce = None if grad is None else _lost(grad, param, _reduced)
            found[name] = Lost(_lost(value.detach(), param, _gathered), reduce)
    return found


def _lost(value: torch.Tensor, param: Param, carry: Callable[[torch.Tensor, Param], torch.Tensor]) -> float:
    layout = param.layout
    full = ops.expand(value.float(), layout.shape[0], [size for _, size in layout.axes[: layout.optim]])
    norm = full.norm()
    return float((carry(full, param) - full).norm() / norm) if norm else 0.0


def _gathered(full: torch.Tensor, param: Param) -> torch.Tensor:
    """Refreshed, then gathered: each from a rung up, in the format of the outermost axis that has one, or its own."""
    layout = param.layout
    for start, end in ((layout.optim, layout.params), (layout.params, 0)):
        wire = ""
        for rung in reversed(range(end, start)):
            axis, size = layout.axes[rung]
            if size > 1 and param.wires.up(axis) not in ("", wire):
                wire = param.wires.up(axis)
                full = _through(full, wire, layout.size(rung + 1), param.wires.block)
    return full


def _reduced(full: torch.Tensor, param: Param) -> torch.Tensor:
    for rung, (axis, size) in enumerate(param.layout.axes[: param.layout.optim]):
        if size > 1 and param.wires.down(axis):
            full = _through(full, param.wires.down(axis), param.layout.size(rung + 1), param.wires.block)
    return full


def _through(full: torch.Tensor, wire: str, pieces: int, block: int) -> torch.Tensor:
    """A value whose pieces travelled in a format."""
    if wire in CASTS:
        return full.to(CASTS[wire]).float()
    return dequantize(quantize(full, wire, block, pieces), wire, block, list(full.shape), torch.float32)
