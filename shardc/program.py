"""A program: one traced call of a model, compiled for one plan. Forward, backward and their variations.

Micro-batches need small variations of the same two graphs: a forward with or without `refresh`, a backward that adds to
accumulators or not, with or without `sync`. Each is made when it is first used; all forwards hand the backward the same
list of saved values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes.accumulate import accumulate
from passes.build import copy
from passes.insert import Param
from passes.refresh import refresh
from passes.sync import sync
from passes.text import to_text
from shardc.capture import Captured

STAGES = ("capture", "decompose", "insert", "partition")


@dataclass
class Program:
    """`forward` and `backward` are the graphs of a micro-batch that neither refreshes nor syncs (`backward` is None when
    nothing is trained); see `refreshed`, `variation` for the others."""

    captured: Captured
    params: dict[str, Param]
    """by placeholder name"""
    forward: fx.Graph
    backward: fx.Graph | None
    stages: dict[str, tuple[fx.Graph, ...]] = field(default_factory=dict)
    """graphs as they stood after each stage, where they were kept"""
    check: Callable[..., None] = lambda *args, **kwargs: None

    @property
    def by_name(self) -> dict[str, Param]:
        return {param.layout.name: param for param in self.params.values()}

    def refreshed(self, stale: Collection[str] | None = None) -> fx.Graph:
        """The forward that first makes new compute copies of the parameters `stale` (names; all by default)."""
        names = {n for n, p in self.params.items() if p.has_copy and (stale is None or p.layout.name in stale)}
        return refresh(copy(self.forward), self.params, names)

    def variation(self, *, synced: bool, accumulated: Mapping[str, Param] | None = None) -> fx.Graph:
        """The backward that adds to accumulators of the parameters `accumulated` (by placeholder-like name; by default of
        those that have one) and, if `synced`, brings the gradients to the optim rung."""
        assert self.backward is not None, "a program without a backward has no variations of it"
        if accumulated is None:
            accumulated = self.params
        graph = copy(self.backward)
        graph = accumulate(graph, accumulated) if accumulated else graph
        everyone = {**self.by_name, **{p.layout.name: p for p in accumulated.values()}}
        return sync(graph, everyone) if synced else graph

    def after(self, stage: str) -> tuple[fx.Graph, ...]:
        """The graphs as they stood after a stage: one joint graph up to `insert`, then forward and backward."""
        if stage not in self.stages:
            known = ", ".join(self.stages) or "none"
            raise KeyError(f"no graph was kept after stage {stage!r} (kept: {known})")
        return self.stages[stage]

    def text(self) -> str:
        """Forward and backward as text."""
        parts = [to_text(self.forward, "forward")]
        if self.backward is not None:
            parts.append(to_text(self.backward, "backward"))
        return "\n".join(parts)
