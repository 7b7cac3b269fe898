"""Schedule: one order of compute and hops. The plain one: block by block.

Within each stretch of compute of one repeated block (or outside of any), the gathers and refreshes that it needs go
before it, all starts first and then the waits, and the reduces and syncs of its gradients go behind it:

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['layers.0.w'], again=True)
        f: f32[8, 8] = wait(a)
        y: f32[4, 8] = mm(x, f)
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.0.v'], again=True)
        g: f32[8, 8] = wait(b)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])

becomes

    def forward(w: f32[4, 8], v: f32[4, 8], x: f32[4, 8]):
        'layers.0'
        a: f32[8, 8] = all_gather(w, 'gpu', 2, purpose='gather', params=['layers.0.w'], again=True)
        b: f32[8, 8] = all_gather(v, 'gpu', 2, purpose='gather', params=['layers.0.v'], again=True)
        f: f32[8, 8] = wait(a)
        g: f32[8, 8] = wait(b)
        y: f32[4, 8] = mm(x, f)
        z: f32[4, 8] = mm(y, g)
        return ([z], [])

so that a block is one piece of compute. A block's parameters are full together, as long as the block runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from passes import ops
from passes.build import rearrange
from passes.regions import block_of

_UP = ("gather", "refresh")


def schedule(graph: fx.Graph) -> fx.Graph:
    """Edits the order in place."""
    rearrange(graph, [node for run in _runs(graph) for node in _ordered(run)])
    return graph


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Stretches of one block. A gather opens the stretch of the block that it is for; a reduce stays where its gradient
    is."""
    current: list[fx.Node] = []
    block = None
    for node in graph.nodes:
        if node.op == "call_function" and "module" in node.meta and not _is_move(node, ("reduce", "sync")):
            here = block_of(node.meta["module"])
            if block is not None and here != block:
                yield current
                current = []
            block = here
        current.append(node)
    yield current


def _ordered(run: list[fx.Node]) -> list[fx.Node]:
    early, late = _early(run), _late(run)
    middle = [n for n in run if n not in early and n not in late]
    return [*_by_depth(n for n in run if n in early), *middle, *_by_depth(n for n in run if n in late)]


def _early(run: list[fx.Node]) -> set[fx.Node]:
    """Gathers and refreshes with all that leads to them, their waits, and the copy-out behind."""
    found: set[fx.Node] = set()
    for node in reversed(run):
        if _is_move(node, _UP) or (node.op == "call_function" and any(user in found for user in node.users)):
            found.add(node)
    return found


def _late(run: list[fx.Node]) -> set[fx.Node]:
    """Reduces and syncs with all that follows from them."""
    found: set[fx.Node] = set()
    for node in run:
        if _is_move(node, ("reduce", "sync")) or any(value in found for value in node.all_input_nodes):
            found.add(node)
    return found


def _is_move(node: fx.Node, purposes: tuple[str, ...]) -> bool:
    """A hop of one of these purposes, or the `compact` behind one."""
    if node.op == "call_function" and node.target is ops.compact:
        node = node.all_input_nodes[0]
    return ops.is_hop(node) and ops.hop(node).purpose in purposes


def _by_depth(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Hop after hop of the chains, all chains together: starts, then waits, then what computes on the results."""
    depth: dict[fx.Node, int] = {}
    found = list(nodes)
    for node in found:
        depth[node] = max((depth.get(n, 0) for n in node.all_input_nodes), default=0) + ops.is_start(node)
    return sorted(found, key=lambda n: (depth[n], _kind(n)))


def _kind(node: fx.Node) -> int:
    return 0 if ops.is_start(node) else 1 if ops.is_wait(node) else 2
