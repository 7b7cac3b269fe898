"""The rules of `passes.verify`, law by law. Each takes one graph and yields what breaks it.

A rule reads hop annotations, and where values are on the ladder (`passes.follow`); none recognises a pattern of ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from passes import feedback, ops
from passes.accumulate import PREFIX
from passes.build import outputs
from passes.follow import (
    LINEAR,
    LOCAL,
    TRANSPARENT,
    Gradient,
    Parts,
    Shard,
    axes_of,
    gradient_of,
    gradients,
    hop_axes,
    padding,
    padding_of,
    route_of,
    shard_of,
    shards,
)
from passes.layout import Layout
from passes.memory import living, peak_bytes
from passes.text import value_of
from passes.wire import CASTS, FORMATS, lost


class Broken(NamedTuple):
    """What breaks a rule: the node that does, one sentence, and what to do."""

    node: fx.Node
    what: str
    fix: str


@dataclass(frozen=True, eq=False)
class Subject:
    """One graph to check, and what it is checked against."""

    graph: fx.Graph
    role: str
    """joint, forward or backward"""
    layouts: Mapping[str, Layout]
    forward: Subject | None = None
    """of a backward"""
    synced: bool = False
    memory_limit_bytes: int | None = None

    @cached_property
    def by_name(self) -> dict[str, Layout]:
        """Layouts by parameter name."""
        return {layout.name: layout for layout in self.layouts.values()}

    @cached_property
    def mesh(self) -> dict[str, int]:
        """Axes that have hops, inner axis first."""
        axes = next((layout.axes for layout in self.layouts.values()), ())
        return {axis: size for axis, size in axes if size > 1}

    @cached_property
    def starts(self) -> list[fx.Node]:
        return ops.hops(self.graph)

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @cached_property
    def taken(self) -> list[fx.Node]:
        """Placeholders of a backward that take saved values."""
        return [node for node in self.placeholders if not node.name.startswith(("tangents_", PREFIX, feedback.PREFIX))]

    @cached_property
    def saved(self) -> list[fx.Node]:
        """What a forward saves."""
        return outputs(self.graph)[1]

    @cached_property
    def copies(self) -> dict[str, fx.Node]:
        """What a forward has refreshed, by parameter name."""
        result = outputs(self.graph)
        return result[2] if self.role == "forward" and len(result) > 2 else {}

    @cached_property
    def returned(self) -> dict[str, fx.Node]:
        """Gradients of parameters, by name."""
        result = outputs(self.graph)
        grads = result if self.role == "backward" else result[1]
        return {name: grad for name, grad in grads.items() if name in self.by_name and grad is not None}

    @cached_property
    def rungs(self) -> dict[fx.Node, tuple[Layout, int]]:
        """Where parameters and accumulators come in."""
        found = {}
        for node in self.placeholders:
            if node.name.startswith(PREFIX) and (layout := self.layouts.get(node.name.removeprefix(PREFIX))):
                found[node] = (layout, layout.grads)
            elif self.role != "backward" and (layout := self.layouts.get(node.name)):
                found[node] = (layout, layout.optim if layout.name in self.copies else layout.params)
        return found

    @cached_property
    def shards(self) -> Parts[Shard]:
        if self.forward:
            saved = zip(self.taken, self.forward.saved, strict=False)
            return shards(self.graph, {n: parts for n, s in saved if (parts := self.forward.shards.get(s))})
        return shards(self.graph, {node: (shard_of(*at),) for node, at in self.rungs.items()})

    @cached_property
    def gradients(self) -> Parts[Gradient]:
        at_rest = {
            n: (gradient_of(layout, False),) for n, (layout, _) in self.rungs.items() if n.name.startswith(PREFIX)
        }
        at_rest |= {node: (self._residual(rung, self.layouts[key]),) for node, rung, key in self._residuals()}
        return gradients(self.graph, at_rest)

    def _residuals(self) -> Iterator[tuple[fx.Node, int, str]]:
        for node in self.placeholders:
            found = feedback.residual_of(node)
            if found and found[1] in self.layouts:
                yield node, *found

    def _residual(self, rung: int, layout: Layout) -> Gradient:
        """Of a gradient that has come down to a rung."""
        crossed = route_of(layout, True)[: len(axes_of(layout, 0, rung))]
        return Gradient(layout.name if crossed else "", crossed, padding_of(layout, layout.optim))

    def gathers(self) -> Iterator[tuple[fx.Node, Layout, Shard]]:
        """Each gather or refresh, once for each parameter: its layout, and the shard that goes in."""
        for start in self.starts:
            if start.target is ops.all_gather:
                for shard in self.shards.get(start.all_input_nodes[0], ()):
                    yield start, self.by_name[shard.param], shard


# Law 1: hops are pairs.


def waited_once(it: Subject) -> Iterator[Broken]:
    fix = "give every start one wait, and use that; only another hop may take a result without"
    for start in it.starts:
        others = [user for user in start.users if not ops.is_hop(user)]
        waits = [user for user in start.users if ops.is_wait(user)]
        if others:
            yield Broken(start, f"the {ops.hop(start)} is used by `{others[0].name}` before its wait", fix)
        elif len(waits) > 1 or not start.users:
            yield Broken(start, f"the {ops.hop(start)} has {len(waits)} waits", fix)


def waits_for_hop(it: Subject) -> Iterator[Broken]:
    for node in it.graph.nodes:
        if ops.is_wait(node) and not ops.is_start(node.args[0]):
            yield Broken(node, f"`{node.name}` waits for `{node.args[0]}`, which is no hop", "remove this wait")


# Law 5: hops mean the same to all ranks.


def on_mesh(it: Subject) -> Iterator[Broken]:
    order = list(it.mesh)
    named = ", ".join(f"{axis}={size}" for axis, size in it.mesh.items())
    for start in it.starts:
        axes, hop = hop_axes(start), ops.hop(start)
        first = order.index(axes[0]) if axes[0] in order else 0
        if tuple(order[first : first + len(axes)]) != axes:
            yield Broken(
                start, f"the {hop} is over no neighbouring axes of the mesh", f"the axes are {named}, inner first"
            )
        elif prod(it.mesh[axis] for axis in axes) != hop.size:
            yield Broken(start, f"the {hop} says {hop.size} ranks", f"the axes are {named}")


def moves_of_graph(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        hop = ops.hop(start)
        if (hop.kind, hop.purpose) not in _moves(it):
            allowed = ", ".join(f"{purpose} by {kind}" for kind, purpose in _moves(it))
            yield Broken(start, f"a {it.role} has no {hop}", f"its moves are: {allowed}")


def _moves(it: Subject) -> list[tuple[str, str]]:
    moves = [("all_gather", "gather")]
    if it.copies:
        moves += [("all_gather", "refresh")]
    if it.role != "forward":
        moves += [("reduce_scatter", "reduce"), ("all_to_all", "reduce")]
    if it.synced:
        moves += [("reduce_scatter", "sync"), ("all_to_all", "sync"), ("all_reduce", "sync")]
    return moves


# Law 2: parameters climb the ladder and are used at its top.


def at_rest(it: Subject) -> Iterator[Broken]:
    for node, (layout, rung) in it.rungs.items():
        shape = layout.rung_shape(rung)
        if tuple(node.meta["val"].shape) != shape:
            says = f"{layout.name} comes in as {list(node.meta['val'].shape)}, not as {list(shape)}"
            yield Broken(node, says, f"{rung} axes hold it at rest: make its placeholder {list(shape)}")


def names_what_it_carries(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        hop = ops.hop(start)
        unknown = [name for name in hop.params if name not in it.by_name]
        carried = tuple(shard.param for shard in it.shards.get(start.all_input_nodes[0], ()))
        if unknown:
            yield Broken(start, f"the {hop} names no parameter of the plan", f"name one of {', '.join(it.by_name)}")
        elif hop.kind == "all_gather" and carried != hop.params:
            says = f"the {hop} carries {', '.join(carried) or 'no shard'}"
            yield Broken(start, says, "gather the shards of the parameters that `params` names, in that order")
        there = (it.shards if hop.kind == "all_gather" else it.gradients).get(start, ())
        if any(part.piece != hop.piece for part in there):
            says = f"the {hop} carries {ops.spelled(there[0].piece)}"
            yield Broken(start, says, "give each part of a split to a hop of its number, of as many")


def outer_first(it: Subject) -> Iterator[Broken]:
    for start, _, shard in it.gathers():
        axes = hop_axes(start)
        if not set(axes) <= set(shard.axes):
            says = f"{shard.param} is gathered over {start.args[1]}, over which it is not sharded any more"
            yield Broken(start, says, _left(shard))
        elif shard.axes[-len(axes) :] != axes:
            yield Broken(start, f"{shard.param} is gathered over {start.args[1]} too early", _left(shard))


def _left(shard: Shard) -> str:
    return f"gather over {', '.join(reversed(shard.axes))}, in this order" if shard.axes else "use the full value"


def gathered_once(it: Subject) -> Iterator[Broken]:
    seen: dict[tuple[str, str, tuple[int, int]], fx.Node] = {}
    for start, _, shard in it.gathers():
        for axis in hop_axes(start):
            first = seen.setdefault((shard.param, axis, shard.piece), start)
            if first is not start:
                says = f"{shard.param} is gathered over {axis} in `{first.name}` and again in `{start.name}`"
                yield Broken(start, says, f"use what `{first.name}` gathers")


def within_move(it: Subject) -> Iterator[Broken]:
    for start, layout, shard in it.gathers():
        on_params = len(axes_of(layout, 0, layout.params))
        after = len(shard.axes) - len(hop_axes(start))
        if ops.hop(start).purpose == "refresh" and after < on_params:
            yield Broken(start, f"the refresh of {shard.param} goes on above its params rung", "end it there")
        if ops.hop(start).purpose == "gather" and len(shard.axes) > on_params:
            yield Broken(start, f"the gather of {shard.param} starts below its params rung", "refresh it up to there")


def interleaved(it: Subject) -> Iterator[Broken]:
    fix = (
        "a group has its pieces in the order of its ranks: `interleave` them behind a flat gather, before a flat reduce"
    )
    for node in it.graph.nodes:
        shards = it.shards.get(node.all_input_nodes[0], ()) if node.all_input_nodes else ()
        if node.target is ops.interleave and any(_sizes(it, shard.mixed) != list(node.args[1]) for shard in shards):
            yield Broken(node, f"`{node.name}` mixes what a gather did not", fix)
        elif node.target in (ops.all_gather, ops.compact) and any(shard.mixed for shard in shards):
            yield Broken(node, f"{shards[0].param} goes into `{node.name}` in the order of ranks", fix)
        elif node.target in (ops.reduce_scatter, ops.all_to_all):
            axes = hop_axes(node)
            wanted = _sizes(it, axes[::-1]) if len(axes) > 1 else []
            if any(list(part.mixed) != wanted for part in it.gradients.get(node.all_input_nodes[0], (LOCAL,))):
                yield Broken(node, f"the {ops.hop(node)} has its pieces in another order than its ranks", fix)


def _sizes(it: Subject, axes: Sequence[str]) -> list[int]:
    return [it.mesh.get(axis, 1) for axis in axes]


def compacted(it: Subject) -> Iterator[Broken]:
    for node in it.graph.nodes:
        if node.target is ops.compact:
            for shard in it.shards.get(node.all_input_nodes[0], ()):
                if shard.wire:
                    says = f"{shard.param} is compacted while in {shard.wire}"
                    yield Broken(node, says, "dequantize it first")
                elif shard.axes:
                    says = f"{shard.param} is compacted while sharded over {'+'.join(shard.axes)}"
                    yield Broken(node, says, "padding is part of every shard: compact the full value")
                elif shard.padding != padding(*node.args[1:]):
                    says = f"the compact of {shard.param} does not fit its padding"
                    yield Broken(node, says, f"its rows and split are {shard.padding or 'those of no padding'}")


def full_when_used(it: Subject) -> Iterator[Broken]:
    for node in it.graph.nodes:
        if node not in it.shards and node.op != "placeholder":
            for used in _inputs(node, it):
                for shard in it.shards.get(used, ()):
                    if not shard.is_full:
                        yield Broken(node, f"{shard.param} is {_state(shard)} in `{used.name}`", _missing(shard))


def _inputs(node: fx.Node, it: Subject) -> list[fx.Node]:
    """What a node computes with; of the output only what the user gets, since saved values and copies are shards."""
    if node.op != "output":
        return node.all_input_nodes
    results = [] if it.role == "backward" else outputs(it.graph)[0]
    return [value for value in results if isinstance(value, fx.Node)]


def _state(shard: Shard) -> str:
    if shard.piece != ops.WHOLE:
        return f"only {ops.spelled(shard.piece)}"
    if shard.wire and not shard.axes:
        return f"still in {shard.wire}"
    if shard.mixed and not shard.axes:
        return "still in the order of ranks"
    return f"still sharded over {'+'.join(shard.axes)}" if shard.axes else "still padded"


def _missing(shard: Shard) -> str:
    if shard.piece != ops.WHOLE:
        return "first put all pieces together with `cat`, in order"
    gathers = [f"gather over {axis}" for axis in reversed(shard.axes)]
    restored = ["interleave"] * bool(shard.mixed) + ["dequantize"] * bool(shard.wire)
    compact = [f"compact({shard.padding[0]}, {list(shard.padding[1])})"] if shard.padding else []
    return f"first {', then '.join(gathers + restored + compact)}"


def copied(it: Subject) -> Iterator[Broken]:
    for name, copy in it.copies.items():
        layout = it.by_name[name]
        there, wanted = it.shards.get(copy, ()), shard_of(layout, layout.params)
        if there != (wanted,):
            axes = "+".join(wanted.axes) or "nothing"
            says = f"the copy of {name} is not its shard on the params rung"
            yield Broken(
                copy,
                says,
                f"refresh it over {_axes(layout, layout.params, layout.optim)}; it stays sharded over {axes}",
            )


def _axes(layout: Layout, start: int, end: int) -> str:
    return ", ".join(reversed(axes_of(layout, start, end))) or "no axis"


# Law 3: gradients descend the ladder, every contribution once.


def on_route(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        for part in it.gradients.get(start, ()):
            route = route_of(it.by_name[part.param], it.synced)
            if route[: len(part.crossed)] != part.crossed:
                yield Broken(start, f"the gradient of {part.param} crosses {_steps(part.crossed)}", _plan(route))


def _steps(crossed: tuple[tuple[str, str, str], ...]) -> str:
    return ", ".join(f"{axis} ({purpose})" for _, purpose, axis in crossed) or "no axis"


def _plan(route: tuple[tuple[str, str, str], ...]) -> str:
    return "its way is " + (
        ", then ".join(f"{kind} over {axis} ({purpose})" for kind, purpose, axis in route) or "empty"
    )


def expanded(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        for part in it.gradients.get(start, ()):
            layout = it.by_name[part.param]
            wanted = part.padding if start.target is ops.all_reduce else padding_of(layout, layout.optim)
            if part.padding != wanted:
                rows = layout.padded_rows if wanted else layout.shape[0]
                says = f"the gradient of {part.param} goes into its first hop without the padding of its shards"
                yield Broken(start, says, f"expand it to {rows} rows first")


def one_sum(it: Subject) -> Iterator[Broken]:
    for node in it.graph.nodes:
        terms = [it.gradients.get(n, (LOCAL,)) for n in node.all_input_nodes]
        first = next((part for parts in terms for part in parts if part.crossed), None)
        if first is None or node.op == "output" or node.target is lost:
            continue
        if node not in it.gradients or not _is_linear(node):
            yield Broken(node, f"the gradient of {first.param} is used on its way", "use it after its last hop")
        elif node.target in LINEAR and any(parts != terms[0] for parts in terms):
            says = f"`{node.name}` adds to the gradient of {first.param} what has not crossed the same axes"
            yield Broken(node, says, f"add before its first hop, or what has crossed {_steps(first.crossed)} too")


def _is_linear(node: fx.Node) -> bool:
    """Of an op of two operands: scaled by a number, or the sum of two different values."""
    if node.target not in LINEAR - TRANSPARENT:
        return True
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    is_sum = node.target is torch.ops.aten.add.Tensor
    return len(operands) == len(set(operands)) == (2 if is_sum else 1)


def reduced(it: Subject) -> Iterator[Broken]:
    for name, grad in it.returned.items():
        layout = it.by_name[name]
        wanted = gradient_of(layout, it.synced)
        part = it.gradients.get(grad, (LOCAL,))[0]
        if part.piece != ops.WHOLE:
            says = f"of the gradient of {name} only {ops.spelled(part.piece)} is returned"
            yield Broken(grad, says, "put all pieces together with `cat`, in order")
        elif part.wire or part.folds > 1 or part.mixed:
            says = f"the gradient of {name} is returned {_unfinished(part)}"
            yield Broken(grad, says, "dequantize what an all-to-all brings, and fold it")
        elif (part.crossed, part.padding) != (wanted.crossed, wanted.padding) or part.param not in ("", name):
            whose = f" as that of {part.param}" if part.param not in ("", name) else ""
            says = f"the gradient of {name} is returned having crossed {_steps(part.crossed)}{whose}"
            yield Broken(grad, says, _plan(wanted.crossed))


def _unfinished(part: Gradient) -> str:
    if part.mixed:
        return "in the order of ranks"
    return f"in {part.wire}" if part.wire else f"as {part.folds} pieces that are not summed"


def none_lost(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        for part in it.gradients.get(start, ()):
            if part.param not in it.returned:
                yield Broken(start, f"the gradient of {part.param} is reduced but not returned", "return it")


# Law 7: what a hop travels in is what it says.


def in_its_wire(it: Subject) -> Iterator[Broken]:
    for start in it.starts:
        hop, value = ops.hop(start), start.all_input_nodes[0]
        parts: Sequence[Shard | Gradient] = it.shards.get(value) or it.gradients.get(value, (LOCAL,))
        scaled = {part.wire for part in parts}
        cast = CASTS.get(hop.wire)
        if hop.wire and hop.wire not in FORMATS:
            yield Broken(start, f"the {hop} names no format", f"one of {', '.join(FORMATS)}")
        elif scaled != {"" if cast else hop.wire} or (cast and value.meta["val"].dtype != cast):
            there = ", ".join(sorted(scaled - {""})) or str(value.meta["val"].dtype).removeprefix("torch.")
            yield Broken(start, f"the {hop} carries {there}", "quantize, or cast, what goes in, or say so: `wire`")


def folded(it: Subject) -> Iterator[Broken]:
    for node in it.graph.nodes:
        folds = max((part.folds for part in it.gradients.get(node, ())), default=1)
        if folds < 1 or (ops.is_start(node) and folds > (ops.hop(node).size if node.target is ops.all_to_all else 1)):
            says = f"`{node.name}` comes before the pieces of an all-to-all are summed, or after"
            yield Broken(node, says, "fold what an all-to-all brings once, by the size of its axis")


# Law 4: what lies between forward and backward.


def again_above_rung(it: Subject) -> Iterator[Broken]:
    for start, layout, shard in it.gathers():
        kept, again = len(axes_of(layout, 0, layout.after_forward)), ops.hop(start).again
        after = len(shard.axes) - len(hop_axes(start))
        if ops.hop(start).purpose != "gather":
            continue
        if again != (after < kept):
            says = f"the gather of {shard.param} over {start.args[1]} {'is' if again else 'is not'} marked `again`"
            yield Broken(start, says, _rung(layout))
        elif again and len(shard.axes) > kept:
            says = f"the gather of {shard.param} over {start.args[1]} crosses its after_forward rung"
            yield Broken(start, says, "end a hop there, so that the backward can start from it")


def _rung(layout: Layout) -> str:
    again = ", ".join(reversed(axes_of(layout, 0, layout.after_forward))) or "no axis"
    return f"the backward gathers it over {again}, and that is what `again` marks"


def repeats_marked_hops(it: Subject) -> Iterator[Broken]:
    for start, layout, shard in it.gathers():
        if not ops.hop(start).again:
            says = f"the backward gathers {shard.param} over {start.args[1]}, which the forward has done for both"
            yield Broken(start, says, f"save what the forward gathered; {_rung(layout)}")


def saves_no_full(it: Subject) -> Iterator[Broken]:
    above = _above(it)
    for node in it.saved:
        if node in above:
            says = f"`{node.name}` is saved, though it is computed from {', '.join(above[node])} alone"
            yield Broken(node, says, "save the shards on the after_forward rung and compute it again")


def _above(it: Subject) -> dict[fx.Node, tuple[str, ...]]:
    """Nodes computed from parameters and constants alone, `again` hops among them, with the parameters of those."""
    pure = set(it.rungs)
    above: dict[fx.Node, tuple[str, ...]] = {}
    for node in it.graph.nodes:
        if (
            node.op in ("placeholder", "output")
            or not all(n in pure for n in node.all_input_nodes)
            or ops.is_random(node)
        ):
            continue
        pure.add(node)
        names = [name for n in node.all_input_nodes for name in above.get(n, ())]
        if ops.is_start(node) and ops.hop(node).again:
            names += ops.hop(node).params
        if names:
            above[node] = tuple(dict.fromkeys(names))
    return above


def takes_saved(it: Subject) -> Iterator[Broken]:
    assert it.forward
    saved = it.forward.saved
    for i, node in enumerate(it.taken):
        if i >= len(saved):
            fix = f"the forward saves {len(saved)} values; save it too, or name it tangents_... or {PREFIX}..."
            yield Broken(node, f"the backward takes `{node.name}`, which the forward does not save", fix)
        elif _type(node) != _type(saved[i]):
            says = f"saved value {i} is `{saved[i].name}: {_type(saved[i])}`, the backward takes {_type(node)}"
            yield Broken(node, says, "keep saved values and placeholders in the same order")
    if len(saved) > len(it.taken):
        node = saved[len(it.taken)]
        yield Broken(node, f"`{node.name}` is saved, but the backward does not take it", "do not save it")


def _type(node: fx.Node) -> str:
    value = value_of(node)
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


# Law 6: memory.


def under_limit(it: Subject) -> Iterator[Broken]:
    if it.memory_limit_bytes is None:
        return
    # A backward pops its saved values; shards among them are the caller's all the same.
    given_up = (
        [n for n, s in zip(it.taken, it.forward.saved, strict=False) if s.op != "placeholder"] if it.forward else []
    )
    peak, node = peak_bytes(it.graph, given_up)
    if peak > it.memory_limit_bytes:
        largest = ", ".join(f"{life.node.name} {life.bytes:,}" for life in living(it.graph, node, given_up)[:5])
        says = f"the {it.role} needs {peak:,} bytes, the limit is {it.memory_limit_bytes:,}; largest there: {largest}"
        yield Broken(node, says, "raise the limit, shard more, or save less (activation_budget)")
