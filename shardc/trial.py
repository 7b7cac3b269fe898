"""Trial: what hops take of compute in steps that are really made, beyond what they take one by one.

Beside hops in flight compute finds its caches cold, threads wake up at the wrong time, and each start reads its code
from memory again; of that, a collective that is measured in a loop shows little. So a small model is trained under a
few plans, and what its steps take longer than foretold goes to what hops take of compute, by one factor for all links.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.errors import Error
from shardc.compile import compile
from shardc.gauge import Block, Say
from shardc.links import Link
from shardc.plan import Plan
from shardc.predict import predicted
from shardc.program import Program
from shardc.topology import Topology
from shardc.trace import programs, trace

PLANS = (Plan.zero3, Plan.hsdp, partial(Plan.paro, letters="IIG"), partial(Plan.paro, letters="NIG"))
"""Gathers that are relayed and some that are not, reductions and all-reduces."""
LAYERS, DIM, HEADS, VOCAB, TOKENS = 2, 384, 8, 8192, 128
"""of a model that has half of its parameters in one matrix, as small language models do"""
ROWS = tuple(1 << i for i in range(8))
"""of a batch, the fewest that are enough"""
BUSY = 1.25
"""times as much as the busiest lane compute has to do: what holds it up is not hidden"""
WARMUP, STEPS = 3, 8


def tried(topology: Topology, progress: Say = lambda text: None) -> Topology:
    """The topology with what hops take of compute as it was in training. All ranks call it together, with the same
    numbers."""
    longer_s = twice_s = 0.0
    for plan in _plans(topology):
        progress(f"training a small model: {plan}")
        program, took_s = _trained(plan, _rows(plan))
        once_s = _foretold_s(program, topology)
        longer_s += took_s - once_s
        twice_s += _foretold_s(program, _scaled(topology, 2.0)) - once_s
    return _scaled(topology, max(0.0, 1.0 + longer_s / twice_s)) if twice_s > 0 else topology


def _plans(topology: Topology) -> Iterator[Plan]:
    """Those that are legal, and no two that shard alike, as where a mesh has one host."""
    seen = set()
    for make in PLANS:
        try:
            plan = make(topology)
        except Error:  # such as PaRO's on one axis
            continue
        factors = tuple(topology.shared_by(rung) for rung in plan.default)
        if factors not in seen:
            seen.add(factors)
            yield plan


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(DIM, HEADS) for _ in range(LAYERS)), nn.Linear(DIM, VOCAB, bias=False))


def _batch(rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, DIM)


def _rows(plan: Plan) -> int:
    for rows in ROWS:
        found = predicted(trace(_model(), plan, _batch(rows), keep=False), 1)
        if found.compute_us > BUSY * max(found.lanes_us.values()):
            break
    return rows


def _trained(plan: Plan, rows: int) -> tuple[Program, float]:
    """Its program, and the seconds from when the last rank was through with one step to when it was with the next."""
    model = compile(_model(), plan, progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, ends_s = _batch(rows), []
    for _ in range(WARMUP + STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
    steps_s = torch.tensor([end - begin for begin, end in pairwise(ends_s[WARMUP - 1 :])], dtype=torch.float64)
    dist.all_reduce(steps_s, dist.ReduceOp.MAX)
    return programs(model)[0], median(steps_s.tolist())


def _foretold_s(program: Program, topology: Topology) -> float:
    """Of the same graphs."""
    return predicted(replace(program, plan=replace(program.plan, topology=topology), pace={}), 1).step_us / 1e6


def _scaled(topology: Topology, factor: float) -> Topology:
    links = {axis: _with_overheads(link, factor) for axis, link in topology.links}
    flat = {axes: _with_overheads(link, factor) for axes, link in topology.flat}
    return topology.with_links(topology.computes, **links).with_flat(flat)


def _with_overheads(link: Link, factor: float) -> Link:
    return replace(
        link,
        launch_us=factor * link.launch_us,
        gather_us_per_mb=factor * link.gather_us_per_mb,
        reduce_us_per_mb=factor * link.reduce_us_per_mb,
    )
