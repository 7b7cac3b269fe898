"""The spine. `build` is the architecture: a line a stage, from the user's forward to a program; `compile` puts it
into a model."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from passes.build import outputs, set_outputs
from passes.insert import Param, insert
from passes.order import Orders
from passes.partition import partition
from passes.turn import turned
from passes.verify import verify
from shardc import _torch
from shardc.agree import agree
from shardc.breaks import captured_call
from shardc.capture import Captured, capture, own_code
from shardc.check import check_inputs, check_model, check_result
from shardc.fit import fit
from shardc.heap import keep_freed
from shardc.lower import Lowering, check_backend
from shardc.measure import check_measurable
from shardc.measure import measure as measure_regions
from shardc.model import adopt, hollows, materialise, named, params_of, same_random_numbers, shard_leaf, slots
from shardc.plan import Plan
from shardc.program import Program
from shardc.runner import Runner
from shardc.step import Runtime, Sharded, Step
from shardc.weights import Source, load


def build(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    names: Mapping[int, str],
    params: Mapping[str, Param],
    plan: Plan,
    run: Runner,
    orders: Orders,
    library: str = "",
    timed: Lowering | None = None,
) -> Program:
    """Dynamo's graph of one call -> a program. `names` tells the hollow parameters and the buffers among the inputs;
    `orders` are those that the ranks agreed on before; `library` moves bytes, where that is known; `timed` compiles
    regions, where they are to be measured."""
    captured = run("capture", capture, module, inputs, names)
    joint = run("decompose", decompose, captured.graph)
    program = planned(captured, joint, params, plan, run, orders, library)
    if timed:
        run("measure", measure_regions, program, timed)
    if plan.memory_limit is not None:
        fit(program, plan.memory_limit)
    return program


def planned(
    captured: Captured,
    joint: fx.Graph,
    params: Mapping[str, Param],
    plan: Plan,
    run: Runner,
    orders: Orders,
    library: str = "",
) -> Program:
    """What is left to do once there is a joint graph, for one plan of many. Edits it in place."""
    own = {node: params[name] for node, name in captured.params.items()}
    own |= {node: kept(own[node]) for node in turned(joint, own)}
    layouts = {node: param.layout for node, param in own.items()}
    joint = run("insert", insert, joint, own)
    run("verify", verify, layouts, joint=joint)
    halves = run("partition", partition if captured.trains else forward_only, joint, captured.params)
    run("verify", verify, layouts, forward=halves[0], backward=halves[1])
    return Program(captured, own, params, plan, halves, run, orders, library or plan.topology.library)


def kept(param: Param) -> Param:
    """The same, in full between a forward and its backward."""
    return replace(param, layout=replace(param.layout, after_forward=0))


def decompose(graph: fx.Graph) -> fx.Graph:
    """Inductor's joint-graph passes; they also turn random ops into seeded ones."""
    graph = _torch.joint_passes(graph.owning_module).graph
    for node in reversed(graph.nodes):
        if "module" not in node.meta:
            node.meta["module"] = next((user.meta["module"] for user in node.users if user.op != "output"), "")
    return graph


def forward_only(graph: fx.Graph, params: Mapping[str, str]) -> tuple[fx.Graph, None]:
    """Nothing to differentiate: the joint graph is the forward."""
    results, _ = outputs(graph)
    set_outputs(graph, (results, []))
    return graph, None


def compile(
    model: nn.Module,
    plan: Plan,
    backend: str = "inductor",
    *,
    init: Callable[[nn.Module], None] | None = None,
    weights: Source | None = None,
    dynamic: bool = False,
    measure: bool = False,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] | None = None,
) -> nn.Module:
    """Shards `model` in place according to `plan` and returns it; it is compiled at its first call.

    init: a function of one module that gives values to parameters on the meta device (default: transformers' own, or
    `reset_parameters`). weights: safetensors files, or a directory of them, to read all parameters from; those on the
    meta device are then not initialised first. dynamic: dims of inputs are symbolic. measure: time each distinct region
    on the device once, and schedule by that (the plan's topology has to say how fast its axes are). timeout_s: how long
    ranks wait for each other when they compare plan and program. progress: called with a line of text as compilation
    goes on (default: rank 0 writes to stderr).
    Models of one job have process groups in common: all ranks run them in the same order, from one thread at a time.
    Raises `shardc.Error` for a plan that does not fit the model or the process group, and where ranks disagree. On CPUs
    the process keeps from then on what it frees (`shardc.heap`).
    """
    _torch.check_version()
    check_model(model)
    check_backend(backend)
    if measure:
        check_measurable(plan.topology, backend)
    device = _device()
    if device.type == "cpu":
        keep_freed()
    parameters = named(model)
    params = params_of(plan, parameters)
    agree("plan and model", _description(plan, backend, parameters), timeout_s)
    mesh = plan.topology.mesh(device.type)
    _torch.silence_flatten_advice(mesh)
    sharded = _shard(model, plan, params, mesh, device, init, later=weights is not None)
    say = progress or _to_stderr
    lowering = Lowering(backend, _groups(mesh, plan, params, device), say)
    runtime = Runtime(sharded, lowering, replaced={id(p): weakref.ref(p) for p in parameters.values()})
    compiler = Compiler(model, type(model).forward, params, plan, runtime, dynamic, measure, timeout_s, say)
    model = adopt(model, runtime, compiler)
    if weights is not None:
        load(model, weights, progress=progress is None)
    return model


SIGNATURES = 64
"""Calls that differ in what was guarded on, that a model keeps programs for."""


@dataclass(eq=False)
class Compiler:
    """Compiles the calls of one model, as Dynamo hands them over, and makes them."""

    model: nn.Module
    forward: Callable[..., Any]
    """the user's, of the model's class"""
    params: dict[str, Param]
    plan: Plan
    runtime: Runtime
    dynamic: bool
    measured: bool
    timeout_s: float
    progress: Callable[[str], None]
    warned: bool = False
    forwards: dict[tuple[bool, ...], Callable[..., Any]] = field(default_factory=dict)
    """torch.compile's, by which places hold parameters that are trained"""

    def __post_init__(self) -> None:
        # Without `self`: Dynamo keeps programs until it is told to forget them, when the compiler is gone.
        timeout_s = self.timeout_s
        self.orders = Orders(lambda lines, order: agree("collectives", lines, timeout_s, order))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.runtime.programs) >= SIGNATURES:
            self.forget()
        known = len(self.runtime.programs)
        with self.runtime.hollowed(self.places) as trained, _torch.capturing():
            result = captured_call(self.compiled(trained), self.forward, self.model, args, kwargs)
        if len(self.runtime.programs) > known:
            check_result(result, self.hollows)
        return result

    def forget(self) -> None:
        """Programs are kept up to a bound; then all are dropped, and made again as they are needed."""
        if not self.warned:
            warnings.warn(
                f"shardc: the model was called with {SIGNATURES} signatures (shapes, dtypes, modes), each compiled by "
                "itself; all are dropped now. Pad to a few shapes, or pass dynamic=True to shardc.compile.",
                stacklevel=6,
            )
            self.warned = True
        for forward in self.forwards.values():
            _torch.forget_compiled(forward)
        self.runtime.forget_programs()

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        """For a copy of the model, which compiles its own calls."""
        return replace(self, model=memo[id(self.model)], runtime=copy.deepcopy(self.runtime, memo), forwards={})

    def compiled(self, trained: tuple[bool, ...]) -> Callable[..., Any]:
        """The user's forward, for the model with hollow parameters, of which these are trained. All else that Dynamo
        would guard on hollow parameters never changes, and looking at each at every call takes a quarter of the time
        until a forward begins."""
        if trained not in self.forwards:
            forward, backend = own_code(self.forward), _torch.weak_backend(self.backend)
            weakref.finalize(self, _torch.forget_compiled, forward).atexit = False
            options = _torch.unguarded(self.hollows)
            made = torch.compile(forward, backend=backend, fullgraph=True, dynamic=self.dynamic, options=options)
            self.forwards[trained] = made
        return self.forwards[trained]

    @cached_property
    def hollows(self) -> dict[int, str]:
        """The parameters' names by the id of what stands in for them."""
        return {id(p.hollow): name for name, p in self.runtime.params.items()}

    @cached_property
    def places(self) -> list[tuple[dict[str, Any], str, Sharded]]:
        """Where hollow parameters go."""
        return [(owner, key, self.runtime.params[name]) for owner, key, name in slots(self.model)]

    def backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Step:
        """torch.compile's backend."""
        check_inputs(self.model, inputs, self.hollows)
        names = self.hollows | {id(b): name for name, b in self.model.named_buffers()}
        with paused_gc(), _torch.lazy_code():
            timed = self.runtime.lowering if self.measured else None
            run, library = Runner(self.progress), _library(_device())
            program = build(module, inputs, names, self.params, self.plan, run, self.orders, library, timed)
            program.settle()
        self.runtime.programs.append(program)
        return Step(self.runtime, program)


@contextmanager
def paused_gc() -> Iterator[None]:
    """Tracing makes millions of small objects, and collections on the way cost a third of the time: one at the end,
    of what was made since, gives back what it left."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect(1)


def _to_stderr(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"shardc: {text}", file=sys.stderr, flush=True)


def _groups(mesh: Any, plan: Plan, params: Mapping[str, Param], device: torch.device) -> dict[str, str]:
    """The name of the process group of each axis, and of several that hops are flat over; all wait as long as the
    default group does."""
    groups = {axis: mesh.get_group(axis) for axis, size in plan.topology.inner}
    flat = plan.topology.neighbours()
    if plan.chain == "hop":
        whole = {plan.topology.outside(p.layout.optim) for p in params.values() if p.layout.trainable}
        flat = [axes for axes in flat if axes in whole]
    groups |= {axes: plan.topology.flat_group(axes) for axes in flat}
    for group in groups.values():
        _torch.take_over_timeout(group, device)
    return {axis: group.group_name for axis, group in groups.items()}


def _device() -> torch.device:
    """Where parameters live: this rank's GPU under NCCL (or emulated), else the CPU."""
    on_gpu = dist.is_initialized() and any(name in dist.get_backend() for name in ("nccl", "cuda"))
    if on_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _library(device: torch.device) -> str:
    """What moves bytes, where that is known to matter."""
    gloo = dist.is_initialized() and "gloo" in dist.get_backend()
    return "gloo" if gloo and device.type == "cpu" else ""


def _description(plan: Plan, backend: str, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """What must be the same on all ranks, a line each."""
    head = [f"torch {torch.__version__}", f"backend {backend}", f"plan {plan.to_json()}"]
    return head + [f"{n}: {p.dtype}{list(p.shape)} trainable={p.requires_grad}" for n, p in parameters.items()]


def _shard(
    model: nn.Module, plan: Plan, params: Mapping[str, Param], mesh: Any, device: torch.device, init: Any, later: bool
) -> dict[str, Sharded]:
    """Replaces every parameter of the model by its leaf, module by module: one module at a time is of full size."""
    stand_ins = hollows(plan, named(model), device)
    places = slots(model)
    leaves: dict[str, Sharded] = {}
    with same_random_numbers(device):
        for prefix, module in list(model.named_modules()):
            materialise(model, module, prefix, device, init, later)
            for owner, key, name in places:
                if owner is module._parameters and name not in leaves:
                    tensor = shard_leaf(owner[key], params[name], mesh, device)
                    leaves[name] = Sharded(name, params[name], tensor, stand_ins[name])
                if owner is module._parameters:
                    owner[key] = leaves[name].tensor
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return leaves
