"""Trial: what hops and copies take of compute in steps that are really made, beyond what they take one by one.

Beside hops in flight compute finds its caches cold, threads wake up at the wrong time, each start reads its code from
memory again, and what was just made room for is written for the first time; of that, what is measured in a loop shows
little. So a small model is trained under a few plans. Three factors make what was foretold of their steps most like
what these took: of what a hop takes of compute, of what it takes for each byte, and of reading and writing memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from shardc.links import Device, Link
from shardc.plan import Plan
from shardc.predict import predicted
from shardc.program import Program
from shardc.topology import Topology
from shardc.trace import programs, trace


def _narrow(topology: Topology, dtype: torch.dtype | None = None) -> Plan:
    """With messages between hosts that take compute to make, and few bytes."""
    outer = topology.inner[-1][0]
    return Plan.zero3(topology, param_dtype=dtype, gather_wire={outer: "int8"}, reduce_wire={outer: "int4"})


PLANS = (
    Plan.zero3,
    Plan.hsdp,
    partial(Plan.paro, letters="IIG"),
    partial(Plan.paro, letters="NIG"),
    _narrow,
    partial(_narrow, dtype=torch.bfloat16),
)
"""Gathers that are relayed and some that are not, reductions and all-reduces, many bytes and few."""
LAYERS, DIM, HEADS, VOCAB, TOKENS = 2, 384, 8, 8192, 128
"""of a model that has half of its parameters in one matrix, as small language models do"""
ROWS = tuple(1 << i for i in range(8))
"""of a batch, the fewest that are enough"""
BUSY = 1.25
"""times as much as the busiest lane compute has to do: what holds it up is not hidden"""
WARMUP, STEPS = 3, 8
FACTORS = 3
FIRM = 0.08
"""A factor of 2 is as unlikely as a step that takes so much longer than foretold."""
LEAST = 0.5
"""that a factor may be"""


def tried(topology: Topology, progress: Say = lambda text: None) -> Topology:
    """The topology with factors as they were in training. All ranks call it together, with the same numbers; what it
    returns to the first one counts."""
    runs = []
    for plan in _plans(topology):
        progress(f"training a small model: {plan}")
        runs.append(_trained(plan, _rows(plan)))
    if dist.get_rank() == 0 and runs:
        return _scaled(topology, _factors(topology, runs))
    return topology


def _factors(topology: Topology, runs: Sequence[tuple[Program, float]]) -> list[float]:
    """By least squares of what steps take longer than foretold, relative to what they take."""
    rows = []
    for program, took_s in runs:
        once_s = _foretold_s(program, topology)
        twice_s = [_foretold_s(program, _scaled(topology, twice)) for twice in (1.0 + torch.eye(FACTORS)).tolist()]
        rows.append([(s - once_s) / took_s for s in (*twice_s, took_s)])
    firm = [[FIRM * float(i == j) for j in range(FACTORS)] + [0.0] for i in range(FACTORS)]
    of = torch.tensor([*rows, *firm], dtype=torch.float64)
    return [max(LEAST, 1.0 + x) for x in torch.linalg.lstsq(of[:, :-1], of[:, -1:]).solution[:, 0].tolist()]


def _plans(topology: Topology) -> Iterator[Plan]:
    """Those that are legal, and no two that are alike, as where a mesh has one host."""
    seen = set()
    for make in PLANS:
        try:
            plan = make(topology)
        except Error:  # such as PaRO's on one axis
            continue
        alike = *map(topology.shared_by, plan.default), plan.gather_wire, plan.param_dtype
        if alike not in seen:
            seen.add(alike)
            yield plan


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(DIM, HEADS) for _ in range(LAYERS)), nn.Linear(DIM, VOCAB, bias=False))


def _batch(plan: Plan, rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, DIM, dtype=plan.param_dtype)


def _rows(plan: Plan) -> int:
    for rows in ROWS:
        found = predicted(trace(_model(), plan, _batch(plan, rows), keep=False), 1)
        if found.compute_us > BUSY * max(found.lanes_us.values()):
            break
    return rows


def _trained(plan: Plan, rows: int) -> tuple[Program, float]:
    """Its program, and the seconds from when the last rank was through with one step to when it was with the next."""
    model = compile(_model(), plan, progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, ends_s = _batch(plan, rows), []
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


def _scaled(topology: Topology, factors: Sequence[float]) -> Topology:
    of_hop, of_byte, of_memory = factors
    links = {axis: _with_overheads(link, of_hop, of_byte) for axis, link in topology.links}
    flat = {axes: _with_overheads(link, of_hop, of_byte) for axes, link in topology.flat}
    return topology.with_links(_with_memory(topology.computes, of_memory), **links).with_flat(flat)


def _with_overheads(link: Link, of_hop: float, of_byte: float) -> Link:
    return replace(
        link,
        launch_us=of_hop * link.launch_us,
        gather_us_per_mb=of_byte * link.gather_us_per_mb,
        reduce_us_per_mb=of_byte * link.reduce_us_per_mb,
    )


def _with_memory(device: Device, factor: float) -> Device:
    slower = tuple((moved_bytes, factor * us) for moved_bytes, us in device.tables["memory"])
    return replace(device, memory_gb_per_s=device.memory_gb_per_s / factor, tables={**device.tables, "memory": slower})
