"""A program: one traced call of a model, compiled for one plan. Forward, backward and their variations.

Micro-batches need small variations of the same two graphs: a forward with or without `refresh`, a backward that adds to
accumulators or not, with or without `sync`. Each is made when it is first used; all forwards hand the backward the same
list of saved values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from passes.accumulate import accumulate
from passes.build import copy
from passes.errors import Error
from passes.insert import Param
from passes.layout import Layout
from passes.refresh import refresh
from passes.schedule import schedule
from passes.sync import sync
from passes.text import to_text
from passes.verify import verify
from shardc.capture import Captured
from shardc.runner import Runner


@dataclass(eq=False)
class Program:
    """`forward` and `backward` are the graphs of a micro-batch that neither refreshes nor syncs (`backward` is None when
    nothing is trained); `refreshed` and `variation` make the others."""

    captured: Captured
    params: dict[str, Param]
    """by placeholder name"""
    halves: tuple[fx.Graph, fx.Graph | None]
    """forward and backward as they were partitioned; every variation starts from a copy of one"""
    run: Runner

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """By placeholder name."""
        return {name: param.layout for name, param in self.params.items()}

    @cached_property
    def forward(self) -> fx.Graph:
        return self._finish(copy(self.halves[0]))

    @cached_property
    def backward(self) -> fx.Graph | None:
        return None if self.halves[1] is None else self._finish(copy(self.halves[1]))

    def refreshed(self, stale: Collection[str] | None = None) -> fx.Graph:
        """The forward that first makes new compute copies of the parameters `stale` (all by default)."""
        names = {n for n, p in self.params.items() if p.has_copy and (stale is None or p.layout.name in stale)}
        graph = self._finish(self.run("refresh", refresh, copy(self.halves[0]), self.params, names))
        self.run("verify", verify, self.layouts, forward=graph)
        return graph

    def variation(self, *, synced: bool, accumulated: Mapping[str, Param] | None = None) -> fx.Graph:
        """The backward that adds to the accumulators `accumulated` (by placeholder name; by default to those of all parameters that
        it has gradients for) and, if `synced`, brings the sums to the optim rung."""
        half = self.halves[1]
        if half is None:
            raise Error("This program has no backward: nothing in it is trained.")
        if accumulated is None:
            accumulated = {n: p for n, p in self.params.items() if p.needs_sync and p.layout.trainable}
        graph = self.run("accumulate", accumulate, copy(half), accumulated) if accumulated else copy(half)
        everyone = {p.layout.name: p for p in (*self.params.values(), *accumulated.values())}
        graph = self._finish(self.run("sync", sync, graph, everyone) if synced else graph)
        layouts = {n: p.layout for n, p in accumulated.items()} | self.layouts
        self.run("verify", verify, layouts, forward=self.forward, backward=graph, synced=synced)
        return graph

    def _finish(self, graph: fx.Graph) -> fx.Graph:
        return self.run("schedule", schedule, graph)

    def after(self, stage: str) -> tuple[fx.Graph, ...]:
        """The graphs as they stood after a stage: one joint graph up to `insert`, then forward and backward."""
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
