"""Measure: how long compute takes on this device, one distinct region at a time.

A region is run as it will be called, on made-up inputs: numbers between -1 and 1, zeros for integers. What it takes is
shared out over its nodes as the roofline would, and what is scheduled then has no regions of its own yet: every node
keeps its factor. Nodes that no region had (copies into buckets) get that of all together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from passes.errors import Error
from passes.regions import Region, regions
from shardc.lower import Lowering
from shardc.program import Pace, Program
from shardc.times import times_us
from shardc.topology import Topology

SECONDS = 0.05
"""that a region is run for, at least three times"""


def check_measurable(topology: Topology, backend: str) -> None:
    """Raises for a topology that does not say how fast its axes are, and for a backend that has no regions."""
    topology.computes  # noqa: B018 (it raises)
    if backend == "inductor-whole":
        raise Error(
            "backend='inductor-whole' compiles the graph with its collectives as one, of which no part can be measured",
            fix="measure=True with backend='inductor'",
        )


def measure(program: Program, lowering: Lowering) -> None:
    """Times the regions of the forward and the backward that have all hops, and has the program go by that. Where ranks
    measure different times, they go by the order of the first."""
    taken: dict[str, float] = {}
    for variant in program.step():
        graph = program.scheduled(program.draft(variant), variant.half)
        program.pace[variant.half] = _pace(graph, program, lowering, variant.half, taken)


def _pace(graph: fx.Graph, program: Program, lowering: Lowering, half: str, taken: dict[str, float]) -> Pace:
    us = times_us(graph, program.topology)
    expected_us = {node.name: us[node] for node in graph.nodes}
    of: dict[str, float] = {}
    all_expected_us = all_taken_us = 0.0
    for call in _calls(graph, lowering, half):
        region = call.target
        if region.key not in taken:
            lowering.progress(f"measuring {half}: {region.name}")
            taken[region.key] = _median_us(_callable(region, lowering), call)
        names = call.meta["nodes"]
        expected = sum(expected_us[name] for name in names)
        all_expected_us, all_taken_us = all_expected_us + expected, all_taken_us + taken[region.key]
        of |= dict.fromkeys(names, taken[region.key] / expected) if expected else {}
    return Pace(of, all_taken_us / all_expected_us if all_expected_us else 1.0)


def _calls(graph: fx.Graph, lowering: Lowering, half: str) -> Iterator[fx.Node]:
    outer = regions(graph) if lowering.backend == "eager" else lowering.outer(graph, half)
    return (node for node in outer.nodes if isinstance(node.target, Region))


def _callable(region: Region, lowering: Lowering) -> Callable[[list[Any]], Any]:
    if lowering.backend == "eager":
        return lambda inputs: region(*inputs)
    return lowering.compiled[region.key]


def _median_us(run: Callable[[list[Any]], Any], call: fx.Node) -> float:
    inputs = [_made_up(node.meta["val"]) for node in call.args]
    seconds: list[float] = []
    with torch.no_grad():
        run(list(inputs))
        _end()
        while len(seconds) < 3 or (sum(seconds) < SECONDS and len(seconds) < 100):
            began = time.perf_counter()
            run(list(inputs))
            _end()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def _end() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _made_up(value: Any) -> Any:
    """A tensor of the shape, strides, dtype and device of a fake one; of a symbol, what it was at first."""
    if isinstance(value, torch.SymInt):
        return int(value.node.hint)
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = ([_made_up(n) for n in ns] for ns in (value.shape, value.stride()))
    new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return new.uniform_(-1, 1) if value.is_floating_point() else new.zero_()
