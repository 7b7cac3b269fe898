"""All private torch API that shardc uses, in one file. `self_test` says in a sentence what this torch lacks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import operator
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from passes.errors import Error

OLDEST, NEWEST = (2, 11), (2, 15)


def version() -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def check_version() -> None:
    """Raises for a torch that is too old."""
    if version() < OLDEST:
        raise Error(
            f"torch {torch.__version__} is older than shardc supports.",
            fix=f"Install torch {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.",
        )


def export_joint(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """AOTAutograd's joint graph of a Dynamo graph, decomposed for Inductor (forward only where grad mode is off).

    Inputs of the Dynamo graph are inputs of the joint graph, in order; the output node carries descriptors in
    meta["desc"]. oneDNN is off, because the decomposition of an LSTM would take its inference kernel wherever the input
    needs no gradient, whatever the weights need.
    """
    import torch._inductor.lowering  # noqa: F401  some decompositions take it for granted
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._inductor.decomposition import select_decomp_table

    with contextlib.ExitStack() as stack, _without_onednn():
        return aot_export_joint_with_descriptors(
            stack, module, inputs, decompositions=select_decomp_table()
        ).graph_module


def written_out(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> fx.Graph:
    """A function of a fake tensor in the ops that Inductor takes."""
    import torch._inductor.lowering  # noqa: F401  some decompositions take it for granted
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, decomposition_table=select_decomp_table())(value).graph


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # the public switch warns about Intel GPUs
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def mutated_input(descriptor: Any) -> int | None:
    """Index of the input that an output of the joint graph is the new value of."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    return descriptor.mutated_input.idx if isinstance(descriptor, InputMutationAOTOutput) else None


def gradient_of(descriptor: Any) -> int | None:
    """Index of the input that an output of the joint graph is the gradient of."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    return descriptor.grad_of.idx if isinstance(descriptor, GradAOTOutput) else None


def output_of(descriptor: Any) -> int:
    """Index of the output that a tangent belongs to, counted among the outputs of the user."""
    return descriptor.output.idx


def joint_passes(module: fx.GraphModule) -> fx.GraphModule:
    """Inductor's passes over a joint graph; they also turn random ops into seeded ones, which can be computed twice."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(_mode_of(module)):
        return _recursive_joint_graph_passes(module)


def _mode_of(module: fx.GraphModule) -> Any:
    from passes.build import fake_mode

    return fake_mode(module.graph)


def lazy_code() -> Any:
    """Within, graph modules write Python code when they are first called; most never are."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def compile_graph(module: fx.GraphModule, taken: Sequence[int] = ()) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor on one closed graph: a callable that takes (and empties) a list of inputs, and may write into those that
    are `taken`. Outputs have the strides that the graph says, and ops keep their order as far as collectives are
    concerned."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    mode = _mode_of(module)
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    _pin_output_strides(module.graph.output_node())
    options = _in_order() | ({"fx_graph_cache": False} if any(map(_is_symbolic, inputs)) else {})
    context = TracingContext(mode)
    if taken:  # Inductor knows them as donated buffers, which only backwards have
        context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(taken), static_input_indices=[])
    with config.patch(options), tracing(context), _real_constants(mode), mode:
        return compile_fx_inner(module, inputs, is_backward=bool(taken))


def _is_symbolic(value: Any) -> bool:
    """Inductor's cache checks guards of sizes that are inputs by themselves; a region's come with its tensors."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _in_order() -> dict[str, bool]:
    """What Inductor must not do where the order of the graph counts: move nodes for memory, locality or overlap."""
    from torch._inductor import config

    moves = ["reorder_for_peak_memory", "reorder_for_locality", "reorder_for_compute_comm_overlap"]
    # On by default from 2.15; it starts collectives before the waits that the schedule put first.
    if hasattr(config.aten_distributed_optimizations, "enable_simple_overlap"):
        moves.append("aten_distributed_optimizations.enable_simple_overlap")
    return dict.fromkeys(moves, False)


@contextlib.contextmanager
def _real_constants(mode: Any) -> Iterator[None]:
    """Row tables are real tensors among fake ones."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def keeps_graph() -> bool:
    """Whether the backward that runs has `retain_graph=True`: its saved values are needed again."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def outside_inductor(op: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for an op that is called outside of Inductor.

    There Inductor's seeded random ops ignore their seed, and a backward would not draw the mask of its forward again.
    And the backward of flex_attention makes no gradient for what a `score_mod` captured unless that requires grad,
    which nothing does inside of a graph.
    """
    stand_ins: dict[Any, Callable[..., Any]] = {
        torch.ops.prims.inductor_random.default: _random,
        torch.ops.prims.inductor_randint.default: _randint,
        torch.ops.higher_order.flex_attention_backward: _flex_attention_backward,
    }
    return stand_ins.get(op, op)


def _flex_attention_backward(*args: Any) -> Any:
    *others, captured, of_mask = args
    wanted = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in captured]
    captured = tuple(x.detach().requires_grad_() if w else x for x, w in zip(captured, wanted, strict=True))
    return torch.ops.higher_order.flex_attention_backward(*others, captured, of_mask)


def _random(size: Sequence[int], seed: torch.Tensor, mode: str, **kwargs: Any) -> torch.Tensor:
    return getattr(torch, mode)(size, generator=_generator(seed), device=seed.device, dtype=torch.float32)


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    return torch.randint(low, high, size, generator=_generator(seed), device=seed.device)


def _generator(seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Dynamo as it is to look at a model's call: any number of signatures (8 by default, fewer than a loop over ragged
    batches sees; who calls has a bound of its own), LSTMs and the like taken into the graph, calls of loggers left out
    of it (each is a graph break otherwise, in code that the user does not own), hooks of modules guarded on."""
    from torch._dynamo import config

    methods = {method for method in vars(logging.Logger).values() if callable(method)}  # libraries add some at any time
    if version() < (2, 12):  # it fails to log a configuration that names functions, and says so at every compilation
        logging.getLogger("torch._dynamo.metrics_context").disabled = True
    with config.patch(
        recompile_limit=1 << 20,
        accumulated_recompile_limit=1 << 20,
        allow_rnn=True,
        skip_nnmodule_hook_guards=False,
        ignore_logging_functions=methods | config.ignore_logging_functions,
    ):
        yield


def forget_compiled(function: Any) -> None:
    """Drops all that Dynamo has compiled for a function, or for what torch.compile made of it."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.eval_frame import innermost_fn

    reset_code(innermost_fn(function).__code__)


def weak_backend(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as a backend of torch.compile. Dynamo keeps backends until the process ends (`cached_backends`),
    but this one does not keep its object."""
    alive = weakref.WeakMethod(method)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return alive()(module, inputs)  # type: ignore[misc]

    return backend


def unguarded(ids: Iterable[int]) -> dict[str, Any]:
    """Options of torch.compile: no guards on these objects."""
    known = frozenset(ids)  # not what they were taken from: Dynamo keeps options as long as it keeps programs
    return {"guard_filter_fn": lambda guards: [not guard.has_value or id(guard.value) not in known for guard in guards]}


@contextlib.contextmanager
def graph_breaks() -> Iterator[list[torch._dynamo.exc.Unsupported]]:
    """Collects the graph breaks of what is compiled while it is open; Dynamo logs none of them."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    found: list[torch._dynamo.exc.Unsupported] = []
    before, disabled = Translator.log_graph_break, logging.root.manager.disable
    logging.disable()
    Translator.log_graph_break = lambda self, code_options, reason, exc: found.append(exc)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield found
    finally:
        Translator.log_graph_break = before
        logging.disable(disabled)


@functools.cache
def vague_hints() -> frozenset[str]:
    """What Dynamo adds to a graph break that tells nobody what to do."""
    from torch._dynamo import graph_break_hints as hints

    return frozenset((*hints.USER_ERROR, *hints.DYNAMO_BUG, *hints.DIFFICULT, *hints.FUNDAMENTAL, *hints.SUPPORTABLE))


def example_value(node: Any) -> Any:
    """What Dynamo found a node's value to be: a fake tensor with dims as they were, a number."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else node
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def missing_compiler() -> str | None:
    """What Inductor lacks on this machine: a C++ compiler for CPU, Triton for a GPU; None where all is there."""
    if torch.cuda.is_available():
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return None if shutil.which(get_cpp_compiler()) else "a C++ compiler"
    except InvalidCxxCompiler:
        return "a C++ compiler (g++)"


def _pin_output_strides(output: fx.Node) -> None:
    values = [n.meta["val"] if isinstance(n, fx.Node) else None for n in output.args[0]]
    output.meta["user_visible_output_idxs"] = list(range(len(values)))
    output.meta["original_output_strides"] = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]


def dtensor(local: torch.Tensor, like: Any) -> Any:
    """A DTensor around `local` with the mesh, placements and full shape of another; no communication."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, like._spec, requires_grad=False)


def without_torch_function(function: Callable[[], Any]) -> Any:
    """`function()`, past the `__torch_function__` of tensor subclasses."""
    with torch._C.DisableTorchFunctionSubclass():
        return function()


def local_of(tensor: Any) -> torch.Tensor:
    """The local tensor of a DTensor, without autograd."""
    return tensor._local_tensor


def is_fake(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def silence_flatten_advice(mesh: Any) -> None:
    """Marks a mesh as warned about. DTensor would advise at `clip_grad_norm_` and `full_tensor` to flatten it; but a
    group sorts its ranks, so on an inner-first mesh a flattened gather returns rows in another order."""
    from torch.distributed.tensor import _redistribute

    warned = getattr(_redistribute, "_warned_flatten_issues", None)
    if warned is not None:
        orders = (order for count in range(2, mesh.ndim + 1) for order in permutations(range(mesh.ndim), count))
        warned.update((hash(mesh), order, "no_flattened_mesh") for order in orders)


# A process group's methods under the names of all versions: what they do, and the argument that holds the full payload.
_METHODS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all_reduce", 0)),
    **dict.fromkeys(("_allgather_base", "allgather_into_tensor_coalesced"), ("all_gather", 0)),
    **dict.fromkeys(("all_gather_single", "all_gather_single_coalesced"), ("all_gather", 0)),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), ("reduce_scatter", 1)),
    **dict.fromkeys(("reduce_scatter_single", "reduce_scatter_single_coalesced"), ("reduce_scatter", 1)),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), ("all_to_all", 1)),
}


@contextlib.contextmanager
def watched(name: str, watch: Callable[[str, int, int], None]) -> Iterator[None]:
    """While open, `watch(kind, bytes of the full payload, ranks)` sees every all_gather, reduce_scatter, all_reduce and
    all_to_all on the process group called `name`.

    Functional collectives look their group up by name. As long as this is open they find a group in Python, whose
    methods C++ calls, and which calls the real one.
    """
    c10d, real = torch._C._distributed_c10d, group_called(name)
    door = _door()(real, watch)
    c10d._unregister_process_group(name)
    c10d._register_process_group(name, door)
    try:
        yield
    finally:
        c10d._unregister_process_group(name)
        c10d._register_process_group(name, real)


@functools.cache
def _door() -> Any:
    import torch.distributed as dist

    class Door(dist.ProcessGroup):
        """Forwards to the real group and says what passes."""

        def __init__(self, real: Any, watch: Callable[[str, int, int], None]):
            super().__init__(real.rank(), real.size())
            self.real, self.watch = real, watch

        @property
        def group_name(self) -> str:
            return self.real.group_name

    for method in _METHODS:
        if hasattr(dist.ProcessGroup, method):
            setattr(Door, method, _forward(method))
    return Door


def _forward(method: str) -> Callable[..., Any]:
    kind, position = _METHODS[method]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [args[position]] if isinstance(args[position], torch.Tensor) else args[position]
        self.watch(kind, sum(t.nbytes for t in tensors), self.real.size())
        return getattr(self.real, method)(*args, **kwargs)

    return forward


def group_called(name: str) -> Any:
    """The process group of a name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def is_gloo(group: Any) -> bool:
    """Whether Gloo, and nothing in between, moves what a group has on CPUs."""
    found = _IS_GLOO.get(group)
    if found is None:
        found = _IS_GLOO[group] = _has_gloo(group)
    return found


_IS_GLOO: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _has_gloo(group: Any) -> bool:
    gloo = getattr(torch._C._distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None or type(group) is not torch.distributed.ProcessGroup:
        return False
    cpu = torch.device("cpu")
    return cpu in group._device_types and isinstance(group._get_backend(cpu), gloo)


def take_over_timeout(group: Any, device: torch.device) -> None:
    """Of the default group; a group of an axis would else wait for torch's half an hour."""
    if torch.distributed.get_backend() in ("gloo", "nccl"):
        group._get_backend(device)._set_default_timeout(timeout_of(torch.distributed.group.WORLD, device))


def timeout_of(group: Any, device: torch.device) -> Any:
    """How long a group waits, as a `timedelta`."""
    return group._get_backend(device).options._timeout


def default_store() -> Any:
    """The store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


_NEEDED = {
    "AOTAutograd's joint export": ("torch._functorch.aot_autograd", "aot_export_joint_with_descriptors"),
    "descriptors of gradients": ("torch._functorch._aot_autograd.descriptors", "GradAOTOutput"),
    "descriptors of changed inputs": ("torch._functorch._aot_autograd.descriptors", "InputMutationAOTOutput"),
    "Inductor's decompositions": ("torch._inductor.decomposition", "select_decomp_table"),
    "Inductor's joint-graph passes": ("torch._inductor.compile_fx", "_recursive_joint_graph_passes"),
    "Inductor on one graph": ("torch._inductor.compile_fx", "compile_fx_inner"),
    "the min-cut partitioner": ("functorch.compile", "min_cut_rematerialization_partition"),
    "fake tensors": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "DTensor": ("torch.distributed.tensor", "DTensor"),
    "a group's plain all-gather": ("torch.distributed", "ProcessGroup._allgather_base"),
    "works of functional collectives": ("torch._C._distributed_c10d", "_register_work"),
    "functional collectives": ("torch.distributed._functional_collectives", "all_gather_tensor"),
    "the store of the default group": ("torch.distributed.distributed_c10d", "_get_default_store"),
    "Dynamo's list of loggers": ("torch._dynamo.config", "ignore_logging_functions"),
    "Dynamo's limit of signatures": ("torch._dynamo.config", "recompile_limit"),
    "Dynamo's limit of all signatures": ("torch._dynamo.config", "accumulated_recompile_limit"),
    "a way to make Dynamo forget": ("torch._C._dynamo.eval_frame", "reset_code"),
    "what torch.compile has wrapped": ("torch._dynamo.eval_frame", "innermost_fn"),
    "Dynamo's hints": ("torch._dynamo.graph_break_hints", "SUPPORTABLE"),
    "the way past __torch_function__": ("torch._C", "DisableTorchFunctionSubclass"),
    "Dynamo's log of graph breaks": ("torch._dynamo.symbolic_convert", "InstructionTranslatorBase.log_graph_break"),
    "Dynamo's guards of module hooks": ("torch._dynamo.config", "skip_nnmodule_hook_guards"),
    "Dynamo's switch for LSTMs": ("torch._dynamo.config", "allow_rnn"),
}


def self_test() -> list[str]:
    """What this torch lacks of all that is used here, a sentence each; empty where all is there."""
    lacking = []
    for what, (module, name) in _NEEDED.items():
        try:
            operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError):
            lacking.append(f"torch {torch.__version__} lacks {what} ({module}.{name}).")
    return lacking
