"""Partition: joint -> forward and backward, cut at the after_forward rung.

    def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
        b: f32[4, 4] = wait(a)
        c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 4] = wait(c)
        y: f32[2, 4] = mm(x, f)
        h: f32[4, 8] = permute(f, [1, 0])
        g: f32[2, 8] = mm(tangents_1, h)
        return ([y], {'x': g})

becomes, for `w` with params on gpu+node and after_forward on gpu,

    def forward(w: f32[2, 4], x: f32[2, 8]):
        a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
        b: f32[4, 4] = wait(a)
        c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 4] = wait(c)
        y: f32[2, 4] = mm(x, f)
        return ([y], [b])

    def backward(b: f32[4, 4], tangents_1: f32[2, 4]):
        c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
        f: f32[8, 4] = wait(c)
        h: f32[4, 8] = permute(f, [1, 0])
        g: f32[2, 8] = mm(tangents_1, h)
        return {'x': g}

functorch's min-cut partitioner decides what to save and what to compute again; tags tell it what the plan demands:

- everything computed from `again` hops and constants alone (the hop, its wait, views, casts, but also the `cat` or the
  product of two weights) must be recomputed, so that no more of a parameter than its after_forward shard lives between
  forward and backward;
- a value gathered by any other hop must not be computed again: what lies on the after_forward rung is saved;
- the result of a random op without a seed is saved, in a checkpointed block of the model too: nothing can compute it
  again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch
import torch._functorch.config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from passes import ops
from passes.build import outputs, placeholders, set_outputs
from passes.memory import lives

# Above the number of any checkpointed block in the model: the partitioner saves a node whose user is of a later block.
_AFTER_ALL_BLOCKS = 1 << 30


def partition(graph: fx.Graph, params: Collection[str], activation_budget: float = 1.0) -> tuple[fx.Graph, fx.Graph]:
    """`params` are the names of the parameter placeholders; `activation_budget` in [0, 1] is the share of the
    activations that may be saved (functorch's memory budget; 1 saves whatever is fastest)."""
    results, grads = outputs(graph)
    for node in recomputed(graph, params):
        _tag(node, CheckpointPolicy.MUST_RECOMPUTE)
    for node in ops.hops(graph, "gather"):
        if not ops.hop(node).again:
            _tag(wait_of(node), CheckpointPolicy.MUST_SAVE)
    for node in graph.nodes:
        if "recompute" in node.meta and ops.is_random(node):
            _settle(node)
    set_outputs(graph, [*results, *grads.values()])
    graph.output_node().meta.clear()
    module = fx.GraphModule(graph.owning_module or torch.nn.Module(), graph)
    free = [i for i, name in enumerate(placeholders(graph)) if name in params]
    with functorch_config.patch(activation_memory_budget=activation_budget):
        forward, backward = min_cut_rematerialization_partition(
            module, None, num_fwd_outputs=len(results), static_lifetime_input_indices=free
        )
    for node in (*forward.graph.nodes, *backward.graph.nodes):
        node.target = getattr(node.target, "marked_op", node.target)
    forward, backward = _named(forward.graph, backward.graph, len(results), list(grads))
    _give_up(forward, backward, params)
    return forward, backward


def recomputed(graph: fx.Graph, params: Collection[str]) -> list[fx.Node]:
    """Nodes computed from parameters and constants alone that lie above the after_forward rung: each `again` hop and
    what depends on one. The cast of a shard in front of such a hop belongs to them, or it would be saved beside the
    shard."""
    pure: set[fx.Node] = set()
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in params:
                pure.add(node)
        elif node.op != "output" and _is_pure(node, pure):
            pure.add(node)
            if _is_again(node):
                found.update(dict.fromkeys(_casts_before(node)))
            if _is_again(node) or any(n in found for n in node.all_input_nodes):
                found[node] = None
    return list(found)


def _is_pure(node: fx.Node, pure: set[fx.Node]) -> bool:
    return all(n in pure for n in node.all_input_nodes) and not ops.is_random(node)


def _settle(node: fx.Node) -> None:
    """A random op of a checkpointed block. The partitioner would run it again with the state of the generator, which it
    saves in ways of its own; fused attention, which is marked random, is not where it drops nothing."""
    if _drops_nothing(node):
        node.target = _unmarked(node.target)
    else:
        for result in (node, *(user for user in node.users if user.target is operator.getitem)):
            _tag(result, CheckpointPolicy.MUST_SAVE)


def _drops_nothing(node: fx.Node) -> bool:
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            return (node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)) == 0.0
    return False


@cache
def _unmarked(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The same function without its tags, for as long as the partitioner looks; `.marked_op` is the op."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    call.marked_op = op  # type: ignore[attr-defined]
    return call


def _is_again(node: fx.Node) -> bool:
    return ops.is_start(node) and ops.hop(node).again


def _casts_before(node: fx.Node) -> Iterator[fx.Node]:
    node = node.all_input_nodes[0]
    while node.op == "call_function" and not ops.is_wait(node):
        yield node
        node = node.all_input_nodes[0]


def wait_of(start: fx.Node) -> fx.Node:
    return next(iter(start.users))


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _AFTER_ALL_BLOCKS


def _named(forward: fx.Graph, backward: fx.Graph, num_outputs: int, grads: list[str]) -> tuple[fx.Graph, fx.Graph]:
    """The normal form of both: saved values in the order in which the backward takes them."""
    flat = list(outputs(forward))
    saved_by_name = {node.name: node for node in flat[num_outputs:]}
    saved = [saved_by_name[name] for name in placeholders(backward) if name in saved_by_name]
    set_outputs(forward, (flat[:num_outputs], saved))
    set_outputs(backward, dict(zip(grads, outputs(backward), strict=True)))
    return forward, backward


def _give_up(forward: fx.Graph, backward: fx.Graph, params: Collection[str]) -> None:
    """Marks what a backward takes that nobody else holds: computed from data, neither a result nor saved twice. What
    is computed from parameters alone may lie at rest the next time."""
    results, saved = outputs(forward)
    pure: set[fx.Node] = set()
    for node in forward.nodes:
        if node.name in params if node.op == "placeholder" else node.op != "output" and _is_pure(node, pure):
            pure.add(node)
    taken = dict(zip(saved, backward.find_nodes(op="placeholder"), strict=False))
    for life in lives(forward):
        held = [node for node in (*results, *saved) if node in life.values]
        computed = life.node.op == "call_function" and life.node not in pure and not ops.is_hop(life.node)
        if computed and len(held) == 1 and held[0] in taken:
            taken[held[0]].meta["given_up"] = True
