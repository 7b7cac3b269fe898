"""Regions: cut compute at the borders of repeated blocks and at every hop; equal regions become one.

A region is a closed subgraph. The outer graph keeps the hops and calls the regions in order, so that nothing a compiler
does inside a region can undo the schedule:

    def forward(w: f32[8, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        t: f32[8, 8] = permute(w, [1, 0])
        y: f32[4, 8] = mm(x, t)
        'layers.1'
        a: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.1.v'], again=True)
        f: f32[8, 8] = wait(a)
        u: f32[8, 8] = permute(f, [1, 0])
        z: f32[4, 8] = mm(y, u)
        return ([z], [])

becomes

    def region_0(x0: f32[8, 8], x1: f32[4, 8]):
        t: f32[8, 8] = permute(x0, [1, 0])
        y: f32[4, 8] = mm(x1, t)
        return (y,)

    def forward(w: f32[8, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        region_0 = region_0(w, x)
        y: f32[4, 8] = region_0[0]
        'layers.1'
        a: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.1.v'], again=True)
        f: f32[8, 8] = wait(a)
        region_1 = region_0(f, y)
        z: f32[4, 8] = region_1[0]
        return ([z], [])

Two regions with the same key (ops, arguments, shapes, strides, dtypes, devices, bodies of higher-order ops) are the
same Region object and will be compiled once: every middle layer of a transformer, forward and backward. Constants that
differ between otherwise equal regions (which seed of a dropout) stay in the outer graph and arrive as inputs.

A view is nobody's: each region that uses one makes it again from its base, which costs nothing, and only what the outer
graph itself needs (the input of a hop, an output) is a view there. So no region hands on strides that a compiler would
not keep.

What a region reads last it may write over, as a compiler does with values of its own: such inputs are called `taken`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from passes import ops

_OUTER = ("prims.inductor_seeds.default", "prims.inductor_lookup_seed.default")
_SMALL_NUMEL = 64


@dataclass(eq=False)
class Region:
    """A closed subgraph; `key` is its structure as text, `modules` the module paths it was seen in."""

    name: str
    key: str
    graph: fx.GraphModule
    modules: list[str] = field(default_factory=list)
    taken: tuple[int, ...] = ()
    """inputs that nobody needs afterwards, in memory that nothing else is in"""

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Runs the ops one by one. Compiled regions are called by the lowered graph instead."""
        return self.graph(*args)


def regions(
    graph: fx.Graph, known: dict[str, Region] | None = None, readers: Mapping[fx.Node, fx.Node] = MappingProxyType({})
) -> fx.Graph:
    """A new outer graph. `known` collects the distinct regions by key over any number of graphs. readers: the last one
    of each value that may be written over (`passes.memory.last_readers`)."""
    known = {} if known is None else known
    outer = fx.Graph(owning_module=graph.owning_module)
    env: dict[fx.Node, fx.Node] = {}
    items = [item if isinstance(item, fx.Node) else _cut(item, readers) for item in _segments(graph)]
    taken: dict[str, set[int]] = {}
    for cut in items:
        if isinstance(cut, _Cut):
            taken[cut.key] = cut.taken & taken.get(cut.key, cut.taken)
    for item in items:
        if isinstance(item, fx.Node):
            _copy(outer, item, env)
        elif item:
            _call(outer, item, env, _region(item, tuple(sorted(taken[item.key])), known))
    outer.lint()
    return outer


def block_of(module: str) -> str:
    """The repeated block that a module path lies in: 'layers.3.attn.q' -> 'layers.3'; '' outside of any."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def blocks(nodes: Iterable[fx.Node]) -> list[str]:
    """For each node of a sequence the block that it is computed for: '' outside of any. A node without a module belongs
    to what came before it. So does the root's own code between two blocks, such as a sum of gradients."""
    modules = [node.meta.get("module") for node in nodes]
    found: list[str] = []
    for module, following in zip(modules, _following(modules), strict=True):
        before = found[-1] if found else ""
        keeps = module is None or (module == "" and before != "" and block_of(following) != "")
        found.append(before if keeps else block_of(module or ""))
    return found


def _following(modules: Sequence[str | None]) -> list[str]:
    """For each module the next one that is not the root."""
    found, following = [], ""
    for module in reversed(modules):
        following = module or following
        found.append(following)
    return found[::-1]


def region_of(graph: fx.Graph, name: str) -> Region:
    """A graph that returns a tuple, as a region."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    key = _key(graph.find_nodes(op="placeholder"), nodes, list(graph.output_node().args[0]))
    return Region(name, key, fx.GraphModule(graph.owning_module or torch.nn.Module(), graph))


def _segments(graph: fx.Graph) -> Iterator[fx.Node | list[fx.Node]]:
    """Outer nodes, and lists of nodes that form a region, in order."""
    inside = [n for n in graph.nodes if not (_is_body(n) or is_view(n) or _stays_outside(n))]
    block_at = dict(zip(inside, blocks(inside), strict=True))
    taken: set[fx.Node] = set()
    current: list[fx.Node] = []
    block = ""
    for node in graph.nodes:
        if node in taken or _is_body(node) or is_view(node):
            continue
        if _stays_outside(node):
            if current and (
                ops.is_hop(node) or node.op == "output" or any(_base(n) in current for n in node.all_input_nodes)
            ):
                yield current
                current = []
            yield node
            continue
        if current and block_at[node] != block:
            yield current
            current = []
        block = block_at[node]
        for member in _with_items(node):
            taken.add(member)
            current.append(member)


def _stays_outside(node: fx.Node) -> bool:
    return node.op != "call_function" or ops.is_hop(node) or str(node.target) in _OUTER or _is_symbolic(node)


def is_view(node: fx.Node) -> bool:
    """A part of a split is one too."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _base(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _copy(outer: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """A node as it is, with the views in front of it."""
    for value in node.all_input_nodes:
        if value not in env and not _is_body(value):
            _copy(outer, value, env)
    env[node] = outer.node_copy(node, env.__getitem__)
    env[node].name = node.name
    return env[node]


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _has_symbols(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return _is_symbolic(node) or any(isinstance(size, torch.SymInt) for size in getattr(value, "shape", ()))


def _is_body(node: fx.Node) -> bool:
    """The body of a higher-order op travels with its caller."""
    return node.op == "get_attr" and isinstance(_attribute(node), fx.GraphModule)


def _attribute(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _with_items(node: fx.Node) -> list[fx.Node]:
    """A node with the getitems of it: a tuple never crosses the border of a region."""
    return [node, *(user for user in node.users if user.target is operator.getitem)]


@dataclass
class _Cut:
    """Nodes that become a call of a region."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    results: list[fx.Node]
    key: str
    taken: set[int]
    """inputs that are read here last; what not all calls of a region read last is not taken"""


def _cut(nodes: list[fx.Node], readers: Mapping[fx.Node, fx.Node]) -> _Cut | None:
    results = [n for n in nodes if not isinstance(n.meta.get("val"), (tuple, list)) and _is_used_outside(n, set(nodes))]
    if not results:
        return None
    nodes = _with_views(nodes)
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside and not _is_body(n))
    )
    taken = {i for i, node in enumerate(inputs) if readers.get(node) in inside and not any(map(_has_symbols, inputs))}
    return _Cut(nodes, inputs, results, _key(inputs, nodes, results), taken)


def _call(outer: fx.Graph, cut: _Cut, env: dict[fx.Node, fx.Node], region: Region) -> None:
    call = outer.call_function(region, tuple(env[n] for n in cut.inputs))
    call.meta["val"] = tuple(n.meta["val"] for n in cut.results)
    call.meta["nodes"] = [node.name for node in cut.nodes]
    modules = [node.meta.get("module", "") for node in cut.nodes]
    call.meta["module"] = next((module for module in reversed(modules) if block_of(module)), modules[-1])
    region.modules.append(call.meta["module"])
    for i, node in enumerate(cut.results):
        env[node] = outer.call_function(operator.getitem, (call, i))
        env[node].meta.update(node.meta, module=call.meta["module"])
        env[node].name = node.name


def _is_used_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    return any(u not in inside and (not is_view(u) or _is_used_outside(u, inside)) for u in node.users)


def _with_views(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes, each behind the views that it uses."""
    found: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for value in node.all_input_nodes:
            if value not in found and is_view(value):
                add(value)
        found[node] = None

    for node in nodes:
        add(node)
    return list(found)


def _region(cut: _Cut, taken: tuple[int, ...], known: dict[str, Region]) -> Region:
    key = f"{cut.key}\ntaken {taken}" if taken else cut.key
    if key not in known:
        known[key] = Region(f"region_{len(known)}", key, _extract(cut, taken), taken=taken)
    return known[key]


def _extract(cut: _Cut, taken: tuple[int, ...]) -> fx.GraphModule:
    graph, env = fx.Graph(), {}
    bodies = {n for node in cut.nodes for n in node.all_input_nodes if _is_body(n)}
    for i, node in enumerate(cut.inputs):
        env[node] = graph.placeholder(f"{'taken' if i in taken else 'x'}{i}")
        env[node].meta["val"] = node.meta["val"]
    for node in [*sorted(bodies), *cut.nodes]:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta.pop("module", None)  # of the first call alone
    graph.output(tuple(env[n] for n in cut.results))
    root = {str(n.target): _attribute(n) for n in bodies}
    return fx.GraphModule(root, graph)


def _key(inputs: list[fx.Node], nodes: list[fx.Node], results: list[fx.Node]) -> str:
    """The structure as text: names are numbers, everything else counts."""
    number = {node: f"%{i}" for i, node in enumerate([*inputs, *nodes])}
    lines = [f"{number[n]}: {_value(n.meta.get('val'))}" for n in inputs]
    lines += [f"{number[n]} = {_name(n.target)}{_arguments(n, number)}" for n in nodes]
    return "\n".join([*lines, "return " + " ".join(f"{number[n]}: {_value(n.meta.get('val'))}" for n in results)])


def _arguments(node: fx.Node, number: dict[fx.Node, str]) -> str:
    return repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Name(number.get(n) or _body_key(n))))


class _Name(str):
    __repr__ = str.__str__


def _body_key(node: fx.Node) -> str:
    return _module_key(_attribute(node))


def _module_key(body: fx.GraphModule) -> str:
    """Code of a body, and all that it closes over: the code has only the names of constants."""
    nodes = body.graph.find_nodes(op="get_attr")
    return "\n".join([body.code, *(f"{n.target}: {_closed_over(_attribute(n))}" for n in nodes)])


def _closed_over(thing: Any) -> str:
    if isinstance(thing, fx.GraphModule):
        return _module_key(thing)
    return f"{_value(thing)} {_contents(thing)}"


def _contents(constant: torch.Tensor) -> Any:
    # A large one equals only itself: a second compilation is lost where another has the same elements.
    if isinstance(constant, FakeTensor) or constant.device.type == "meta" or constant.numel() > _SMALL_NUMEL:
        return id(constant)
    with unset_fake_temporarily():
        return constant.tolist()


def _name(target: Callable[..., Any] | str) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}"
    return str(value)
