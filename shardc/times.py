"""Times: how long the nodes of a graph take, on a topology that says how fast its axes and devices are.

Of a hop, what its link says. Of compute, a roofline: a matrix product takes as long as its operations or as the bytes
that it reads and writes, behind what calling it takes of a host that computes; other ops are fused, and cost what they
read that no fused op has made, and what they write for others than fused ops. Quantizing has rates of its own, beside
what it reads and writes.

On a CPU a product takes its time for each number beside that, as it puts its matrices in order first. What is fused
does not: with as much for each number that it computes, a Llama's forward and backward were foretold 8% longer than
they took, from fits to four other models, and without it 1%; fitted on its own, it was nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from passes import ops
from passes.regions import is_view
from passes.text import value_of
from passes.wire import dequantize, lost, quantize
from shardc.links import Device, Link
from shardc.topology import Topology

Times = Mapping[fx.Node, float]
"""Microseconds of nodes; of a start, its hop's on its lane; of a wait, what the hops that it is for take of compute."""


def times_us(graph: fx.Graph, topology: Topology) -> Times:
    """Of every node. Raises `Error` for a topology that does not say."""
    return {node: _node_us(node, topology) for node in graph.nodes}


def hop_us(start: fx.Node, topology: Topology) -> float:
    """Of a hop, as long as `collective_us` says."""
    hop = ops.hop(start)
    return collective_us(topology, hop.kind, hop.axis, _moved_bytes(start, topology), hop.size)


def _moved_bytes(start: fx.Node, topology: Topology) -> float:
    """By a hop. What a hop before has received into memory that ranks share is moved no further."""
    return 1 if arrives_in_arena(start.args[0], topology) else ops.moved_bytes(start)


def arrives_in_arena(value: fx.Node, topology: Topology) -> bool:
    """Whether what a gather brings (its start, or its wait) is a part of what another one brings to ranks that are
    near, and nothing else: it arrives there at once."""
    start = value.args[0] if ops.is_wait(value) else value
    if start.target is not ops.all_gather or len(value.users) != 1:
        return False
    (user,) = value.users
    return user.target is ops.all_gather and topology.is_near(ops.hop(user).axis)


def collective_us(topology: Topology, kind: str, axis: str, sent_bytes: float, size: int) -> float:
    """Of a collective of a group of `size` ranks over an axis, or over several ("gpu+node", inner first), in which each
    sends `sent_bytes`.

    Over several, where that was not measured, it is a ring through all of their ranks, cut into as many as a host has
    ranks, so that each crosses the outer axis at a place of its own.
    """
    links = _links(topology, axis)
    if len(links) == 1:
        return links[0].us(kind, sent_bytes, size)
    return _flat_us(topology, axis, sent_bytes) + max(links, key=lambda it: it.latency_us).steps_us(kind, size)


def _links(topology: Topology, axis: str) -> list[Link]:
    """That of an axis, or of several together, or of each of these."""
    known = dict(topology.flat).get(axis)
    return [known] if known else [topology.link(name) for name in axis.split("+")]


def _flat_us(topology: Topology, axis: str, sent_bytes: float) -> float:
    axes = axis.split("+")
    inside = accumulate((topology.group_size(name) for name in axes), mul, initial=1)
    return max(sent_bytes / (topology.link(name).gb_per_s * n) / 1e3 for name, n in zip(axes, inside, strict=False))


def flat_pays(starts: Sequence[fx.Node], topology: Topology) -> bool:
    """Whether hops that follow each other had better be one flat collective, by their links alone."""
    hops = [ops.hop(start) for start in starts]
    full = max(ops.moved_bytes(start) * hop.size // (hop.size - 1) for start, hop in zip(starts, hops, strict=True))
    return is_faster_flat(topology, hops[0].kind, {hop.axis: hop.size for hop in hops}, full)


def is_faster_flat(topology: Topology, kind: str, sizes: Mapping[str, int], full_bytes: int) -> bool:
    """Of a value of so many bytes, gathered or reduced over axes of these sizes. One after the other hops take their
    sum; while other hops run on the other lanes, the longest of them."""
    hops_us, pieces = [], 1
    inner_first = [axis for axis, _ in topology.inner if axis in sizes]
    for axis in inner_first:
        sent_bytes = full_bytes / pieces * (sizes[axis] - 1) / sizes[axis]
        hops_us.append(collective_us(topology, kind, axis, sent_bytes, sizes[axis]))
        pieces *= sizes[axis]
    ranks = prod(sizes.values())
    flat_us = collective_us(topology, kind, "+".join(inner_first), full_bytes * (ranks - 1) / ranks, ranks)
    return flat_us < (sum(hops_us) + max(hops_us)) / 2


def sent_us(start: fx.Node, topology: Topology) -> float:
    """Of a hop, the part that is bandwidth: as much of a larger one as it is of that one's bytes."""
    hop = ops.hop(start)
    return bandwidth_us(topology, hop.kind, hop.axis, _moved_bytes(start, topology))


def bandwidth_us(topology: Topology, kind: str, axis: str, sent_bytes: float) -> float:
    """Of a collective as `collective_us` has it, the part that is bandwidth."""
    links = _links(topology, axis)
    return links[0].sent_us(kind, sent_bytes) if len(links) == 1 else _flat_us(topology, axis, sent_bytes)


def overhead_us(start: fx.Node, topology: Topology) -> float:
    """What a hop takes of compute."""
    hop, moved_bytes = ops.hop(start), _moved_bytes(start, topology)
    return max(link.overhead_us(hop.kind, moved_bytes) for link in _links(topology, hop.axis))


def launch_us(start: fx.Node, topology: Topology) -> float:
    """The part of that which does not depend on bytes."""
    return max(link.launch_us for link in _links(topology, ops.hop(start).axis))


def bytes_us(start: fx.Node, topology: Topology) -> float:
    """What the bytes of a hop take of compute: all that it takes but its launch."""
    return overhead_us(start, topology) - launch_us(start, topology)


def without_bytes(us: Times, topology: Topology) -> Times:
    """Of waits, what launches alone take of compute."""
    return {node: _launches_us(node, topology) if ops.is_wait(node) else took_us for node, took_us in us.items()}


def _launches_us(wait: fx.Node, topology: Topology) -> float:
    return sum(launch_us(start, topology) for start in _waited_for(wait))


LONG = 16.0
"""latencies: what takes longer goes on its own, as soon as it is needed or made"""
OUTRUN = 2.5
"""times as much as compute has to do: with so much on a lane, compute waits for it throughout, wherever a hop is"""


def busy_us(us: Times, topology: Topology) -> dict[str, float]:
    """By lane, with compute as '': how long it is busy with nodes that take so long, launches aside."""
    lanes = {"": 0.0}
    for node, takes_us in us.items():
        if not ops.is_wait(node):
            for lane in topology.lanes(ops.hop(node).axis) if ops.is_start(node) else [""]:
                lanes[lane] = lanes.get(lane, 0.0) + takes_us
    return lanes


def load_of(busy_us: Mapping[str, float]) -> float:
    """How long the busiest lane is busy, as a part of compute."""
    return max((us for lane, us in busy_us.items() if lane), default=0.0) / (busy_us[""] or 1.0)


@dataclass(frozen=True)
class Merging:
    """Whether a hop of a graph, in a bucket with others, saves more than it costs: latencies and launches of its chain,
    against what is copied into the bucket and out of it.

    Copies and launches hold up compute, always; latencies do so where a lane has as much to do as compute has. Below
    that most of them are hidden, and count by the fourth power of the load. What is written just before a hop fuses
    with copy-in, so that gradients cost nothing. A bucket is used when all of it is there, and goes when the last of it
    is made: what takes many latencies gains more by going on its own.
    """

    topology: Topology
    load: float
    """of the busiest lane, were nothing merged, as a part of compute"""

    def pays(self, start: fx.Node, at_end: bool = False) -> bool:
        """`at_end`: with nothing to hide behind but the rest of its block, which can begin when a part has come. That
        gains nothing where compute waits for the lane anyway."""
        chain = _chain(start)
        first, last = chain[0], chain[-1]
        sent = sum(sent_us(hop, self.topology) for hop in chain)
        saved_us = sum(hop_us(hop, self.topology) for hop in chain) - sent
        launches_us = sum(launch_us(hop, self.topology) for hop in chain)
        if sent >= (1.0 if at_end and self.load < OUTRUN else LONG) * (saved_us + launches_us):
            return False
        if ops.hop(start).kind != "all_gather":
            return True
        at_rest = first.args[0] if first.args[0].op == "placeholder" else None
        copied_bytes = 2 * (_value_bytes(last) + (_value_bytes(at_rest) if at_rest else 0))
        return saved_us * min(1.0, self.load) ** 4 + launches_us > self.topology.computes.copied_us(copied_bytes)


PIECES = 4
"""at most, into which a parameter is cut"""
LATENCIES = 8
"""that the hops of a piece are at least as long as"""


def pieces_of(chain: Sequence[fx.Node], topology: Topology) -> int:
    """Into how many pieces a chain is cut where nothing else hides its hops: as many as its latencies allow."""
    sent = min(sent_us(hop, topology) for hop in chain)
    latency_us = max(hop_us(hop, topology) - sent_us(hop, topology) + launch_us(hop, topology) for hop in chain)
    return max(1, min(PIECES, int(sent / (LATENCIES * latency_us)))) if latency_us else PIECES


def _chain(start: fx.Node) -> list[fx.Node]:
    """The hops up (or down) the ladder that take each other's results, of which a hop is one: a gather that takes what
    a refresh brings, too, so that both are in buckets or neither, and one can relay the other."""
    climbs, chain = start.target is ops.all_gather, [start]
    while ops.is_wait(before := chain[0].args[0]) and (before.args[0].target is ops.all_gather) == climbs:
        chain.insert(0, before.args[0])
    while following := [s for wait in chain[-1].users for s in wait.users if ops.is_start(s)]:
        chain.append(following[0])
    return chain


def _node_us(node: fx.Node, topology: Topology) -> float:
    if ops.is_start(node):
        return hop_us(node, topology)
    device = topology.computes
    if ops.is_wait(node):
        return sum(overhead_us(start, topology) for start in _waited_for(node))
    if node.op != "call_function" or is_view(node):
        return 0.0
    moved_bytes = _traffic_bytes(node)
    if node.target in _QUANTIZING:
        return device.memory_us(moved_bytes) + _quantized_us(node, device)
    if node.target in _COPYING:
        return device.copied_us(moved_bytes)
    if not _is_heavy(node):
        return device.memory_us(moved_bytes)
    product_us = device.product_us(_flops(node), _itemsize(node), _kind(node), _heads(node))
    return max(product_us, device.memory_us(moved_bytes)) + device.values_us(_values(node)) + device.launch_us


_COPYING = (torch.ops.aten.cat.default, torch.ops.aten.clone.default)
"""Ops that compute nothing, as those of buckets."""
_QUANTIZING = {quantize: ["quantize"], dequantize: ["dequantize"], lost: ["quantize", "dequantize"]}
"""Ops with numbers of messages, and as what they are measured."""


def _quantized_us(node: fx.Node, device: Device) -> float:
    value = node.args[0] if node.target is quantize else node
    elements = _size(value.meta["val"].numel())
    return sum(device.quantized_us(elements, f"{kind} {node.args[1]}") for kind in _QUANTIZING[node.target])


def _waited_for(wait: fx.Node) -> Iterator[fx.Node]:
    """The start of a hop, and of those that it relays and that have no wait of their own, as a refresh has."""
    start = wait.args[0]
    yield start
    while ops.is_start(start := start.args[0]) and ops.wait_of(start) is None:
        yield start


def _formula(node: fx.Node) -> Callable[..., int] | None:
    """torch's count of operations."""
    return flop_registry.get(getattr(node.target, "overloadpacket", None))


def _flops(node: fx.Node) -> float:
    if _attends(node):
        return _attention_flops(node)
    formula = _formula(node)
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def _attends(node: fx.Node) -> bool:
    """What `scaled_dot_product_attention` becomes on any device, or flex_attention."""
    return any(name in str(node.target) for name in ("scaled_dot_product", "flex_attention"))


def _attention_flops(node: fx.Node) -> float:
    """Of two products forward and five backward, for each head of the queries: keys may have fewer, which torch's own
    count refuses before 2.12."""
    q, k, v = _attended(node)
    wide = 3 * q[-1] + 2 * v[-1] if "backward" in str(node.target) else q[-1] + v[-1]
    return float(_size(2 * q[:-1].numel() * k[-2] * wide))


def _attended(node: fx.Node) -> Iterator[torch.Size]:
    """Queries, keys and values."""
    name = str(node.target)
    first = int("backward" in name and "scaled_dot_product" in name)  # there the gradient comes before
    return (arg.meta["val"].shape for arg in node.args[first : first + 3])


def _heads(node: fx.Node) -> int:
    """Of all sequences."""
    return _size(next(_attended(node))[:-2].numel()) if _attends(node) else 1


def _kind(node: fx.Node) -> str:
    """Of its products, as devices are measured."""
    name = str(node.target)
    return ("attention backward" if "backward" in name else "attention") if "attention" in name else "products"


def _values(node: fx.Node) -> int:
    """Numbers that a product reads and writes; attention has them in its tables."""
    if _attends(node):
        return 0
    values = (it.meta["val"] for it in (*node.all_input_nodes, node))
    return sum(_size(value.numel()) for value in values if isinstance(value, torch.Tensor))


def _traffic_bytes(node: fx.Node) -> int:
    if _is_heavy(node):
        return sum(_value_bytes(n) for n in (*node.all_input_nodes, node))
    read = sum(_value_bytes(n) for n in node.all_input_nodes if not is_fused(n))
    return read + (0 if all(is_fused(user) for user in node.users) else _value_bytes(node))


def _is_heavy(node: fx.Node) -> bool:
    return _attends(node) or _formula(node) is not None


def is_fused(node: fx.Node) -> bool:
    """A view is fused where its base is."""
    if is_view(node):
        return is_fused(node.all_input_nodes[0])
    return node.op == "call_function" and not _is_heavy(node) and not ops.is_hop(node)


def _itemsize(node: fx.Node) -> int:
    """Of what it makes, or of the first of several values."""
    value = node.meta.get("val")
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value.element_size() if isinstance(value, torch.Tensor) else 4


def _value_bytes(node: fx.Node) -> int:
    """As large as the value prints; sizes that are symbols count as they were at first."""
    values = value_of(node)
    parts = values if isinstance(values, list | tuple) else [values]
    return sum(_size(v.numel()) * v.element_size() for v in parts if isinstance(v, torch.Tensor))


def _size(numel: int | torch.SymInt) -> int:
    return numel if isinstance(numel, int) else int(numel.node.hint)
