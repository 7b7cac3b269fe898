"""Lower: from the scheduled graph to a callable.

    inductor         each distinct region is compiled once by Inductor; the outer graph calls them in order
    inductor-whole   Inductor on the whole graph, hops included, with their order pinned
    eager            the outer graph op by op

All three end in one generated Python function that reads like the graph: a line a node, every value dropped right
after its last use (before the call, for what a region takes), so that nothing lives longer than the graph says.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import fx

from passes import ops
from passes.build import Writer, copy, fake_mode, outputs, set_outputs
from passes.errors import Error
from passes.memory import last_readers
from passes.regions import Region, regions
from passes.relay import unrelayed
from passes.wire import dequantize, left_behind, lost, quantize, quantized, restored, summed
from shardc import _torch, near
from shardc.failures import in_generated_code, naming_failures
from shardc.lanes import lane_of, wait

BACKENDS = ("inductor", "inductor-whole", "eager")
Callback = Callable[[str], None]
Run = Callable[[list[Any]], Any]
"""Takes, and empties, the list of a graph's inputs and returns what the graph returns."""
Begin = Callable[[list[Any]], Generator[None, list[Any], Any]]
"""The same in two parts: takes the first inputs, then is sent the others."""


@dataclass
class Lowering:
    """What is shared by all graphs of one model: the backend, the process group of each axis, the compiled regions."""

    backend: str
    groups: Mapping[str, str]
    """axis -> name of the process group"""
    progress: Callback = lambda text: None
    known: dict[str, Region] = field(default_factory=dict)
    compiled: dict[str, Callable[[list[Any]], Sequence[Any]]] = field(default_factory=dict)
    runs: WeakKeyDictionary[fx.Graph, Run] = field(default_factory=WeakKeyDictionary)
    """what was lowered, for as long as its graph lives"""
    heads: WeakKeyDictionary[fx.Graph, Begin] = field(default_factory=WeakKeyDictionary)
    """the same for those that were begun ahead"""

    def __post_init__(self) -> None:
        self.lanes = {axis: lane_of(group) for axis, group in self.groups.items()}
        for group in self.groups.values():
            finalize(self, near.give_back, group).atexit = False

    def __call__(self, graph: fx.Graph, name: str) -> Run:
        """Of a graph that nobody edits any more; it is lowered once."""
        run = self.runs.get(graph)
        if run is None:
            run = self.runs[graph] = self.lowered(graph, name)
        return run

    def begin(self, graph: fx.Graph, name: str, later: Collection[str]) -> Begin:
        """Of a graph that goes as far as it can without some of its inputs, and without waiting for a hop."""
        if self.backend == "inductor-whole":
            raise Error(
                "backend='inductor-whole' compiles a forward in one piece, which cannot be begun ahead.",
                fix="backend='inductor', or leave out model.prefetch().",
            )
        begin = self.heads.get(graph)
        if begin is None:
            outer = graph if self.backend == "eager" else self.outer(graph, name)
            begin = self.heads[graph] = emit(outer, name, self, later)
        return begin

    def lowered(self, graph: fx.Graph, name: str) -> Run:
        if self.backend == "eager":
            return emit(graph, name, self)
        if self.backend == "inductor-whole":
            return self._whole(graph, name)
        return emit(self.outer(graph, name), name, self)

    def outer(self, graph: fx.Graph, name: str) -> fx.Graph:
        """The graph that calls regions, each of which is compiled."""
        outer = regions(graph, self.known, last_readers(graph))
        fresh = [r for r in self.known.values() if r.key not in self.compiled]
        for i, region in enumerate(_from_own_share(fresh)):
            self.progress(f"compiling {name}: region {i + 1} of {len(fresh)} new ({len(self.known)} distinct)")
            self.compiled[region.key] = _torch.compile_graph(in_aten(region.graph), region.taken)
        return outer

    def _whole(self, graph: fx.Graph, name: str) -> Run:
        self.progress(f"compiling {name} as one graph")
        graph = unrelayed(copy(graph))
        hop_of = in_generated_code(graph)
        graph = with_functional_collectives(graph, self.groups)
        leaves, spec = torch.utils._pytree.tree_flatten(outputs(graph))
        set_outputs(graph, tuple(leaves))
        run = _torch.compile_graph(in_aten(fx.GraphModule(graph.owning_module, graph)))
        return naming_failures(lambda args: torch.utils._pytree.tree_unflatten(list(run(args)), spec), hop_of)


def _from_own_share(new: list[Region]) -> list[Region]:
    """Beginning elsewhere on each rank of a host: what another has compiled already is in Inductor's cache."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = len(new) * rank // ranks
    return new[first:] + new[:first]


def check_backend(backend: str) -> None:
    """Raises for an unknown backend, and where Inductor lacks a compiler for this machine's device."""
    if backend not in BACKENDS:
        raise Error(f"Unknown backend {backend!r}.", fix=f"Choose one of {', '.join(BACKENDS)}.")
    if backend != "eager":
        missing = _torch.missing_compiler()
        if missing:
            raise Error(
                f"backend={backend!r} needs {missing}, which this machine does not have.",
                fix=f"Install {missing}, or pass backend='eager' to run the graph op by op.",
            )


def with_functional_collectives(graph: fx.Graph, groups: Mapping[str, str]) -> fx.Graph:
    """Hops become torch's functional collectives on the real groups."""
    for node in graph.nodes:
        if ops.is_wait(node):
            node.target = torch.ops._c10d_functional.wait_tensor.default
        elif ops.is_start(node):
            node.target, node.args = _functional(node, groups)
            node.kwargs = {}
    return graph


def _functional(node: fx.Node, groups: Mapping[str, str]) -> tuple[Any, tuple[Any, ...]]:
    c10d, hop, x = torch.ops._c10d_functional, ops.hop(node), node.args[0]
    group = groups[hop.axis]
    if hop.kind == "all_gather":
        return c10d.all_gather_into_tensor.default, (x, hop.size, group)
    if hop.kind == "reduce_scatter":
        return c10d.reduce_scatter_tensor.default, (x, "sum", hop.size, group)
    if hop.kind == "all_to_all":
        rows = [x.meta["val"].shape[0] // hop.size] * hop.size
        return c10d.all_to_all_single.default, (x, rows, rows, group)
    return c10d.all_reduce.default, (x, "sum", group)


def in_aten(module: fx.GraphModule) -> fx.GraphModule:
    """What stands between hops and compute in ATen ops, so that Inductor fuses it with its neighbours."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (ops.compact, ops.expand):
            _rows_in_aten(module, node)
        elif node.target is dequantize and all(map(_sums, node.users)):
            continue  # with the sum
        elif _sums(node):
            message = node.args[0]
            _written_out(module.graph, node, summed, message.args)
            module.graph.erase_node(message)
        elif node.op == "call_function" and node.target in _WRITTEN_OUT:
            _written_out(module.graph, node, _WRITTEN_OUT[node.target], node.args)
    module.recompile()
    return module


_WRITTEN_OUT: dict[Any, Callable[..., torch.Tensor]] = {
    ops.fold: ops.folded,
    ops.interleave: ops.interleaved,
    quantize: quantized,
    dequantize: restored,
    lost: left_behind,
}


def _sums(node: fx.Node) -> bool:
    """Of a fold: nobody else needs the value whose pieces it sums, which messages bring, a piece each."""
    if node.target is not ops.fold:
        return False
    value, pieces = node.args
    return value.target is dequantize and len(value.users) == 1 and value.args[0].meta["val"].shape[0] == pieces


def _written_out(graph: fx.Graph, node: fx.Node, what: Callable[..., torch.Tensor], inputs: Sequence[Any]) -> None:
    """In the place of an op what a function of its inputs does, op by op."""
    write = Writer(graph, fake_mode(graph), node.meta.get("module", ""))
    x, *rest = inputs
    with write.mode:
        body = _torch.written_out(lambda x: what(x, *rest), x.meta["val"])
    new = {body.find_nodes(op="placeholder")[0]: x}
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op == "call_function":
                args, kwargs = fx.node.map_arg((inner.args, dict(inner.kwargs)), new.__getitem__)
                new[inner] = write(inner.target, *args, **kwargs)
    node.replace_all_uses_with(new[body.output_node().args[0]])
    graph.erase_node(node)


def _rows_in_aten(module: fx.GraphModule, node: fx.Node) -> None:
    aten = torch.ops.aten
    x, rows, split = node.args
    value = x.meta["val"]
    write = Writer(module.graph, fake_mode(module.graph), node.meta.get("module", ""))
    index = ops.row_index(rows, split, value.device)
    padded = node.meta["val"].shape[0] if node.target is ops.expand else value.shape[0]
    with module.graph.inserting_before(node):
        if node.target is ops.compact:
            new = (
                write(aten.slice.Tensor, x, 0, 0, rows)
                if isinstance(index, slice)
                else write(aten.index.Tensor, x, [_constant(module, index, write)])
            )
        elif isinstance(index, slice):
            new = write(aten.constant_pad_nd.default, x, [0, 0] * (value.dim() - 1) + [0, padded - rows], 0.0)
        else:
            # Gathering is what fuses: row i of the result is row inverse[i] of x, or the zero row behind it.
            inverse = torch.full((padded,), rows, device=value.device).index_copy_(
                0, index, torch.arange(rows, device=value.device)
            )
            longer = write(aten.constant_pad_nd.default, x, [0, 0] * (value.dim() - 1) + [0, 1], 0.0)
            new = write(aten.index.Tensor, longer, [_constant(module, inverse, write)])
    if new.meta["val"].stride() != node.meta["val"].stride():
        with module.graph.inserting_before(node):
            new = write(aten.clone.default, new, memory_format=torch.contiguous_format)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def _constant(module: fx.GraphModule, value: torch.Tensor, write: Writer) -> fx.Node:
    name = f"rows_{sum(1 for n in module.graph.nodes if n.op == 'get_attr')}"
    module.register_buffer(name, value, persistent=False)
    node = module.graph.get_attr(name)
    node.meta["val"] = write.mode.from_tensor(value, static_shapes=True)
    return node


# Emitting the outer function


def emit(graph: fx.Graph, name: str, lowering: Lowering, later: Collection[str] | None = None) -> Any:
    """The graph as one Python function, or as a generator that these inputs are sent to; `run.source` is its text."""
    writer = _Source(lowering)
    source = writer.function(graph, name, later)
    exec(compile(source, f"<shardc {name}>", "exec"), writer.globals)
    run = writer.globals[name]
    run.source = source
    return run


class _Source:
    def __init__(self, lowering: Lowering):
        self.lowering = lowering
        self.globals: dict[str, Any] = {}
        self.locals: set[str] = set()

    def function(self, graph: fx.Graph, name: str, later: Collection[str] | None) -> str:
        self.locals = {n.name for n in graph.nodes}
        inputs = graph.find_nodes(op="placeholder")
        *body, output = (n for n in graph.nodes if n.op != "placeholder")
        last = _last_uses(graph)
        head = 0 if later is None else _head(body, later)

        def lines(nodes: Sequence[fx.Node]) -> list[str]:
            return [line for node in nodes for line in self.line(node, last.get(node, []))]

        text = [f"def {name}(args):", *self.taken([n for n in inputs if not later or n.name not in later])]
        text += lines(body[:head])
        if later is not None:
            text += ["    args = yield", *self.taken([n for n in inputs if n.name in later])]
        text += [*lines(body[head:]), f"    return {_text(output.args[0], self.constant)}"]
        return "\n".join(text) + "\n"

    def taken(self, inputs: list[fx.Node]) -> list[str]:
        names = ", ".join(n.name for n in inputs)
        return [f"    [{names}] = args", "    args.clear()", *self.dead([n for n in inputs if not n.users])]

    def line(self, node: fx.Node, dead: list[fx.Node]) -> list[str]:
        """A region's inputs are dropped before the call, everything else after."""
        if node.op == "get_attr":
            self.globals[node.name] = operator.attrgetter(str(node.target))(node.graph.owning_module)
            return []
        if isinstance(node.target, Region):
            name = self.constant(self.lowering.compiled[node.target.key], node.target.name)
            inputs = ", ".join(n.name for n in node.args)
            return [f"    args = [{inputs}]", *self.dead(dead), f"    {node.name} = {name}(args)", *self.unused(node)]
        return [f"    {node.name} = {self.call(node)}", *self.dead(dead), *self.unused(node)]

    def unused(self, node: fx.Node) -> list[str]:
        return [] if node.users else self.dead([node])

    def dead(self, nodes: list[fx.Node]) -> list[str]:
        names = [n.name for n in nodes if n.op != "get_attr"]
        return [f"    del {', '.join(names)}"] if names else []

    def call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{node.args[0].name}[{node.args[1]!r}]"
        if ops.is_wait(node):
            return f"{self.constant(wait, 'wait')}({node.args[0].name})"
        if ops.is_start(node):
            return self.start(node)
        op = _torch.outside_inductor(node.target)
        parts = [_text(a, self.constant) for a in node.args]
        parts += [f"{k}={_text(v, self.constant)}" for k, v in node.kwargs.items()]
        return f"{self.constant(op, getattr(op, '_opname', op.__name__.lstrip('_')))}({', '.join(parts)})"

    def start(self, node: fx.Node) -> str:
        hop, source = ops.hop(node), node.args[0]
        how = ""
        if hop.kind == "all_reduce" and ops.is_start(source) and len(source.users) == 1:
            how = ", in_place=True"
        elif hop.kind == "all_gather" and _is_for_a_gather(node):
            (onward,) = node.users
            how = f", into=({self.lane(onward)}, {self.hop(onward)})"
        return f"{self.lane(node)}.start({self.hop(node)}, {source.name}{how})"

    def lane(self, start: fx.Node) -> str:
        axis = ops.hop(start).axis
        return self.constant(self.lowering.lanes[axis], f"lane_{axis.replace('+', '_')}")

    def hop(self, start: fx.Node) -> str:
        hop = ops.hop(start)
        return self.constant(hop, hop.purpose)

    def constant(self, value: Any, name: str) -> str:
        """A global that holds a value; the same value has the same name."""
        for i in itertools.count():
            candidate = f"_{name}_{i}" if i else f"_{name}"
            if candidate not in self.locals and self.globals.setdefault(candidate, value) is value:
                return candidate
        raise AssertionError


def _is_for_a_gather(start: fx.Node) -> bool:
    """Nothing but a gather takes what a hop brings."""
    (user, *others) = start.users
    return not others and ops.is_start(user) and ops.hop(user).kind == "all_gather"


def _head(body: Sequence[fx.Node], later: Collection[str]) -> int:
    """How many nodes come before the first wait, and the first that needs what comes later or draws random numbers."""
    return next((i for i, node in enumerate(body) if _stops(node, later)), len(body))


def _stops(node: fx.Node, later: Collection[str]) -> bool:
    inner = node.target.graph.graph.nodes if isinstance(node.target, Region) else [node]
    needs = any(n.op == "placeholder" and n.name in later for n in node.all_input_nodes)
    return needs or ops.is_wait(node) or any(map(ops.is_random, inner))


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nobody needs after it. What a hop sends lives until its wait: the group may
    still read it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for value in _used(node):
            if value not in seen:
                seen.add(value)
                last.setdefault(node, []).append(value)
    return last


def _used(node: fx.Node) -> list[fx.Node]:
    if not ops.is_hop(node):
        return node.all_input_nodes
    before = node.args[0]
    return [before, *(_used(before) if ops.is_start(before) else [])]


def _text(value: Any, constant: Callable[[Any, str], str]) -> str:
    """An argument as Python text. Nodes are their names; what has no literal becomes a global."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(v, constant) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_text(v, constant)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    return constant(value, "const")
