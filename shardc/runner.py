"""Runner: what happens around every stage and is in none of them. Progress, time, the laws, and copies for who wants
to look."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from passes.build import copy
from shardc.capture import Captured

_KEPT = ("capture", "decompose", "insert", "partition")


@dataclass
class Runner:
    """`run("insert", insert, graph, params)` runs one stage."""

    progress: Callable[[str], None] = lambda stage: None
    keep: bool = False
    """keep a copy of the graphs after each stage that makes the program (not of its variations)"""
    kept: dict[str, tuple[fx.Graph, ...]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """time spent in each stage so far; the checks are a stage of their own"""

    def __call__(self, stage: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.progress(stage)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
        if self.keep and stage in _KEPT:
            self.kept[stage] = tuple(copy(graph) for graph in _graphs(result))
        return result


def _graphs(result: Any) -> list[fx.Graph]:
    if isinstance(result, Captured):
        return [result.graph]
    return [g for g in (result if isinstance(result, tuple) else (result,)) if isinstance(g, fx.Graph)]
