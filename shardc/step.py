"""Step: the runtime of one compiled model. Parameters at rest, copies, accumulators, and the autograd function around
the two outer callables of a program.

What lives between steps is visible here and nowhere else: per parameter the DTensor that the user sees (optim rung),
a compute copy where the params rung is below optim, and an accumulator where grads is not on the optim rung.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from passes import feedback, ops
from passes.accumulate import accumulator_dtype
from passes.build import identifiers
from passes.errors import Error
from passes.insert import Param
from shardc import _torch
from shardc.ahead import Begun
from shardc.capture import hollow
from shardc.leaf import Changed, watched
from shardc.lower import Lowering, Run
from shardc.program import Program
from shardc.unsynced import UnsyncedGradient


@dataclass(eq=False)
class Sharded:
    """One parameter at rest."""

    name: str
    param: Param
    tensor: nn.Parameter
    """the DTensor that the user sees; its local tensor has room for `piece_rows` rows"""
    hollow: nn.Parameter
    """what stands in for it while the model runs"""
    copy: torch.Tensor | None = None
    """on the params rung"""
    accumulator: torch.Tensor | None = None
    """on the grads rung, in the place of `.grad`; None between updates"""
    synced_grad: torch.Tensor | None = None
    """an earlier synced `.grad`, kept aside while unsynced ones accumulate"""
    seen_version: int = -1
    """of `tensor` when it was last looked at; -1 after a change that bumps none"""

    def __post_init__(self) -> None:
        self.tensor = watched(self.tensor, Changed(self.changed))

    def changed(self) -> None:
        """The tensor was written to without a new version."""
        self.seen_version = -1

    @property
    def rows(self) -> slice | EllipsisType:
        """Of the full parameter: those that lie on this rank."""
        if not self.param.layout.optim:
            return ...
        start = self.param.layout.local_start(tuple(self.tensor.device_mesh.get_coordinate() or ()))
        return slice(start, start + len(_torch.local_of(self.tensor)))

    @cached_property
    def travels(self) -> torch.Size:
        """The shape of the optim piece on its way."""
        return torch.Size(self.param.layout.rung_shape(self.param.layout.optim))

    @property
    def shard(self) -> torch.Tensor:
        """The optim piece at its travelling length: the local rows and the room behind them."""
        local = _torch.local_of(self.tensor)
        if local.shape == self.travels:
            return local.detach()
        padded = local.new_zeros(self.travels)
        padded[: local.shape[0]] = local
        return padded

    def at_rest(self) -> torch.Tensor:
        """The value on the params rung that a graph takes."""
        if not self.param.has_copy:
            return self.shard
        assert self.copy is not None, f"{self.name} was never refreshed"
        return self.copy

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        """A synced gradient as a DTensor like the parameter."""
        local = _torch.local_of(self.tensor)
        return _torch.dtensor(value[: local.shape[0]] if local.dim() else value, self.tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharded:
        """With a tensor of its own, and nothing that is derived from it."""
        shape, device, trains = self.hollow.shape, self.hollow.device, self.hollow.requires_grad
        stand_in = hollow(shape, self.hollow.dtype, device, trains)
        return Sharded(self.name, self.param, copy.deepcopy(self.tensor, memo), stand_in)

    def clear(self) -> None:
        """What waited is dropped; a marker that was zeroed, not removed, becomes the zeros that it stands for."""
        self.accumulator = self.synced_grad = None
        if isinstance(self.tensor.grad, UnsyncedGradient):
            self.tensor.grad = torch.zeros_like(self.tensor) if self.tensor.grad.zeroed else None

    def accumulate(self, value: torch.Tensor) -> None:
        """Keeps an unsynced gradient. A synced `.grad` is set aside: it must not be reduced again."""
        if self.accumulator is None:
            self.synced_grad = self.tensor.grad
            self.tensor.grad = UnsyncedGradient(self.tensor, self.name)
        self.accumulator = value.to(accumulator_dtype(self.param))

    def take(self) -> torch.Tensor:
        """What has accumulated, handed over to a backward that adds to it; `.grad` is what was synced before. Zeros,
        where nothing has."""
        if self.accumulator is None:
            layout, dtype = self.param.layout, accumulator_dtype(self.param)
            return torch.zeros(layout.rung_shape(layout.grads), dtype=dtype, device=self.hollow.device)
        value, self.tensor.grad = self.accumulator, self.synced_grad
        self.clear()
        return value


@dataclass(eq=False)
class Runtime:
    """The state of one compiled model and the switches of its loop."""

    params: dict[str, Sharded]
    lowering: Lowering
    stale: set[str] = field(default_factory=set)
    """parameters whose copy is older than their optim shard"""
    syncing: bool = True
    first: bool = True
    """no backward without sync came since the last one with: equal on all ranks, unlike what has accumulated"""
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    """what reductions have lost, to be added to the next ones; by placeholder name"""
    latest: weakref.ref[Step] | None = None
    """that trained last"""
    begun: Begun | None = None
    """the next forward, as far as it has gone ahead"""
    programs: list[Program] = field(default_factory=list)
    replaced: dict[int, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    """the parameters that the model had before it was sharded, by id"""

    def __post_init__(self) -> None:
        self.keys = identifiers(self.params)  # what accumulators are called in graphs
        self.mark_stale()
        watch_optimizers(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """For a copy of the model. It shares the compiled regions."""
        params = {name: copy.deepcopy(p, memo) for name, p in self.params.items()}
        return memo.setdefault(id(self), Runtime(params, self.lowering, syncing=self.syncing))

    def mark_stale(self) -> None:
        """The next forward refreshes; until then copies need no room."""
        for name, p in self.params.items():
            p.changed()
            if p.param.has_copy:
                p.copy = None
                self.stale.add(name)

    def notice_updates(self) -> None:
        """Updates written by hand, in whatever form."""
        for name, p in self.params.items():
            if p.param.has_copy and p.tensor._version != p.seen_version:
                p.seen_version = p.tensor._version
                self.stale.add(name)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It would update tensors that nobody uses any more."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self.replaced and self.replaced[id(p)]() is p:
                    raise Error(
                        f"{type(optimizer).__name__} has parameters that the model had before shardc.compile.",
                        fix="Compile the model first, then build the optimizer on model.parameters().",
                    )

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Was it a step on our parameters?"""
        own = {id(p.tensor) for p in self.params.values()}
        if any(id(q) in own for group in optimizer.param_groups for q in group["params"]):
            self.mark_stale()

    def prefetch(self) -> None:
        """Begins the forward that trained last, of which the next is taken to be another."""
        step = self.latest() if self.latest else None
        if step:
            self.drop_begun()
            self.notice_updates()
            self.begun = Begun.of(step)

    def drop_begun(self) -> None:
        if self.begun:
            self.begun.drop()
        self.begun = None

    @property
    def again(self) -> bool:
        """Gradients lie there."""
        return any(p.accumulator is not None or p.tensor.grad is not None for p in self.params.values())

    def forget_programs(self) -> None:
        """And the regions that were compiled for them; backwards that are still to come keep theirs."""
        self.programs.clear()
        self.lowering.known.clear()
        self.lowering.compiled.clear()

    def clear_gradients(self) -> None:
        for p in self.params.values():
            p.clear()

    def notice_cleared(self) -> None:
        """`optimizer.zero_grad()` removed or zeroed the marker that stood for an accumulator."""
        for p in self.params.values():
            if p.accumulator is not None and UnsyncedGradient.cleared(p.tensor.grad):
                p.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @contextmanager
    def hollowed(self, slots: Sequence[tuple[dict[str, Any], str, Sharded]]) -> Iterator[tuple[bool, ...]]:
        """The model with hollow parameters in the place of its own; which of these are trained."""
        for owner, key, p in slots:
            if owner.get(key) is not p.tensor:
                raise _replaced(p)
        with torch._C.DisableTorchFunctionSubclass():  # a DTensor's attributes go a long way otherwise
            for owner, key, p in slots:
                if p.hollow.requires_grad != p.tensor.requires_grad:
                    p.hollow.requires_grad_(p.tensor.requires_grad)
                owner[key] = p.hollow
        try:
            yield tuple(p.hollow.requires_grad for _, _, p in slots)
        finally:
            for owner, key, p in slots:
                owner[key] = p.tensor


def _replaced(p: Sharded) -> Error:
    return Error(
        f"Parameter {p.name!r} was replaced or taken away after shardc.compile.",
        fix="Write new values into it under torch.no_grad() (`parameter.copy_(...)`); "
        "parametrizations and adapters go in before the model is compiled.",
    )


def watch_optimizers(runtime: Runtime) -> None:
    """Any optimizer's step on the runtime's parameters marks them stale, for as long as the runtime lives."""
    alive = weakref.ref(runtime)

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.before_optimizer_step(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = alive()
        if found is not None:
            found.after_optimizer_step(optimizer)

    weakref.finalize(runtime, register_optimizer_step_pre_hook(before_step).remove)
    weakref.finalize(runtime, register_optimizer_step_post_hook(after_step).remove)


@contextmanager
def ranks_own_numbers(device: torch.device) -> Iterator[None]:
    """Random numbers of this rank's own, also where all ranks were seeded alike: a seed is drawn from the default
    generator and mixed with the rank. Afterwards the generator is where the draw has left it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    golden = 0x9E3779B97F4A7C15  # spreads ranks over all bits: a CPU's generator takes the low 32 of a seed
    seed = (int(torch.randint(1 << 62, ())) ^ dist.get_rank() * golden) % (1 << 62)
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]  # `torch.manual_seed` formats stacks where CUDA sleeps
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Step:
    """One program, ready to run: called by Dynamo with the flat inputs of its graph."""

    def __init__(self, runtime: Runtime, program: Program):
        self.runtime, self.program = runtime, program
        self.params = {name: runtime.params[p.layout.name] for name, p in program.params.items()}
        self.device = next(iter(self.params.values())).hollow.device if self.params else torch.device("cpu")
        forward, backward = program.halves
        taken = backward.find_nodes(op="placeholder") if backward else []
        self.tangent_strides = [n.meta["val"].stride() for n in taken if n.name.startswith("tangents")]
        self.given_up = {i for i, n in enumerate(taken) if n.meta.get("given_up")}
        self.draws = any(ops.is_random(node) for node in forward.nodes)
        self.forwards: dict[tuple[frozenset[str], bool], fx.Graph] = {}
        self.backwards: dict[tuple[Any, ...], fx.Graph] = {}

    def __call__(self, *flat: Any) -> tuple[Any, ...]:
        captured = self.program.captured
        inputs = [self.params[n].tensor if n in self.params else v for n, v in zip(captured.inputs, flat, strict=True)]
        if self.runtime.begun and not self.runtime.begun.holds(self):
            self.runtime.drop_begun()
        self.runtime.notice_updates()
        if captured.trains:
            self.runtime.latest = weakref.ref(self)
        with torch.inference_mode(False):  # copies that are made here are read by forwards that train
            outs = _Autograd.apply(self, *inputs) if captured.trains else self.run_forward(inputs)[0]
        for index, value in zip(captured.mutated, outs, strict=False):
            flat[index].copy_(value)
        return tuple(outs[len(captured.mutated) :])

    def run_forward(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Outputs and saved values."""
        stale, names = self._stale(), self.program.captured.inputs
        begun, self.runtime.begun = self.runtime.begun, None
        args = [
            self._input(name, value, name in stale)
            for name, value in zip(names, inputs, strict=True)
            if not (begun and name in self.params)
        ]
        run = begun.finish if begun else self.runtime.lowering(self._forward(stale), _name_of(stale))
        with ranks_own_numbers(self.device) if self.draws else nullcontext():
            result = run(args)
        for name, value in (result[2] if stale else {}).items():
            self.runtime.params[name].copy = value
            self.runtime.stale.discard(name)
        return result[0], result[1]

    def begin(self) -> Generator[None, list[Any], Any]:
        """A forward that stops where it needs more than parameters, or has to wait."""
        stale, names = self._stale(), self.program.captured.inputs
        later = [name for name in names if name not in self.params]
        begin = self.runtime.lowering.begin(self._forward(stale), _name_of(stale), later)
        return begin([self._input(name, None, name in stale) for name in names if name in self.params])

    def _stale(self) -> frozenset[str]:
        return frozenset(n for n, p in self.params.items() if p.name in self.runtime.stale)

    def _input(self, name: str, value: Any, stale: bool) -> Any:
        if name not in self.params:
            return value.detach() if isinstance(value, torch.Tensor) else value
        return self.params[name].shard if stale else self.params[name].at_rest()

    def _forward(self, stale: frozenset[str]) -> fx.Graph:
        key = stale, self._again
        if key not in self.forwards:
            names = {self.params[n].name for n in stale}
            self.forwards[key] = self.program.refreshed(names) if stale else self.program.plain(again=self._again)
        return self.forwards[key]

    @property
    def _again(self) -> bool:
        """Ranks need not agree on it: it changes what is gathered ahead, not in which order."""
        return self.program.is_limited and self.runtime.again

    def run_backward(self, saved: list[Any], tangents: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients by name, as autograd is to see them; what is not synced stays with the runtime."""
        runtime, synced = self.runtime, self.runtime.syncing
        runtime.notice_cleared()
        waiting = self._waiting(synced)
        graph, run = self._backward(synced, waiting)
        runtime.first = synced
        residuals = [self._residual(node) for node in graph.find_nodes(op="placeholder") if feedback.residual_of(node)]
        args = [*saved, *self._as_traced(tangents), *(p.take() for p in waiting.values()), *residuals]
        saved.clear()
        residuals.clear()
        grads = run(args)
        for name in [name for name in grads if name.startswith(feedback.PREFIX)]:
            runtime.residuals[name] = grads.pop(name)
        if synced:
            runtime.mark_stale()
        return {name: g for name, g in ((n, self._deliver(n, g, synced)) for n, g in grads.items()) if g is not None}

    def _as_traced(self, tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Regions were compiled for dense tangents; the expanded one of a `.sum()` has stride 0."""
        return [
            t if t.stride() == s else torch.empty_strided(t.shape, s, dtype=t.dtype, device=t.device).copy_(t)
            for t, s in zip(tangents, self.tangent_strides, strict=True)
        ]

    def _waiting(self, synced: bool) -> dict[str, Sharded]:
        """Parameters whose earlier gradients this backward adds to. Where these wait between two hops, all parameters:
        buckets are others with sums than without, and another rank may have some where this one was told to drop
        them."""
        own = {p.name for p in self.params.values()}
        summed = self.program.summed if synced and not self.runtime.first else set()
        return {
            self.runtime.keys[name]: p
            for name, p in self.runtime.params.items()
            if name in summed or (p.accumulator is not None and (synced or name in own))
        }

    def _residual(self, node: fx.Node) -> torch.Tensor:
        """Handed over to a backward, which gives another one back."""
        value = self.runtime.residuals.pop(node.name, None)
        return torch.zeros(node.meta["val"].shape, device=self.device) if value is None else value

    def _backward(self, synced: bool, waiting: dict[str, Sharded]) -> tuple[fx.Graph, Run]:
        first, again = self.runtime.first, self._again
        key = (synced, first, again, *waiting)
        if key not in self.backwards:
            accumulated = {n: p.param for n, p in waiting.items()}
            made = self.program.variation(synced=synced, accumulated=accumulated, first=first, again=again)
            self.backwards[key] = made
        name = "backward" + "_accumulate" * bool(waiting) + "_sync" * synced
        return self.backwards[key], self.runtime.lowering(self.backwards[key], name)

    def _deliver(self, name: str, grad: torch.Tensor, synced: bool) -> torch.Tensor | None:
        p = self.runtime.params.get(name)
        if p is None:
            return grad
        if synced or not p.param.needs_sync:
            return p.gradient(grad.to(p.param.master_dtype))
        p.accumulate(grad)
        return None


def _name_of(stale: frozenset[str]) -> str:
    return "forward_refresh" if stale else "forward"


class _Autograd(torch.autograd.Function):
    """The seam to autograd: the parameters (DTensors) and the flat inputs go in, gradients on the optim rung come
    out."""

    @staticmethod
    def forward(ctx: Any, step: Step, *inputs: Any) -> tuple[Any, ...]:
        outs, saved = step.run_forward(inputs)
        captured = step.program.captured
        ctx.step = step
        ctx.save_for_backward(*(v if isinstance(v, torch.Tensor) else None for v in saved))
        ctx.others = [None if isinstance(v, torch.Tensor) else v for v in saved]  # sizes, or nothing
        differentiable = [False] * len(captured.mutated) + captured.differentiable
        ctx.mark_non_differentiable(
            *(o for o, d in zip(outs, differentiable, strict=True) if not d and isinstance(o, torch.Tensor))
        )
        ctx.differentiable = differentiable
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Error(
                "create_graph=True asks for gradients of gradients, which a compiled model does not have.",
                fix="Compute the inner gradient in the forward (torch.func.grad or torch.func.jvp).",
            )
        saved = [other if v is None else v for v, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
        if _torch.keeps_graph():  # for another backward, while this one may write over what it is given
            saved = [v.clone() if i in ctx.step.given_up else v for i, v in enumerate(saved)]
        ctx.maybe_clear_saved_tensors()
        wanted = [t for t, d in zip(tangents, ctx.differentiable, strict=True) if d]
        grads = ctx.step.run_backward(saved, wanted)
        captured = ctx.step.program.captured
        return None, *(grads.get(captured.params.get(name, name)) for name in captured.inputs)
