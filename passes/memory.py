"""Peak memory of a graph in its order: bytes of all values that live at the same time.

Memory is counted by storage: views share that of their base, a wait that of its start. A value lives from the node
that makes it to its last use; outputs live to the end; placeholders live throughout, for the caller holds them, except
those that it gives up (the saved values that a backward pops).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from passes import ops
from passes.regions import is_view
from passes.text import value_of


@dataclass
class Life:
    """One storage: the node that makes it, and the positions in the graph between which it lives."""

    node: fx.Node
    bytes: int
    birth: int
    death: int
    values: set[fx.Node] = field(default_factory=set)
    """the nodes whose values are in it"""


def peak_bytes(graph: fx.Graph, given_up: Collection[fx.Node] = ()) -> tuple[int, fx.Node]:
    """The most bytes that live at once, and the (first) node while which they do."""
    nodes = list(graph.nodes)
    levels = levels_of(lives(graph, given_up), len(nodes))
    peak = max(levels)
    return peak, nodes[levels.index(peak)]


def levels_of(found: Iterable[Life], count: int) -> list[int]:
    """Bytes that live while each of `count` nodes runs."""
    changes = [0] * (count + 1)
    for life in found:
        changes[life.birth] += life.bytes
        changes[life.death + 1] -= life.bytes
    return list(accumulate(changes[:-1]))


def living(graph: fx.Graph, at: fx.Node, given_up: Collection[fx.Node] = ()) -> list[Life]:
    """What lives while a node runs, largest first."""
    position = list(graph.nodes).index(at)
    there = [life for life in lives(graph, given_up) if life.birth <= position <= life.death]
    return sorted(there, key=lambda life: -life.bytes)


def lives(graph: fx.Graph, given_up: Collection[fx.Node] = ()) -> list[Life]:
    """Every storage of a graph, in order of birth."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    held = {node for node in nodes if node.op in ("placeholder", "get_attr")} - set(given_up)
    found: dict[int, Life] = {}
    for node in nodes:
        death = len(nodes) - 1 if node in held else max((position[n] for n in _readers(node)), default=position[node])
        for storage, made in zip(_storages(node), _made(node), strict=True):
            birth = 0 if node.op in ("placeholder", "get_attr") else position[node]
            life = found.get(made._cdata) or Life(node, _bytes(storage), birth, death)
            life.death = max(life.death, death)
            life.values.add(node)
            found[storage._cdata] = life
    return list({id(life): life for life in found.values()}.values())


def last_readers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last reader of each value that it may write over: of what is computed here, or given up by the caller
    (`given_up` of its meta), and lies alone in memory, all of which it fills."""
    nodes = list(graph.nodes)
    given_up = {node for node in nodes if node.meta.get("given_up")}
    found = {}
    for life in lives(graph, given_up):
        computed = life.node.op == "call_function" and not ops.is_hop(life.node)
        values = [node for node in life.values if not is_view(node) and isinstance(node.meta.get("val"), torch.Tensor)]
        if (computed or life.node in given_up) and len(values) == 1 and _fills(values[0].meta["val"]):
            found[values[0]] = nodes[life.death]
    return found


def _fills(value: torch.Tensor) -> bool:
    """Its storage. What has symbols for sizes is not known to."""
    if not all(isinstance(size, int) for size in value.shape):
        return False
    return value.numel() * value.element_size() == value.untyped_storage().nbytes()


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who uses a value. What a hop sends it reads until it is waited for, or until the hop is that takes its result."""
    found = list(node.users)
    for user in found:
        if ops.is_start(user):
            found += user.users
    return found


def _made(node: fx.Node) -> list[torch.UntypedStorage]:
    """The storages that a value is really in: that of a wait is the buffer that its start made. A view may stand for
    one of another value, that was there before what it is a view of was gathered."""
    found = _storages(node)
    if not ops.is_wait(node) and not is_view(node):
        return found
    return _storages(node.all_input_nodes[0])[:1] * len(found)


def _storages(node: fx.Node) -> list[torch.UntypedStorage]:
    value = None if node.op == "output" else value_of(node)
    parts = value if isinstance(value, list | tuple) else [value]
    return [part.untyped_storage() for part in parts if isinstance(part, torch.Tensor)]


def _bytes(storage: Any) -> int:
    size = storage.nbytes()
    return size if isinstance(size, int) else size.node.hint
