"""A program: one traced call of a model, compiled for one plan. Forward, backward and their variations.

Micro-batches need small variations of the same two graphs: a forward with or without `refresh`, a backward that adds to
accumulators or not, with or without `sync`. Each is made when it is first used; all forwards hand the backward the same
list of saved values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from passes.accumulate import accumulate
from passes.bucket import bucket
from passes.build import copy, outputs
from passes.errors import Error
from passes.excerpt import excerpt, needed
from passes.insert import Param
from passes.layout import Layout
from passes.order import Order, Orders, align, collective_order
from passes.refresh import refresh
from passes.regions import Region, regions
from passes.schedule import schedule
from passes.sync import sync
from passes.text import to_text
from passes.verify import verify
from shardc.capture import Captured
from shardc.runner import Runner
from shardc.times import times_us
from shardc.topology import Topology


@dataclass(eq=False)
class Program:
    """`forward` and `backward` are the graphs of a micro-batch that neither refreshes nor syncs (`backward` is None
    when nothing is trained); `refreshed` and `variation` make the others."""

    captured: Captured
    params: dict[str, Param]
    """by placeholder name"""
    names: tuple[str, ...]
    """of all the model's parameters, in the order in which it registers them"""
    topology: Topology
    halves: tuple[fx.Graph, fx.Graph | None]
    """forward and backward as they were partitioned; every variation starts from a copy of one"""
    run: Runner
    orders: Orders = field(default_factory=Orders)
    """what the ranks agreed on"""
    made: dict[tuple[object, ...], fx.Graph] = field(default_factory=dict)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """By placeholder name."""
        return {name: param.layout for name, param in self.params.items()}

    @property
    def forward(self) -> fx.Graph:
        return self._once(("forward",), lambda: self._finish("forward", copy(self.halves[0])))

    @property
    def backward(self) -> fx.Graph | None:
        half = self.halves[1]
        return None if half is None else self._once(("backward",), lambda: self._finish("backward", copy(half)))

    def refreshed(self, stale: Collection[str] | None = None) -> fx.Graph:
        """The forward that first makes new compute copies of the parameters `stale` (all by default)."""
        names = {n for n, p in self.params.items() if p.has_copy and (stale is None or p.layout.name in stale)}
        return self._once(("refreshed", *sorted(names)), lambda: self._refreshed(names)) if names else self.forward

    def _refreshed(self, names: set[str]) -> fx.Graph:
        graph = self._finish("forward", self.run("refresh", refresh, copy(self.halves[0]), self.params, names))
        self.run("verify", verify, self.layouts, forward=graph)
        return graph

    def variation(self, *, synced: bool, accumulated: Mapping[str, Param] | None = None) -> fx.Graph:
        """The backward that adds to the accumulators `accumulated` (by placeholder name; by default to those of all
        parameters that it has gradients for) and, if `synced`, brings the sums to the optim rung."""
        if self.halves[1] is None:
            raise Error("This program has no backward: nothing in it is trained.")
        if accumulated is None:
            accumulated = {n: p for n, p in self.params.items() if p.needs_sync and p.layout.trainable}
        half = self.halves[1]
        return self._once((synced, *accumulated), lambda: self._variation(half, synced, accumulated))

    def _variation(self, half: fx.Graph, synced: bool, accumulated: Mapping[str, Param]) -> fx.Graph:
        graph = self.run("accumulate", accumulate, copy(half), accumulated) if accumulated else copy(half)
        everyone = {p.layout.name: p for p in (*self.params.values(), *accumulated.values())}
        graph = self._finish("backward", self.run("sync", sync, graph, everyone) if synced else graph)
        layouts = {n: p.layout for n, p in accumulated.items()} | self.layouts
        self.run("verify", verify, layouts, forward=self.forward, backward=graph, synced=synced)
        return graph

    def _finish(self, half: str, graph: fx.Graph) -> fx.Graph:
        """Bucketed, scheduled, and in the order that the ranks agreed on; where they have none yet, they do now."""
        order = self.orders.find(half, graph)
        if order is None:
            own = self._scheduled(copy(graph))
            order = self.orders.decide(half, collective_order(own))
            if order == collective_order(own):
                return own
        return align(self._scheduled(graph, order), order)

    def _scheduled(self, graph: fx.Graph, order: Order | None = None) -> fx.Graph:
        graph = self.run("bucket", bucket, graph, self.names, order)
        us = times_us(graph, self.topology).__getitem__ if self.topology.links else None
        return self.run("schedule", schedule, graph, us)

    def _once(self, key: tuple[object, ...], make: Callable[[], fx.Graph]) -> fx.Graph:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def settle(self) -> None:
        """Has all ranks agree on the orders of this program, unless an earlier program's cover it: makes the variations
        that have all hops; the others follow these. All ranks call it together."""
        forward, backward = self.halves
        if self.orders.find("forward", forward) is None:
            self.refreshed()
        if backward is not None and self.orders.find("backward", backward) is None:
            self.variation(synced=True, accumulated={})

    def after(self, stage: str) -> tuple[fx.Graph, ...]:
        """The graphs as they stood after a stage: one joint graph after `capture`, `decompose` and `insert`; forward
        and backward after `partition`, `bucket`, `schedule` and `regions`."""
        if stage == "bucket":
            return tuple(bucket(copy(half), self.names) for half in self.halves if half is not None)
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
