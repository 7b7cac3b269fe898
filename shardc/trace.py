"""Trace: a model's program for any world size, in one process, without devices and without a process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from passes.order import Orders
from shardc import _torch
from shardc.breaks import captured_call
from shardc.capture import own_code
from shardc.check import check_model
from shardc.compile import build, paused_gc
from shardc.model import hollows, named, params_of, runtime_of, swapped
from shardc.plan import Plan
from shardc.program import Program
from shardc.runner import Runner


class _Traced(BaseException):
    """Leaves the model's call when there is a program."""


def trace(
    model: nn.Module,
    plan: Plan,
    *args: Any,
    keep: bool = True,
    progress: Callable[[str], None] = lambda stage: None,
    **kwargs: Any,
) -> Program:
    """The program of `model(*args, **kwargs)` under `plan`. The model (which may be on the meta device) is left as
    it is; arguments may be on the meta device too. Graphs are of the device that the rest is on, or of the CPU, and are
    kept after every stage (`program.after("insert")`) unless `keep` is False."""
    _torch.check_version()
    check_model(model)
    parameters = named(model)
    params = params_of(plan, parameters)
    runner = Runner(progress, keep)
    found: list[Program] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with paused_gc(), _torch.lazy_code():
            found.append(build(module, inputs, names, params, plan, runner, Orders()))
        return _leave

    device = _device([*parameters.values(), *model.buffers(), *tree_leaves((args, kwargs))])
    stand_ins = hollows(plan, parameters, device)
    on_device = partial(_on, device)
    buffers = {name: on_device(buffer) for name, buffer in model.named_buffers()}
    names = {id(value): name for name, value in {**stand_ins, **buffers}.items()}
    call = torch.compile(own_code(type(model).forward), backend=backend, fullgraph=True, dynamic=False)
    with swapped(model, stand_ins, buffers), _torch.capturing(), contextlib.suppress(_Traced):
        captured_call(call, type(model).forward, model, tree_map(on_device, args), tree_map(on_device, kwargs))
    return found[0]


def _leave(*args: Any) -> None:
    raise _Traced


def _device(values: Iterable[Any]) -> torch.device:
    """Where the first is that is not on the meta device."""
    on = (value.device for value in values if isinstance(value, torch.Tensor) and not value.is_meta)
    return next(on, torch.device("cpu"))


def _on(device: torch.device, value: Any) -> Any:
    """A meta tensor as one of the device without storage; nothing is computed with it."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    new.untyped_storage().resize_(0)
    return new


def programs(model: nn.Module) -> list[Program]:
    """The programs of a compiled model, one for each signature that it was called with."""
    return list(runtime_of(model).programs)
