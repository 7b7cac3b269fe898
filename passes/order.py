"""Order: ranks must issue the same collectives in the same order, whatever shapes each is fed.

The order (which also says what is bucketed) is decided once, by rank 0, for all ranks; for backwards that add gradients
half way to the optim rung a second time, before the first of them. `align` brings a graph traced for another shape to
that order, by a stable topological sort with one more dependency: each start comes after the start before it.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from torch import fx

from passes import ops
from passes.build import sort
from passes.errors import Error

Order = list[ops.Hop]

Agree = Callable[[list[str], list[str]], list[str]]
"""Takes what must be equal on all ranks and what this rank offers, a line each; returns what rank 0 offers. All ranks
call it together."""


def collective_order(graph: fx.Graph) -> Order:
    return [ops.hop(node) for node in ops.hops(graph)]


def own_order(collectives: list[str], order: list[str]) -> list[str]:
    """For one process there is nothing to agree on."""
    return order


@dataclass
class Orders:
    """The orders that the ranks agreed on, of forwards and of backwards."""

    agree: Agree = own_order
    known: dict[str, list[Order]] = field(default_factory=dict)

    def own(self) -> Orders:
        """A copy in which this rank decides alone."""
        return Orders(known={half: [*known] for half, known in self.known.items()})

    def find(self, half: str, graph: fx.Graph) -> Order | None:
        """The order for a graph that is not bucketed yet: of the first one known that has all its collectives, less
        what the graph does not have. None where there is none."""
        own = Counter(collective_order(graph))
        known = (order for order in self.known.get(half, []) if own <= Counter(drafted(order)))
        return next((list(_restricted(_rejoined(order, graph), own)) for order in known), None)

    def decide(self, half: str, order: Order) -> Order:
        """Offers an order for collectives that have none; returns what the ranks agree on."""
        collectives = sorted(_line(hop) for hop in drafted(order))
        decided = self.agree(collectives, [_line(hop) for hop in order])
        self.known.setdefault(half, []).append([_hop(line) for line in decided])
        return self.known[half][-1]


def with_params(hop: ops.Hop, *params: str) -> ops.Hop:
    """The hop of some parameters, of a bucket or on its own, and whole."""
    return replace(hop, params=params, piece=ops.WHOLE)


def drafted(order: Iterable[ops.Hop]) -> Iterator[ops.Hop]:
    """The hops of an order as they were before they were in buckets, or in pieces."""
    return (with_params(hop, param) for hop in order if hop.piece[0] == 0 for param in hop.params)


def _restricted(order: Iterable[ops.Hop], own: Counter[ops.Hop]) -> Iterator[ops.Hop]:
    left: dict[tuple[ops.Hop, int], int] = {}
    for hop in order:
        kept = []
        for param in hop.params:
            whole = with_params(hop, param)
            if left.setdefault((whole, hop.piece[0]), own[whole]) > 0:
                left[whole, hop.piece[0]] -= 1
                kept.append(param)
        if kept:
            yield replace(hop, params=tuple(kept))


def _rejoined(order: Iterable[ops.Hop], graph: fx.Graph) -> Iterator[ops.Hop]:
    """A chain that begins later in this graph than where the order is from (without a refresh, or behind a sum in an
    accumulator) takes whole values: it goes when its last piece went."""
    heads = {ops.hop(start) for start in ops.hops(graph) if not ops.is_wait(start.args[0])}
    is_later: dict[ops.Hop, bool] = {}
    last: dict[object, ops.Hop] = {}
    """by parameter and direction"""
    for hop in order:
        whole, chain = with_params(hop, *hop.params), (hop.params, hop.kind == "all_gather")
        if hop.piece != ops.WHOLE and whole not in is_later:
            before = last.get(chain)
            is_later[whole] = before is not None and (whole in heads or is_later[before])
            last[chain] = whole
        if not is_later.get(whole):
            yield hop
        elif hop.piece[0] + 1 == hop.piece[1]:
            yield whole


def _line(hop: ops.Hop) -> str:
    return json.dumps(asdict(hop))


def _hop(line: str) -> ops.Hop:
    values = json.loads(line)
    return ops.Hop(**{**values, "params": tuple(values["params"]), "piece": tuple(values["piece"])})


def align(graph: fx.Graph, order: Sequence[ops.Hop]) -> fx.Graph:
    """Edits the graph in place so that its starts come in `order` (a permutation of its own). Raises where data
    dependencies contradict it."""
    own = collective_order(graph)
    if own == list(order):
        return graph
    if Counter(own) != Counter(order):
        raise ValueError("order is not a permutation of the graph's collectives")
    starts = starts_by_hop(graph)
    chain = [starts[hop].pop() for hop in order]
    stuck = sort(graph, dict(zip(chain[1:], chain, strict=False)))
    if stuck:
        raise contradiction(stuck)
    return graph


def starts_by_hop(graph: fx.Graph) -> dict[ops.Hop, list[fx.Node]]:
    """The starts of equal hops, the last one first."""
    starts: dict[ops.Hop, list[fx.Node]] = {}
    for node in reversed(ops.hops(graph)):
        starts.setdefault(ops.hop(node), []).append(node)
    return starts


def contradiction(stuck: Sequence[fx.Node]) -> Error:
    """`stuck` are the nodes that cannot be put in the agreed order."""
    node = next(node for node in stuck if ops.is_start(node))
    return Error(
        "The order of collectives that the ranks agreed on contradicts this graph's data dependencies.",
        where=f"{node.name}: {ops.hop(node)}",
        fix="Feed batches for which the model uses its parameters in the same order on every rank.",
    )
