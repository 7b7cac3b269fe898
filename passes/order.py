"""Order: ranks must issue the same collectives in the same order, whatever shapes each is fed.

The order is decided once. `align` brings a graph traced for another shape to that order, by a stable topological sort
with one more dependency: each start comes after the start before it.

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 8] = wait(a)
        y: f32[4, 8] = mm(x, f)
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
        g: f32[8, 8] = wait(b)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])

becomes, for the agreed order `v`, `w`,

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 8] = wait(a)
        y: f32[4, 8] = mm(x, f)
        g: f32[8, 8] = wait(b)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes import ops
from passes.build import sort
from passes.errors import Error

Key = tuple[object, ...]


def collective_order(graph: fx.Graph) -> list[Key]:
    """Keys of the starts, in order."""
    return [ops.hop(node).key for node in ops.hops(graph)]


@dataclass
class Orders:
    """The orders that were decided, by the set of collectives that they order."""

    known: dict[frozenset[tuple[Key, int]], list[Key]] = field(default_factory=dict)

    def __call__(self, graph: fx.Graph) -> fx.Graph:
        """Aligns a graph with the order for its collectives; the first graph that has them decides it."""
        own = collective_order(graph)
        wanted = _set(own)
        if wanted not in self.known:
            self.known[wanted] = next((o for o in self._without_updates() if _set(o) == wanted), own)
        return align(graph, self.known[wanted])

    def _without_updates(self) -> Iterator[list[Key]]:
        """A micro-batch that does not refresh or sync has the order of one that does, less those hops."""
        for order in self.known.values():
            yield [key for key in order if key[2] not in ("refresh", "sync")]

    def lines(self) -> list[str]:
        """As text, a line a collective, for another rank."""
        return [f"{i}: {json.dumps(key)}" for i, order in enumerate(self.known.values()) for key in order]

    def adopt(self, lines: Iterable[str]) -> None:
        """Replaces what is known by another rank's `lines`."""
        orders: dict[str, list[Key]] = {}
        for line in lines:
            number, _, key = line.partition(": ")
            orders.setdefault(number, []).append(_key(json.loads(key)))
        self.known = {_set(order): order for order in orders.values()}


def _key(value: list[Any]) -> Key:
    return tuple(tuple(part) if isinstance(part, list) else part for part in value)


def _set(order: Sequence[Key]) -> frozenset[tuple[Key, int]]:
    return frozenset(Counter(order).items())


def align(graph: fx.Graph, order: Sequence[Key]) -> fx.Graph:
    """Edits the graph in place so that its starts come in `order` (a permutation of its own). Raises where data
    dependencies contradict it."""
    own = collective_order(graph)
    if own == list(order):
        return graph
    if Counter(own) != Counter(order):
        raise ValueError("order is not a permutation of the graph's collectives")
    chain = _chain(graph, order)
    stuck = sort(graph, dict(zip(chain[1:], chain, strict=False)))
    if stuck:
        _raise_contradiction(next(node for node in stuck if ops.is_start(node)))
    return graph


def _chain(graph: fx.Graph, order: Sequence[Key]) -> list[fx.Node]:
    by_key: dict[Key, list[fx.Node]] = {}
    for node in reversed(ops.hops(graph)):
        by_key.setdefault(ops.hop(node).key, []).append(node)
    return [by_key[key].pop() for key in order]


def _raise_contradiction(node: fx.Node) -> None:
    raise Error(
        "The order of collectives that the ranks agreed on contradicts this graph's data dependencies.",
        where=f"{node.name}: {ops.hop(node)}",
        fix="Feed batches for which the model uses its parameters in the same order on every rank.",
    )
