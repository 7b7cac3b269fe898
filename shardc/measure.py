"""Measure: how long compute takes on this device, one distinct region at a time.

A region is run as it will be called, on made-up inputs: numbers between -1 and 1, zeros for integers. In between memory
elsewhere is written to, so that it finds none of its inputs in a cache. What it takes, less its copies into and out of
buckets, is shared out over its nodes as the roofline would. What is scheduled then has other buckets and other regions:
a node keeps its time, and copies take as many times longer than the roofline says as a large copy does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
    check_parts(backend, "measure=True")


def check_parts(backend: str, wanted: str) -> None:
    """Raises for a backend that has no regions."""
    if backend == "inductor-whole":
        raise Error(
            "backend='inductor-whole' compiles the graph with its collectives as one, of which no part can be measured",
            where=wanted,
            fix=f"{wanted} with backend='inductor'",
        )


def measure(program: Program, lowering: Lowering) -> None:
    """Times the regions of the forward and the backward that have all hops, and has the program go by that. Where ranks
    measure different times, they go by the order of the first."""
    taken: dict[str, float] = {}
    copies = _copying(program)
    for variant in program.step():
        draft = program.draft(variant)
        drafted_us = {node.name: us for node, us in times_us(draft, program.topology).items()}
        graph = program.scheduled(draft, variant)
        expected_us = {node.name: us for node, us in times_us(graph, program.topology).items()}
        us: dict[str, float] = {}
        for call in _calls(graph, lowering, variant.half):
            if call.target.key not in taken:
                lowering.progress(f"measuring {variant.half}: {call.target.name}")
                taken[call.target.key] = _region_us(call, lowering)
            own = {name: drafted_us[name] for name in call.meta["nodes"] if name in drafted_us}
            copied_us = copies * sum(expected_us[name] for name in call.meta["nodes"] if name not in own)
            left_us, own_us = max(0.0, taken[call.target.key] - copied_us), sum(own.values())
            us |= {name: left_us * (t / own_us if own_us else 1 / len(own)) for name, t in own.items()}
        program.pace[variant.half] = Pace(us, copies)


COPIED_BYTES = 1 << 26
"""more than caches hold"""


def _copying(program: Program) -> float:
    """How many times longer a large copy takes than the roofline says."""
    device, computes = next(n.meta["val"].device for n in program.halves[0].nodes), program.topology.computes
    value = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    taken_us = _median_us(lambda inputs: inputs[0].copy_(value), [torch.zeros_like(value)])
    return taken_us / computes.memory_us(2 * COPIED_BYTES)


def _calls(graph: fx.Graph, lowering: Lowering, half: str) -> Iterator[fx.Node]:
    outer = regions(graph) if lowering.backend == "eager" else lowering.outer(graph, half)
    return (node for node in outer.nodes if isinstance(node.target, Region))


def _region_us(call: fx.Node, lowering: Lowering) -> float:
    region, inputs = call.target, [_made_up(node.meta["val"]) for node in call.args]
    if lowering.backend == "eager":
        return _median_us(lambda x: region(*x), inputs)
    return _median_us(lowering.compiled[region.key], inputs, region.taken)


def _median_us(run: Callable[[list[Any]], Any], inputs: list[Any], taken: Sequence[int] = ()) -> float:
    """taken: inputs that it may write over."""
    seconds: list[float] = []
    kept = {i: inputs[i].clone() for i in taken}
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), None)
    elsewhere = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    with torch.no_grad():
        run(list(inputs))
        _end()
        while len(seconds) < 3 or (sum(seconds) < SECONDS and len(seconds) < 100):
            for i, value in kept.items():
                inputs[i].copy_(value)
            elsewhere.zero_()
            _end()
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
