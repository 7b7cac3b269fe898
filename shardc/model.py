"""The model, sharded in place: leaves, initial values, and the class that the user's object becomes.

Names, methods, attributes and `isinstance` stay; each parameter becomes a DTensor on the one full mesh, listed inner
axis first: `Shard(0)` on the axes of the optim rung, `Replicate` on the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from passes.errors import Error
from passes.insert import Param
from passes.layout import Layout
from passes.wire import NONE, Wires
from shardc import _torch
from shardc.capture import hollow
from shardc.leaf import leaf
from shardc.plan import WIRE_BLOCK, Plan
from shardc.step import Runtime

Slot = tuple[dict[str, Any], str, str]
"""a module's dict of parameters, the key in it, the parameter's name"""


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, each once (a tied one under its first name)."""
    return dict(model.named_parameters())


def slots(model: nn.Module) -> list[Slot]:
    """Every place in the model where a parameter sits."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [
        (module._parameters, key, names[id(p)])
        for module in model.modules()
        for key, p in module._parameters.items()
        if p is not None
    ]


@contextmanager
def swapped(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """The model with other parameters and buffers, for as long as this is open."""
    places: list[tuple[dict[str, Any], str, Any]] = [(d, k, parameters[n]) for d, k, n in slots(model)]
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and f"{prefix}.{key}".lstrip(".") in buffers:
                places.append((module._buffers, key, buffers[f"{prefix}.{key}".lstrip(".")]))
    before = [(owner, key, owner[key]) for owner, key, _ in places]
    try:
        for owner, key, value in places:
            owner[key] = value
        yield
    finally:
        for owner, key, value in before:
            owner[key] = value


def params_of(plan: Plan, parameters: dict[str, nn.Parameter]) -> dict[str, Param]:
    """Layouts and dtypes by parameter name."""
    layouts = plan.layouts({name: (tuple(p.shape), p.requires_grad) for name, p in parameters.items()})
    scale = 1 / plan.topology.world if plan.reduce == "mean" else 1.0
    params = {name: _param(plan, layouts[name], p.dtype, scale) for name, p in parameters.items()}
    _check_blocks(plan, params)
    return params


def _check_blocks(plan: Plan, params: dict[str, Param]) -> None:
    """Raises `Error` for blocks that are larger than usual, so large that nothing travels in the plan's wires. Where
    nobody chose them, `explain` says so."""
    if plan.wire_block <= WIRE_BLOCK:
        return
    empty = [p.layout for p in params.values() if plan.leaves_blocks_empty(p.layout, p.master_dtype)]
    if empty and all(p.wires in (NONE, Wires(block=plan.wire_block)) for p in params.values()):
        most = max(prod(layout.rung_shape(layout.optim)) for layout in empty)
        raise Error(
            f"wire_block is {plan.wire_block}, but no parameter has a shard that fills a block: the largest has "
            f"{most} elements, and would take more bytes than it does as it is",
            fix=f"wire_block={max(8, most // 8 * 8)}, or no gather_wire and reduce_wire",
        )


def _param(plan: Plan, layout: Layout, master: torch.dtype, scale: float) -> Param:
    compute = plan.compute_dtype(master)
    rest = compute if layout.params < layout.optim else master
    wires = plan.wires(layout, master)
    return Param(layout, rest, plan.reduce_dtype or compute, master, scale, wires)


def hollows(plan: Plan, parameters: dict[str, nn.Parameter], device: torch.device) -> dict[str, nn.Parameter]:
    """A stand-in without storage for each parameter, in the compute dtype."""
    return {n: hollow(p.shape, plan.compute_dtype(p.dtype), device, p.requires_grad) for n, p in parameters.items()}


# Values at start


def shard_leaf(p: torch.Tensor, param: Param, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    """Rank 0's value, cut; the local tensor is the head of a buffer of `piece_rows` rows, so that it travels without
    a copy. Of a parameter on the meta device: as yet without a value."""
    layout, coordinate = param.layout, tuple(mesh.get_coordinate() or ())
    buffer = torch.zeros(layout.rung_shape(layout.optim), dtype=p.dtype, device=device)
    local = buffer[: layout.local_rows(coordinate)] if layout.optim else buffer
    if p.is_meta:
        local.fill_(_unset(p.dtype))
        return leaf(local, layout, mesh, p.requires_grad)
    full = p.detach().to(device).contiguous()
    if mesh.size() > 1:
        _broadcast(full, layout.name)
    start = layout.local_start(coordinate)
    local.copy_(full[start : start + len(local)] if layout.optim else full)
    return leaf(local, layout, mesh, p.requires_grad)


def _broadcast(full: torch.Tensor, name: str) -> None:
    try:
        dist.broadcast(full, src=0)
    except RuntimeError as error:
        raise Error(
            f"The broadcast of the initial value of {name!r} failed.\n    {str(error).strip().splitlines()[0]}",
            fix="Look for a rank that raised or died.",
        ) from error


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Rank 0's seed on every rank, for initialisers; the generators continue as if nothing was drawn."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)], device=device)
    if dist.get_world_size() > 1:
        dist.broadcast(seed, src=0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(seed))
        yield


Initialiser = Callable[[nn.Module], None]


def materialise(
    model: nn.Module, module: nn.Module, prefix: str, device: torch.device, init: Initialiser | None, later: bool
) -> None:
    """Full values of the parameters and buffers that one module owns on the meta device. Every rank draws the same
    ones, in the order of the modules, so they do not depend on the mesh. With `later`, parameters get their values
    afterwards, and only modules that own buffers are initialised."""
    own = [key for key, p in module._parameters.items() if p is not None and p.is_meta]
    buffers = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
    if not (buffers or (own and not later)):
        return
    initialise = init or _initialiser(model, module, prefix)
    for key in own:
        p = module._parameters[key]
        module._parameters[key] = nn.Parameter(_unset_like(p, device), p.requires_grad)
    for key in buffers:
        module._buffers[key] = _unset_like(module._buffers[key], device)
    with torch.no_grad():
        initialise(module)
    for key in (*own, *buffers):
        _check_set(getattr(module, key), f"{prefix}.{key}".lstrip("."))


def _unset_like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What an initialiser forgets must not go on as whatever was in memory."""
    new = torch.empty_like(value, device=device)
    return new if value.dtype == torch.bool else new.fill_(_unset(value.dtype))


def _unset(dtype: torch.dtype) -> float | int:
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _check_set(value: torch.Tensor, name: str) -> None:
    if value.dtype == torch.bool:
        return
    unset = _unset(value.dtype)
    if (value.isnan() if unset != unset else value == unset).any():
        raise Error(
            f"The initialiser of its module left {name!r} without a value.",
            fix="Pass `init=` (a function of one module) to shardc.compile, and have it set each parameter and buffer.",
        )


def _initialiser(model: nn.Module, module: nn.Module, prefix: str) -> Initialiser:
    """transformers' own per-module initialiser, or the module's `reset_parameters`."""
    if hasattr(model, "_init_weights"):
        return model._init_weights
    if hasattr(module, "reset_parameters"):
        return lambda m: m.reset_parameters()
    raise Error(
        f"Module {prefix or type(module).__name__!r} has parameters or buffers on the meta device "
        "and no way to initialise them.",
        fix="Give it a `reset_parameters()` method, or pass `init=` (a function of one module) to shardc.compile.",
    )


# The class of a compiled model


class Compiled(nn.Module):
    """Mixed into the class of a compiled model; what it adds to the user's own class."""

    _shardc: Runtime
    _shardc_call: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._shardc_call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        new = memo[id(self)] = self.__class__.__new__(self.__class__)
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Error(
            "A compiled model is bound to its process group and cannot be pickled.",
            fix="Save model.state_dict(), with torch.distributed.checkpoint or torch.save.",
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to the gradients on the grads rung and do not sync (as in DDP)."""
        return self._shardc.no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether the next backwards sync (as in FSDP2)."""
        self._shardc.syncing = requires_gradient_sync

    def prefetch(self) -> None:
        """Begins the next forward's refresh and first gathers; to be called on all ranks behind `optimizer.step()`,
        before the next batch is loaded. Without effect before the first forward. What it began is dropped, and moved
        again, where a parameter is written to before the next forward, or that is of another kind than the last that
        trained. Call it behind `zero_grad()`, for gradients would need room beside what is gathered, and not behind the
        last step. Raises `Error` for backend "inductor-whole"."""
        self._shardc.prefetch()

    def refresh(self) -> None:
        """Parameters were changed by hand: the next forward makes new compute copies."""
        self._shardc.mark_stale()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """What `to`, `cuda`, `half` and the like call. Moving to where everything is already changes nothing."""
        for value in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=value.dtype, device=value.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise Error(
                    f"A compiled model cannot be converted (from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device}): its graphs and shards are made for what it was.",
                    fix="Convert it before shardc.compile; to compute in another dtype, pass the plan `param_dtype=`.",
                )
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `.grad` and the accumulators."""
        super().zero_grad(set_to_none)
        self._shardc.clear_gradients()


def runtime_of(model: nn.Module) -> Runtime:
    if not isinstance(model, Compiled):
        raise Error(f"{type(model).__name__} is not a compiled model.", fix="Pass what shardc.compile returned.")
    return model._shardc


def adopt(model: nn.Module, runtime: Runtime, call: Callable[..., Any]) -> nn.Module:
    """The same object, of a class derived from its own."""
    cls = type(model)
    object.__setattr__(model, "_shardc", runtime)
    object.__setattr__(model, "_shardc_call", call)
    model.__class__ = type(cls.__name__, (Compiled, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    model.register_load_state_dict_pre_hook(_take_own_rows)
    model.register_load_state_dict_post_hook(lambda module, keys: module._shardc.mark_stale())
    return model


def _take_own_rows(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
    """Lets a state dict of full tensors be loaded: each becomes a DTensor of this rank's rows of it."""
    if metadata.get("assign_to_params_buffers", False):
        raise Error(
            "load_state_dict(assign=True) would replace the parameters of a compiled model.", fix="Leave it False."
        )
    sharded = {id(p.tensor): p for p in module._shardc.params.values()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
            state[prefix + name] = _torch.dtensor(value[sharded[id(parameter)].rows].to(parameter.device), parameter)
