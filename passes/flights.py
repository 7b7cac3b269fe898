"""Flights: what a schedule has to order.

Compute is cut into stretches, and each hop, with what leads to it and what comes of it, becomes a flight: from the
stretch that makes what it takes to the first that needs what it brings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import fx

from passes import ops
from passes.follow import leading
from passes.regions import blocks

Cost = Callable[[fx.Node], float]
"""Microseconds of a node; of a start, how long its hop is on its lane; of a wait, what it holds up compute for."""
LanesOf = Callable[[str], Sequence[str]]
"""By axis, or by "gpu+node"."""


def axes_of(axis: str) -> Sequence[str]:
    """A lane an axis."""
    return axis.split("+")


@dataclass(eq=False)
class Flight:
    """A hop between its start and its wait. Stretches of compute are counted."""

    start: fx.Node
    wait: fx.Node | None
    """None where only other hops take what it brings"""
    before: list[fx.Node] = field(default_factory=list)
    """what only leads to it: casts and copy-in of shards"""
    behind: dict[fx.Node, set[Flight]] = field(default_factory=dict)
    """what comes of it and no stretch needs (copies to keep, sums in accumulators); of which flights each comes"""
    after: list[Flight] = field(default_factory=list)
    """whose results it takes"""
    ready: int = -1
    """the last stretch that it needs"""
    due: int = 0
    """the first stretch that needs it; where none does, the number of stretches"""
    lanes: Sequence[str] = ()
    """a flat one holds several"""

    def __post_init__(self) -> None:
        hop = ops.hop(self.start)
        self.axis, self.size, self.climbs = hop.axis, hop.size, hop.kind == "all_gather"

    def meets(self, other: Flight) -> bool:
        """On a lane."""
        return any(lane in other.lanes for lane in self.lanes)

    @property
    def goes_on(self) -> bool:
        """A later hop of a chain of gathers."""
        return any(f.climbs for f in self.after)

    @property
    def makes_bytes(self) -> int:
        """Of gradients, that the first hop of a chain takes."""
        return 0 if self.climbs or self.after else bytes_of(self.start.args[0])

    @property
    def source(self) -> Flight | None:
        """The hop that it relays."""
        relayed = ops.relayed(self.start)
        return next((f for f in self.after if f.start is relayed), None) if relayed else None


def lay_out(graph: fx.Graph, lanes: LanesOf = axes_of) -> tuple[list[list[fx.Node]], list[Flight]]:
    """The stretches of compute, and the flights, both in the order of the graph."""
    lead = leading(graph)
    trail = _trailing(graph, lead)
    apart = {*lead, *trail, *(node for node in graph.nodes if ops.is_hop(node))}
    compute = [node for node in graph.nodes if node.op == "call_function" and node not in apart]
    stretches = [part for nodes in _stretches(compute) for part in _cut(nodes, lead)]
    number = {node: i for i, nodes in enumerate(stretches) for node in nodes}
    owner: dict[fx.Node, Flight] = {}
    flights = [_flight(start, number, owner) for start in ops.hops(graph)]
    of: dict[fx.Node, set[Flight]] = {node: {flight} for node, flight in owner.items()}
    for node in trail:
        if node not in owner:
            _put_behind(node, number, of)
    for flight in reversed(flights):
        flight.due = min(_dues(flight, number, owner), default=len(stretches))
        flight.lanes = lanes(flight.axis)
    return stretches, flights


def _trailing(graph: fx.Graph, lead: set[fx.Node]) -> list[fx.Node]:
    """What follows from a reduce or sync; and what comes of gathers alone and goes to outputs or to what leads to other
    gathers, but to no compute."""
    down: set[fx.Node] = set()
    pure: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if ops.is_hop(node):
            (pure if ops.hop(node).kind == "all_gather" else down).add(node)
        elif node.op == "call_function" and any(n in down for n in inputs):
            down.add(node)
        elif node.op == "call_function" and inputs and all(n in pure for n in inputs):
            pure.add(node)
    nowhere = pure | lead | {graph.output_node()}
    needed = [node for node in pure if not all(user in nowhere for user in node.users)]
    while needed:
        node = needed.pop()
        if node in pure and not ops.is_hop(node):
            pure.remove(node)
            needed += [*node.all_input_nodes, *node.users]
    return [node for node in graph.nodes if (node in down or node in pure) and not ops.is_hop(node)]


def _stretches(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Compute in order, cut where a repeated block begins or ends. A `compact` goes with what uses it."""
    found: list[list[fx.Node]] = []
    block = None
    for node, here in zip(nodes, blocks(_placed(node) for node in nodes), strict=True):
        if here != block:
            found.append([])
        block = here
        found[-1].append(node)
    return found


def _cut(nodes: Sequence[fx.Node], lead: set[fx.Node]) -> list[list[fx.Node]]:
    """A stretch of a block, cut before what needs a gather first, and behind what feeds a reduce."""
    needing = _needing(nodes)
    found: list[list[fx.Node]] = [[]]
    for node in nodes:
        if node in needing and found[-1]:
            found.append([])
        found[-1].append(node)
        if _feeds(node, lead) and node is not nodes[-1]:
            found.append([])
    return found


def _needing(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The first of a stretch that take what a gather brings."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            if ops.is_wait(value) and ops.hop(value).kind == "all_gather":
                found.setdefault(value, node)
    return set(found.values())


def _feeds(node: fx.Node, lead: set[fx.Node]) -> bool:
    """Whether a hop takes a value, as it is or through what leads to it."""
    return any(ops.is_start(user) or user in lead for user in node.users)


def _placed(node: fx.Node) -> fx.Node:
    return min(node.users) if node.target is ops.compact else node


def _flight(start: fx.Node, number: dict[fx.Node, int], owner: dict[fx.Node, Flight]) -> Flight:
    flight = Flight(start, ops.wait_of(start))
    _claim(start, flight, number, owner)
    flight.before.remove(start)
    if flight.wait:
        owner[flight.wait] = flight
    return flight


def _claim(node: fx.Node, flight: Flight, number: dict[fx.Node, int], owner: dict[fx.Node, Flight]) -> None:
    """A node that leads to a start, with what leads to it, inputs first."""
    owner[node] = flight
    for value in node.all_input_nodes:
        if value in owner:
            flight.after += [owner[value]] if owner[value] not in (flight, *flight.after) else []
            flight.ready = max(flight.ready, owner[value].ready)
        elif value in number:
            flight.ready = max(flight.ready, number[value])
        elif value.op == "call_function":
            _claim(value, flight, number, owner)
    flight.before.append(node)


def _put_behind(node: fx.Node, number: dict[fx.Node, int], of: dict[fx.Node, set[Flight]]) -> None:
    of[node] = {flight for n in node.all_input_nodes for flight in of.get(n, ())}
    ready = max((number[n] for n in node.all_input_nodes if n in number), default=-1)
    for flight in of[node]:
        flight.ready = max(flight.ready, ready)
        flight.behind[node] = of[node]


def _dues(flight: Flight, number: dict[fx.Node, int], owner: dict[fx.Node, Flight]) -> Iterator[int]:
    for node in (flight.start, *([flight.wait] if flight.wait else []), *flight.before):
        for user in node.users:
            if user in number:
                yield number[user]
            elif user in owner and owner[user] is not flight:
                yield owner[user].due


def rest_us(flights: Sequence[Flight], us: Cost) -> dict[Flight, float]:
    """Of each flight and those that follow it directly, together."""
    found = {flight: float(us(flight.start)) for flight in flights}
    for flight in reversed(flights):
        for earlier in flight.after:
            found[earlier] = max(found[earlier], us(earlier.start) + found[flight])
    return found


def claimed_bytes(flights: Sequence[Flight]) -> dict[Flight, int]:
    """Bytes of the last value of the chain that a flight begins."""
    found = {flight: bytes_of(flight.start) for flight in flights}
    for flight in reversed(flights):
        for earlier in flight.after:
            found[earlier] = max(found[earlier], found[flight])
    return found


def needed_bytes(flights: Sequence[Flight], count: int) -> int:
    """Bytes gathered for so many stretches, those that need most."""
    needs: Counter[int] = Counter()
    claims = claimed_bytes(flights)
    for flight in flights:
        if flight.climbs and not flight.goes_on:
            needs[flight.due] += claims[flight]
    return sum(size for _, size in needs.most_common(count))


def bytes_of(node: fx.Node) -> int:
    return prod(node.meta["val"].shape) * node.meta["val"].element_size()
