"""Writing nodes: every node that a pass adds has its value (on fake tensors) and its module from the start."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode that the graph's values belong to."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    raise ValueError("the graph holds no tensor")


class Writer:
    """Adds calls at one place of a graph: `w = Writer(graph, before=node); y = w(aten.add.Tensor, a, b)`.

    New nodes are attributed to `module` (a module path), which regions are cut by.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, module: str = ""):
        self.graph, self.mode, self.module = graph, mode, module

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, kwargs, name=getattr(op, "_opname", None))
        values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*values[0], **values[1])
        node.meta["module"] = self.module
        return node


def outputs(graph: fx.Graph) -> Any:
    """What the graph returns: joint `([outputs], {name: gradient})`, forward `([outputs], [saved])` (with refresh, a
    third part `{name: copy}`), backward `{name: gradient}`."""
    return graph.output_node().args[0]


def set_outputs(graph: fx.Graph, value: Any) -> None:
    graph.output_node().args = (value,)


def placeholders(graph: fx.Graph) -> dict[str, fx.Node]:
    return {n.name: n for n in graph.nodes if n.op == "placeholder"}


def identifier(name: str) -> str:
    """A parameter's name as its placeholder is called: as FX spells names whenever it copies a graph. The partitioner
    knows tangents by that word."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace(".", "_")).lower().replace("tangents", "tangent")


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """The identifier of each name, with a number behind one that is taken."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        base = identifier(name)
        candidates = (f"{base}_{i}" if i else base for i in itertools.count())
        found[name] = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(found[name])
    return found


def behind(node: fx.Node) -> fx.Node:
    """The first node behind a node that is behind all placeholders too: a gradient can be a tangent as it came in."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def rearrange(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Brings the nodes between placeholders and output into the given order."""
    output = graph.output_node()
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            output.prepend(node)


def sort(graph: fx.Graph, before: Mapping[fx.Node, fx.Node] = MappingProxyType({})) -> list[fx.Node]:
    """Brings the nodes into an order in which each comes after its inputs and after the node that `before` has for it,
    as near to the present one as can be. Returns those for which there is none; the graph then stays as it is."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    needs = {node: {*node.all_input_nodes, *([before[node]] if node in before else [])} for node in nodes}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node, inputs in needs.items():
        for value in inputs:
            users[value].append(node)
    missing = {node: len(inputs) for node, inputs in needs.items()}
    ready = [position[node] for node in nodes if not missing[node]]
    done: list[fx.Node] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        done.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, position[user])
    if len(done) == len(nodes):
        rearrange(graph, done)
    return [node for node in nodes if missing[node]]


def copy(graph: fx.Graph) -> fx.Graph:
    """A copy with the same names; values are shared."""
    new = fx.Graph(owning_module=graph.owning_module)
    names: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        names[node] = new.node_copy(node, names.__getitem__)
        names[node].name = node.name
    return new
