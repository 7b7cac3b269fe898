"""Footprint: the bytes that one rank holds in the course of an optimizer step, node by node, and what they are.

Master parameters and optimizer state rest all the time; so do, between the calls of a step, inputs, compute copies,
sums of gradients, and what a forward saves for its backward. The rest is made by the graphs, and counted by storage,
but for values that Inductor fuses into the one op that uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from operator import or_
from typing import TYPE_CHECKING

from torch import fx

from passes import feedback, ops
from passes.accumulate import PREFIX
from passes.build import outputs, placeholders
from passes.errors import Error
from passes.feedback import residual_shapes
from passes.memory import Life, levels_of, lives
from passes.wire import lost
from shardc import beside
from shardc.times import is_fused

if TYPE_CHECKING:
    from shardc.program import Program, Variant

MASTER = "master parameters and optimizer state"
COPIES = "compute copies"
SHARDS = "shards between forward and backward"
GATHERED = "gathered parameters"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
RESIDUALS = "residuals of wires"
ROOMS = "what is on its way to and from other ranks"
ARENA = "what ranks of a host have gathered in common"

REMEDIES = {
    MASTER: "shard `optim` over more axes",
    COPIES: "shard `params` over more axes",
    SHARDS: "shard `after_forward` over more axes",
    GRADIENTS: "shard `grads` over more axes",
    GATHERED: "break the block that needs so many parameters at once into smaller ones",
    RESIDUALS: "leave `error_feedback`",
    ROOMS: "give the plan a `memory_limit`, so that fewer hops are in flight at once",
    ARENA: "shard `params` over more axes, or give the plan a `memory_limit`, so that less is gathered ahead",
    ACTIVATIONS: "take a smaller batch, or checkpoint blocks (torch.utils.checkpoint)",
}


BY_MESSAGES = ("gloo",)
"""Libraries on which hops take memory beside their values (`shardc.beside`)."""


SCATTERS = ("index_put", "index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward")
"""In the names of ops."""


@dataclass(frozen=True)
class Peak:
    """The moment of most bytes."""

    bytes: int
    where: str
    """the node, the call that it is of, and its module"""
    by_kind: dict[str, int]
    largest: tuple[str, ...]
    """values that live then, largest first"""


@dataclass
class Footprint:
    """Of one step."""

    rest_bytes: int
    """of master parameters and optimizer state"""
    levels: list[list[int]] = field(default_factory=list)
    """of each call: bytes while each node runs"""
    peak: Peak = field(default_factory=lambda: Peak(0, "", {}, ()))
    arenas: list[int] = field(default_factory=list)
    """of each call: how far it reaches in arenas, which keep the most that any needs"""
    end_bytes: int = 0
    """when the last call is over"""

    def above(self, limit_bytes: int, calls: Sequence[Variant]) -> list[Variant]:
        """Those of the calls that it is of which need more than a limit, and the one whose arenas they keep."""
        if self.peak.bytes <= limit_bytes:
            return []
        arena = max(self.arenas, default=0)
        found = [max(levels) > limit_bytes for levels in self.levels]
        if arena:
            found[self.arenas.index(arena)] = True
        return [call for call, is_above in zip(calls, found, strict=True) if is_above]

    def check(self, limit_bytes: int, besides: str = "Nothing is gathered ahead of its use already.") -> None:
        """Raises `Error` where the peak is above a limit. `besides`: what else there is to know of it."""
        peak = self.peak
        if peak.bytes > limit_bytes:
            kinds = sorted(peak.by_kind, key=lambda kind: -peak.by_kind[kind])
            held = ", ".join(f"{kind} {_mib(peak.by_kind[kind])}" for kind in kinds)
            raise Error(
                f"A step needs {_mib(peak.bytes)} a rank, memory_limit is {_mib(limit_bytes)}: {held}. "
                f"Largest values: {', '.join(peak.largest)}.",
                where=peak.where,
                fix=f"Most are {kinds[0]}: {REMEDIES[kinds[0]]}. {besides}",
            )


def footprint(program: Program, calls: Sequence[tuple[Variant, fx.Graph]], optimizer_states: int = 2) -> Footprint:
    """Of a step that makes these calls in order. `optimizer_states` is how many values the optimizer keeps for each
    element of a trained parameter (2 for Adam)."""
    found = Footprint(_rest_bytes(program, optimizer_states))
    inputs_bytes = _inputs_bytes(program)
    copies_bytes = gradient_bytes = 0
    residuals_bytes = _residuals_bytes(program)
    shared = program.topology if program.library in BY_MESSAGES else None
    graphs = [graph for _, graph in calls]
    rooms = beside.rooms_bytes(graphs, shared) + beside.scratch_bytes(graphs) if shared else 0
    reached = beside.arena_bytes(graphs, shared) if shared else []
    found.arenas = [by_axis.total() for by_axis in reached]
    arena = reduce(or_, reached, Counter()).total()  # along each axis the farthest
    saved = _Saved()
    for variant, graph in calls:
        given_up = saved.given_up(graph) if variant.half == "backward" else set()
        elsewhere = beside.in_arena(graph, shared, saved.arena) if shared else {}
        living = [*_living(graph, given_up, elsewhere), *(beside.received(graph, shared) if shared else ())]
        kept = Counter({MASTER: found.rest_bytes, COPIES: copies_bytes, ACTIVATIONS: inputs_bytes})
        kept[GRADIENTS] = 0 if variant.accumulated else gradient_bytes
        kept[RESIDUALS] = residuals_bytes - _taken_bytes(graph)
        kept[ROOMS], kept[ARENA] = rooms, arena
        levels = [kept.total() + level for level in levels_of(living, len(graph.nodes))]
        found.levels.append(levels)
        kinds = _kinds(graph, variant, saved)
        if max(levels) > found.peak.bytes:
            found.peak = _peak(graph, variant, living, levels, kept, kinds)
        if variant.half == "backward":
            grads = (node for name, node in outputs(graph).items() if not name.startswith(feedback.PREFIX))
            gradient_bytes = _bytes_of(living, grads)
            copies_bytes = 0 if variant.synced else copies_bytes  # they are stale now, and dropped
        else:
            _, taken, copies = (*outputs(graph), {})[:3]
            copies_bytes = _bytes_of(living, copies.values()) or copies_bytes
            saved = _Saved.of(taken, living, set(copies.values()), kinds, elsewhere)
    found.end_bytes = found.rest_bytes + copies_bytes + gradient_bytes + residuals_bytes + rooms + arena
    return found


def _living(graph: fx.Graph, given_up: Collection[fx.Node], elsewhere: Collection[fx.Node]) -> Iterator[Life]:
    """What a call makes, or is given. What is in an arena is counted there."""
    for life in lives(graph, given_up):
        if life.node in elsewhere:
            yield replace(life, bytes=0)
        elif life.node in given_up or _is_made(life):
            yield life


@dataclass(frozen=True)
class _Saved:
    """What a forward hands to its backward, by position."""

    held: frozenset[int] = frozenset()
    """inputs of the forward, and copies that are kept: they live anyway"""
    shards: frozenset[int] = frozenset()
    """parts of parameters"""
    arena: Mapping[int, str] = field(default_factory=dict)
    """those that lie in an arena, and the axis along which ranks have them in common"""

    @classmethod
    def of(
        cls,
        taken: Sequence[object],
        living: Iterable[Life],
        copies: Collection[fx.Node],
        kinds: dict[fx.Node, str],
        elsewhere: Mapping[fx.Node, str],
    ) -> _Saved:
        made = {node for life in living if life.values.isdisjoint(copies) for node in life.values}
        held = frozenset(i for i, node in enumerate(taken) if node not in made)
        shards = frozenset(i for i, node in enumerate(taken) if kinds.get(node) == GATHERED)
        axes = {node: elsewhere[life.node] for life in living if life.node in elsewhere for node in life.values}
        return cls(held, shards, {i: axes[node] for i, node in enumerate(taken) if node in axes})

    def given_up(self, graph: fx.Graph) -> set[fx.Node]:
        """Placeholders of a backward that nobody else holds."""
        return {node for i, node in enumerate(placeholders(graph).values()) if i not in self.held}


def _kinds(graph: fx.Graph, variant: Variant, saved: _Saved) -> dict[fx.Node, str]:
    """What the values of a graph are; activations, if nothing else."""
    kinds: dict[fx.Node, str] = {}
    sums = {PREFIX + name for name, _ in variant.accumulated}
    if variant.half == "backward":
        for i, node in enumerate(placeholders(graph).values()):
            if feedback.residual_of(node):
                kinds[node] = RESIDUALS
            elif i in saved.shards or node.name in sums:
                kinds[node] = SHARDS if i in saved.shards else GRADIENTS
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.target is lost:
            kinds[node] = RESIDUALS
        elif ops.is_start(node):
            kinds[node] = GATHERED if ops.hop(node).kind == "all_gather" else GRADIENTS
        elif node.op == "call_function" and inputs and all(kinds.get(n) == GATHERED for n in inputs):
            kinds[node] = GATHERED
        elif any(kinds.get(n) == GRADIENTS for n in inputs) or any(
            ops.is_start(user) and ops.hop(user).kind != "all_gather" for user in node.users
        ):
            kinds[node] = GRADIENTS
    return kinds


def _peak(
    graph: fx.Graph,
    variant: Variant,
    living: Iterable[Life],
    levels: Sequence[int],
    kept: Counter[str],
    kinds: dict[fx.Node, str],
) -> Peak:
    at = levels.index(max(levels))
    node = list(graph.nodes)[at]
    there = sorted((life for life in living if life.birth <= at <= life.death), key=lambda life: -life.bytes)
    by_kind = kept.copy()
    for life in there:
        by_kind[next((kinds[n] for n in life.values if n in kinds), ACTIVATIONS)] += life.bytes
    where = f"{node.name} of the {variant.half} ({node.meta.get('module') or 'the model itself'})"
    largest = tuple(f"{life.node.name} {_mib(life.bytes)}" for life in there[:5])
    return Peak(levels[at], where, {kind: size for kind, size in by_kind.items() if size}, largest)


def _rest_bytes(program: Program, optimizer_states: int) -> int:
    total = 0
    for param in program.registered.values():
        layout = param.layout
        values = 1 + optimizer_states * layout.trainable
        total += prod(layout.rung_shape(layout.optim)) * param.master_dtype.itemsize * values
    return total


def _residuals_bytes(program: Program) -> int:
    """Of what reductions have lost."""
    if not program.plan.error_feedback:
        return 0
    return sum(4 * prod(shape) for p in program.registered.values() for shape in residual_shapes(p.layout, p.wires))


def _taken_bytes(graph: fx.Graph) -> int:
    """Of the residuals that a backward takes, and counts itself."""
    return sum(node.meta["val"].nbytes for node in graph.nodes if feedback.residual_of(node))


def _inputs_bytes(program: Program) -> int:
    """Of what the user passes, and buffers."""
    own = [node for name, node in placeholders(program.halves[0]).items() if name not in program.params]
    return sum(life.bytes for life in lives(program.halves[0]) if life.node in own)


def _is_made(life: Life) -> bool:
    """Not an input, and not a value that a compiler computes within the one op that uses it."""
    users = {user for node in life.values for user in node.users if user not in life.values}
    inside = len(users) == 1 and all(is_fused(node) for node in (life.node, *users)) and not _scatters(life.node)
    return life.node.op == "call_function" and not inside


def _scatters(node: fx.Node) -> bool:
    """Adds to where other values say, as the gradient of an embedding: all of it is there before any of it is read."""
    return any(name in str(node.target) for name in SCATTERS)


def _bytes_of(living: Iterable[Life], nodes: Iterable[object]) -> int:
    wanted = set(nodes)
    return sum(life.bytes for life in living if not life.values.isdisjoint(wanted))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
