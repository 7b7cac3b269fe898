"""A program: one traced call of a model, compiled for one plan. Forward, backward and their variations.

Micro-batches need small variations of the same two graphs: a forward with or without `refresh`, a backward that adds to
accumulators or not, with or without `sync`. Each is made when it is first used; all forwards hand the backward the same
list of saved values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch import fx

from passes import ops
from passes.accumulate import accumulate
from passes.apart import apart
from passes.bucket import bucket
from passes.build import copy, outputs
from passes.chunk import chunk
from passes.errors import Error
from passes.excerpt import excerpt, needed
from passes.feedback import feedback
from passes.follow import stops_at_sum
from passes.fuse import fuse
from passes.hoist import hoist
from passes.insert import Param
from passes.layout import Layout
from passes.order import Order, Orders, align, collective_order
from passes.refresh import refresh
from passes.regions import Region, regions
from passes.relay import relay
from passes.schedule import PILE, default_window, schedule
from passes.sync import sync
from passes.text import to_text
from passes.verify import verify
from shardc.capture import Captured
from shardc.footprint import Footprint
from shardc.plan import Plan
from shardc.runner import Runner
from shardc.times import Merging, Times, busy_us, flat_pays, load_of, pieces_of, times_us
from shardc.topology import Topology


class Allowance(NamedTuple):
    """What the schedule of a call may hold that compute does not need yet, or no more."""

    pile: int
    """stretches whose gradients may wait for their reduces"""
    window: float
    """of what it would like to gather ahead"""


MOST = Allowance(PILE, 1.0)
"""Where memory is not limited."""
ALIKE = 3
"""Micro-batches of a step that stand for any number: the first, the last, and one for all between."""


@dataclass(frozen=True)
class Variant:
    """What one call of a program is to do besides computing."""

    half: str
    """forward or backward"""
    stale: tuple[str, ...] = ()
    """placeholders whose compute copies a forward makes first"""
    accumulated: tuple[tuple[str, Param], ...] = ()
    """accumulators that a backward adds to, by placeholder name"""
    synced: bool = False
    """a backward brings the sums to the optim rung"""
    sums: bool = False
    """others of its step came before it, whose gradients wait between two hops; on a rank that was told to drop them,
    too, for orders are common to all"""
    again: bool = False
    """gradients of calls before it lie there, so that less may be gathered ahead, where memory is limited"""


@dataclass(frozen=True)
class Pace:
    """How long compute took, as measured."""

    us: Mapping[str, float] = field(default_factory=dict)
    """of a node, by its name before buckets"""
    copies: float = 1.0
    """how many times longer than the roofline says all others take"""


@dataclass(eq=False)
class Program:
    """`forward` and `backward` are the graphs of a micro-batch that neither refreshes nor syncs (`backward` is None
    when nothing is trained); `refreshed` and `variation` make the others."""

    captured: Captured
    params: dict[str, Param]
    """by placeholder name"""
    registered: Mapping[str, Param]
    """all of the model's, used or not, by name, in the order in which it registers them"""
    plan: Plan
    halves: tuple[fx.Graph, fx.Graph | None]
    """forward and backward as they were partitioned; every variant starts from a copy of one"""
    run: Runner
    orders: Orders = field(default_factory=Orders)
    """what the ranks agreed on"""
    library: str = ""
    """what moves bytes, where that is known ("gloo")"""
    made: dict[Variant, fx.Graph] = field(default_factory=dict)
    allowances: dict[Variant, Allowance] = field(default_factory=dict)
    """of calls, where memory is limited"""
    unfit: dict[Variant, Footprint] = field(default_factory=dict)
    """calls that need more memory than there is, of steps of several micro-batches"""
    pace: dict[str, Pace] = field(default_factory=dict)
    """of each half, where it was measured"""
    loads: dict[str, float] = field(default_factory=dict)
    """of each half, where it stands for a part of a deeper model, whose load it is (`shardc.times.Merging`)"""

    @property
    def topology(self) -> Topology:
        return self.plan.topology

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """By placeholder name."""
        return {name: param.layout for name, param in self.params.items()}

    @property
    def forward(self) -> fx.Graph:
        return self.plain()

    @property
    def backward(self) -> fx.Graph | None:
        return None if self.halves[1] is None else self.graph(Variant("backward"))

    def refreshed(self, stale: Collection[str] | None = None) -> fx.Graph:
        """The forward that first makes new compute copies of the parameters `stale` (all by default)."""
        names = {n for n, p in self.params.items() if p.has_copy and (stale is None or p.layout.name in stale)}
        return self.graph(Variant("forward", stale=tuple(sorted(names))))

    def plain(self, *, again: bool = False) -> fx.Graph:
        """The forward that makes no compute copies. `again`: gradients of calls before it lie there; where there is no
        room for them it is the backward that says so, for until then they may be gone."""
        variant = Variant("forward", again=again and self.is_limited)
        return self.graph(replace(variant, again=False) if variant in self.unfit else variant)

    @property
    def is_limited(self) -> bool:
        return self.plan.memory_limit is not None

    def variation(
        self,
        *,
        synced: bool,
        accumulated: Mapping[str, Param] | None = None,
        first: bool | None = None,
        again: bool = False,
    ) -> fx.Graph:
        """The backward that adds to the accumulators `accumulated` (by placeholder name; by default to those of all
        parameters that it has gradients for) and, if `synced`, brings the sums to the optim rung. It is the `first` of
        its step where it adds to none, unless that is said: ranks must agree on that, not on what has accumulated.
        `again`: as for a forward."""
        if self.halves[1] is None:
            raise Error("This program has no backward: nothing in it is trained.")
        if accumulated is None:
            accumulated = self._accumulators
        return self.graph(self._backward(synced, accumulated, not accumulated if first is None else first, again))

    def _backward(self, synced: bool, accumulated: Mapping[str, Param], first: bool, again: bool) -> Variant:
        sums = synced and not first and self._stops_at_sums
        again = again and not accumulated and self.is_limited
        return Variant("backward", accumulated=tuple(accumulated.items()), synced=synced, sums=sums, again=again)

    @cached_property
    def _stops_at_sums(self) -> bool:
        return any(stops_at_sum(p.layout) for p in self.registered.values() if p.layout.trainable)

    @property
    def summed(self) -> set[str]:
        """Names of the parameters of this program that the last backward of a step adds sums to, where sums wait
        between two hops."""
        return {p.layout.name for p in self._accumulators.values()} if self._stops_at_sums else set()

    @property
    def _accumulators(self) -> dict[str, Param]:
        return {n: p for n, p in self.params.items() if p.needs_sync and p.layout.trainable}

    def step(self, micro_batches: int = 1) -> list[Variant]:
        """What one optimizer step calls, in order: the first forward refreshes, the last backward syncs."""
        found = []
        stale = tuple(sorted(n for n, p in self.params.items() if p.has_copy))
        for i in range(micro_batches):
            found.append(Variant("forward", stale=() if i else stale, again=i > 0 and self.is_limited))
            if self.halves[1] is not None:
                accumulated = self._accumulators if i else {}
                found.append(self._backward(i == micro_batches - 1, accumulated, first=not i, again=i > 0))
        return found

    def graph(self, variant: Variant) -> fx.Graph:
        """Of one call, as it runs."""
        if variant in self.unfit:
            besides = "Steps of fewer micro-batches fit, and come first."
            self.unfit[variant].check(self.plan.memory_limit or 0, besides)
        first = replace(variant, again=False)
        if self.allowance(first) == self.allowance(variant):
            variant = first
        if variant not in self.made:
            graph = self._finish(variant)
            self._verify(graph, variant)
            self.made[variant] = graph
        return self.made[variant]

    def draft(self, variant: Variant) -> fx.Graph:
        """Of one call, before hops are in buckets and in order."""
        if variant.half == "forward":
            graph = copy(self.halves[0])
            if variant.stale:
                graph = self.run("refresh", refresh, graph, self.params, variant.stale)
            return self._routed(graph)
        graph, accumulated = copy(self.halves[1]), dict(variant.accumulated)
        if accumulated:
            graph = self.run("accumulate", accumulate, graph, accumulated)
        everyone = {p.layout.name: p for p in (*self.params.values(), *accumulated.values())}
        if variant.synced:
            graph = self.run("sync", sync, graph, everyone)
        if self.plan.error_feedback:
            layouts = {n: p.layout for n, p in variant.accumulated} | self.layouts
            graph = self.run("feedback", feedback, graph, layouts)
        return self._routed(graph)

    def _routed(self, graph: fx.Graph) -> fx.Graph:
        """Flat where the plan has it so. All ranks find the same: it depends on parameters and links alone."""
        if self.plan.chain == "hop":
            return graph
        always = self.plan.chain == "flat"
        return self.run("fuse", fuse, graph, lambda starts: always or flat_pays(starts, self.topology))

    def _verify(self, graph: fx.Graph, variant: Variant) -> None:
        if variant.half == "forward":
            self.run("verify", verify, self.layouts, forward=graph)
        else:
            layouts = {n: p.layout for n, p in variant.accumulated} | self.layouts
            forward = next((g for v, g in self.made.items() if v.half == "forward"), None) or self.forward
            self.run("verify", verify, layouts, forward=forward, backward=graph, synced=variant.synced)

    def times_us(self, graph: fx.Graph, half: str, topology: Topology | None = None) -> Times:
        """Microseconds of every node of a graph of a half, on the topology that the program was compiled for or another
        one. What was measured counts for the device that it was measured on. Raises `Error` for a topology that does
        not say how fast its axes and devices are."""
        topology = self.topology if topology is None else topology
        us = times_us(graph, topology)
        if half not in self.pace or topology.device != self.topology.device:
            return us
        pace = self.pace[half]
        return {n: t if ops.is_hop(n) else pace.us.get(n.name, t * pace.copies) for n, t in us.items()}

    def shares(self, variant: Variant) -> str:
        """Calls of the same answer go by the same orders. Where gradients are summed half way to the optim rung, what
        is sent on waits for the sum: in the order of a call without sums compute would stand still for that."""
        return variant.half + ", sums" * variant.sums

    def whole(self, variant: Variant) -> Variant:
        """The call that has all hops, of those that share orders with one; itself, where only other programs' gradients
        are summed."""
        calls = (*self.step(), *self.step(2))
        return next((v for v in calls if self.shares(v) == self.shares(variant)), variant)

    def _finish(self, variant: Variant) -> fx.Graph:
        """Bucketed, scheduled, and in the order that the ranks agreed on; where they have none yet, they do now: on
        that of the call that has all hops, or on this one's, where it brings sums of other programs to the optim rung,
        too."""
        graph, shared = self.draft(variant), self.shares(variant)
        order, whole = self.orders.find(shared, graph), self.whole(variant)
        if order is None and variant != whole:
            self.graph(whole)
            order = self.orders.find(shared, graph)
        if order is None:
            own = self.scheduled(copy(graph), variant)
            self.orders.decide(shared, collective_order(own))
            order = self.orders.find(shared, graph)
            assert order is not None
            if order == collective_order(own):
                return own
        return align(self.scheduled(graph, variant, order), order)

    def scheduled(self, graph: fx.Graph, variant: Variant, order: Order | None = None) -> fx.Graph:
        """A draft in buckets (those of an order, or its own) and in its own order. Edits in place."""
        half, allowed = variant.half, self.allowance(variant)
        graph = self.run("bucket", self._bucketed, graph, half, order)
        if half == "backward" and not variant.synced:
            graph = self.run("apart", apart, graph)
        graph = self.run("chunk", self._chunked, graph, order)
        graph = self.run("relay", relay, graph)
        us = self.times_us(graph, half).__getitem__ if self.topology.links else None
        window_bytes = None if allowed.window == 1.0 else int(allowed.window * default_window(graph))
        graph = self.run("schedule", schedule, graph, us, window_bytes, allowed.pile, self.topology.lanes)
        return graph if allowed.window < 1.0 else self.run("hoist", hoist, graph, self.topology.lanes)

    def allowance(self, variant: Variant) -> Allowance:
        """That of a call that was not asked about when memory was: the smallest of those alike."""
        alike = [allowed for other, allowed in self.allowances.items() if other.half == variant.half]
        return self.allowances.get(variant, min(alike, default=MOST))

    def _bucketed(self, graph: fx.Graph, half: str, order: Order | None = None) -> fx.Graph:
        if not self.topology.links:
            return bucket(graph, list(self.registered), order)
        load = self.loads.get(half)
        if load is None:
            load = load_of(busy_us(self.times_us(graph, half), self.topology))
        return bucket(graph, list(self.registered), order, Merging(self.topology, load).pays)

    def _chunked(self, graph: fx.Graph, order: Order | None = None) -> fx.Graph:
        if not self.topology.links:
            return graph
        return chunk(graph, lambda chain: pieces_of(chain, self.topology), order)

    def settle(self) -> None:
        """Has all ranks agree on the orders of this program, unless an earlier program's cover it: makes the calls that
        have all hops; the others follow these. All ranks call it together."""
        for whole in self.step():
            if self.orders.find(whole.half, self.draft(Variant(whole.half))) is None:
                self.graph(whole)

    def after(self, stage: str) -> tuple[fx.Graph, ...]:
        """The graphs as they stood after a stage: one joint graph after `capture`, `decompose` and `insert`; forward
        and backward after `partition`, `bucket`, `chunk`, `schedule` and `regions`."""
        if stage == "bucket":
            named = zip(self.halves, ("forward", "backward"), strict=True)
            return tuple(self._bucketed(self._routed(copy(g)), half) for g, half in named if g is not None)
        if stage == "chunk":
            return tuple(self._chunked(graph) for graph in self.after("bucket"))
        if stage == "schedule":
            return self.forward, *([self.backward] if self.backward else [])
        if stage == "regions":
            known: dict[str, Region] = {}
            return tuple(regions(graph, known) for graph in self.after("schedule"))
        if stage not in self.run.kept:
            raise Error(
                f"No graph was kept after stage {stage!r} (kept: {', '.join(self.run.kept) or 'none'}).",
                fix="shardc.trace keeps all stages; a compiled model's programs keep none, to save memory.",
            )
        return self.run.kept[stage]

    def explain(self, topology: Topology | None = None, *, micro_batches: int = 1, fold: bool = True) -> str:
        """A step as it is foretold, and a table of its collectives: what each moves, how long it takes, what hides it,
        and why it is exposed where it is; then what does not travel in the plan's wires. Collectives of equal layers
        that fare alike are one line, if `fold`. Arguments are those of `shardc.simulate`."""
        from shardc.explain import as_they_are, explain
        from shardc.simulate import simulate

        table = explain(simulate(self, topology, micro_batches=micro_batches), fold=fold)
        return table + as_they_are(self.plan, self.registered.values())

    def svg(self, folder: str | Path, *, fold: bool = True) -> list[Path]:
        """Draws the forward and the backward that have all hops: `forward.svg` and `backward.svg` in a folder, each
        with its `.dot` source beside it. Equal layers are drawn once, if `fold`. Returns the pictures. Raises `Error`
        where nothing can render them; the sources are written then, too."""
        from shardc.draw import draw

        halves = {variant.half: self.graph(variant) for variant in self.step()}
        return [draw(graph, Path(folder) / f"{half}.svg", fold=fold) for half, graph in halves.items()]

    def text(self) -> str:
        """Forward and backward as text."""
        texts = [to_text(self.forward, "forward")]
        return "\n".join(texts if self.backward is None else [*texts, to_text(self.backward, "backward")])

    def layer_text(self, module: str, after: str | None = None) -> str:
        """The forward of one module ("blocks.1") as text: what comes from outside, the hops of its parameters, compute,
        what goes outside. `after` a stage ("capture", "insert", ...) as it stood then, else as it is in the end. Raises
        `Error` for a stage that was not kept and for a module that the graph does not name."""
        graph = self.after(after)[0] if after else self.forward
        part = excerpt(graph, module, needed(outputs(graph)[0]) if after else None)
        if not part.find_nodes(op="output")[0].args[0]:
            known = sorted({str(n.meta["module"]) for n in graph.nodes if n.meta.get("module")})
            raise Error(f"The graph has no compute of module {module!r}.", fix=f"One of {', '.join(known)}.")
        return to_text(part, module.replace(".", "_"))
