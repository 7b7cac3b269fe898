"""Trial: how long compute takes, and what hops take of it, in steps that are really made.

Compute is pinned first: a small model goes forward and backward without hops, in 32 bits and in 16; what that takes,
its products take. Beside hops in flight it finds its caches cold, threads wake up at the wrong time, and each start
reads its code from memory again; of that, what is measured in a loop shows little. So the model is then trained under
a few plans. Three factors make what was foretold of their steps most like what these took: of what a hop takes of
compute, and of what it takes for each byte, through memory that ranks share and otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.errors import Error
from shardc.compile import compile
from shardc.gauge import Block, Say, slowed
from shardc.links import Link
from shardc.plan import Plan
from shardc.predict import predicted
from shardc.program import Program
from shardc.times import times_us
from shardc.topology import Topology
from shardc.trace import programs, trace


def _narrow(topology: Topology, dtype: torch.dtype | None = None) -> Plan:
    """With messages between hosts that take compute to make, and few bytes."""
    outer = topology.inner[-1][0]
    return Plan.zero3(topology, param_dtype=dtype, gather_wire={outer: "int8"}, reduce_wire={outer: "int4"})


RUNS = (
    (Plan.zero3, 1),
    (Plan.hsdp, 1),
    (partial(Plan.paro, letters="IIG"), 1),
    (partial(Plan.paro, letters="NIG"), 1),
    (partial(Plan.paro, letters="NIG"), 4),
    (_narrow, 1),
    (partial(_narrow, dtype=torch.bfloat16), 1),
)
"""Plans, and micro-batches: gathers that are relayed and some that are not, reductions and all-reduces, many bytes and
few, between hosts and inside of them."""
ALONE = ((None, "32"), (torch.bfloat16, "16"))
"""What compute is in, and the numbers of which products take longer then."""
LAYERS, DIM, HEADS, VOCAB, TOKENS = 2, 384, 8, 8192, 128
"""of a model that has half of its parameters in one matrix, as small language models do"""
ROWS = tuple(1 << i for i in range(8))
"""of a batch, the fewest that are enough"""
ALONE_ROWS = 2
"""the same, without hops"""
BUSY = 1.25
"""times as much as the busiest lane compute has to do: what holds it up is not hidden"""
WARMUP, STEPS, CALLS = 3, 8, 6
FACTORS = 3
FIRM = 0.08
"""A factor of 2 is as unlikely as a step that takes so much longer than foretold."""
LEAST = 0.5
"""that a factor may be"""


Run = tuple[Program, int, float]
"""A program, the micro-batches of its step, and the seconds that it took."""


def tried(topology: Topology, progress: Say = lambda text: None) -> Topology:
    """The topology with compute and factors as they were in training. All ranks call it together, with the same
    numbers; what it returns to the first one counts."""
    for dtype, bits in ALONE:
        progress(f"running a small model in {bits}-bit numbers, without hops")
        topology = _pinned(topology, bits, *_alone(Plan.ddp(topology, param_dtype=dtype)))
    runs = []
    for plan, micro_batches in _plans(topology):
        progress(f"training a small model, {micro_batches} micro-batches: {plan}")
        runs.append(_trained(plan, _rows(plan, micro_batches), micro_batches))
    if dist.get_rank() == 0 and runs:
        return _scaled(topology, _factors(topology, runs))
    return topology


def _alone(plan: Plan) -> tuple[Program, float]:
    """The program, and the seconds of a forward and a backward without hops, until all ranks have made them."""
    model = compile(_model(), plan, progress=lambda text: None)
    x, seconds = _batch(plan, ALONE_ROWS), []
    for _ in range(1 + STEPS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            with model.no_sync():
                model(x).square().mean().backward()
        dist.barrier()
        seconds.append((time.perf_counter() - began) / CALLS)
    return programs(model)[0], _slowest(seconds[1:])


def _pinned(topology: Topology, bits: str, program: Program, took_s: float) -> Topology:
    """With products of numbers of so many bits that make what is foretold what it took: the second micro-batch's calls,
    which add to sums and do not sync."""
    calls = [program.graph(variant) for variant in program.step(3)[2:4]]

    def scaled(factor: float) -> Topology:
        device = slowed(topology.computes, {bits: factor})
        return topology.with_links(device, **dict(topology.links)).with_flat(dict(topology.flat))

    once_s, twice_s = (sum(sum(times_us(it, scaled(f)).values()) for it in calls) / 1e6 for f in (1.0, 2.0))
    return scaled(max(LEAST, 1.0 + (took_s - once_s) / (twice_s - once_s)))


def _factors(topology: Topology, runs: Sequence[Run]) -> list[float]:
    """By least squares of what steps take longer than foretold, relative to what they take."""
    rows = []
    for program, micro_batches, took_s in runs:
        scaled = (_scaled(topology, twice) for twice in (1.0 + torch.eye(FACTORS)).tolist())
        once_s, *twice_s = (_foretold_s(program, micro_batches, it) for it in (topology, *scaled))
        rows.append([(s - once_s) / took_s for s in (*twice_s, took_s)])
    firm = [[FIRM * float(i == j) for j in range(FACTORS)] + [0.0] for i in range(FACTORS)]
    of = torch.tensor([*rows, *firm], dtype=torch.float64)
    return [max(LEAST, 1.0 + x) for x in torch.linalg.lstsq(of[:, :-1], of[:, -1:]).solution[:, 0].tolist()]


def _plans(topology: Topology) -> Iterator[tuple[Plan, int]]:
    """Those that are legal, with micro-batches, and no two that are alike, as where a mesh has one host."""
    seen = set()
    for make, micro_batches in RUNS:
        try:
            plan = make(topology)
        except Error:  # such as PaRO's on one axis
            continue
        alike = *map(topology.shared_by, plan.default), plan.gather_wire, plan.param_dtype, micro_batches
        if alike not in seen:
            seen.add(alike)
            yield plan, micro_batches


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(DIM, HEADS) for _ in range(LAYERS)), nn.Linear(DIM, VOCAB, bias=False))


def _batch(plan: Plan, rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, DIM, dtype=plan.param_dtype)


def _rows(plan: Plan, micro_batches: int) -> int:
    for rows in ROWS:
        found = predicted(trace(_model(), plan, _batch(plan, rows), keep=False), micro_batches)
        if found.compute_us > BUSY * max(found.lanes_us.values()):
            break
    return rows


def _trained(plan: Plan, rows: int, micro_batches: int) -> Run:
    """The seconds are from when the last rank was through with one step to when it was with the next."""
    model = compile(_model(), plan, progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, ends_s = _batch(plan, rows), []
    for _ in range(WARMUP + STEPS):
        for i in range(micro_batches):
            with nullcontext() if i == micro_batches - 1 else model.no_sync():
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
    steps_s = [end - begin for begin, end in pairwise(ends_s[WARMUP - 1 :])]
    return programs(model)[0], micro_batches, _slowest(steps_s)


def _slowest(seconds: Sequence[float]) -> float:
    """The median of what the slowest rank took each time; the same on all."""
    taken = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return median(taken.tolist())


def _foretold_s(program: Program, micro_batches: int, topology: Topology) -> float:
    """Of the same graphs."""
    there = replace(program, plan=replace(program.plan, topology=topology), pace={})
    return predicted(there, micro_batches).step_us / 1e6


def _scaled(topology: Topology, factors: Sequence[float]) -> Topology:
    links = {axis: _with_overheads(link, *factors) for axis, link in topology.links}
    flat = {axes: _with_overheads(link, *factors) for axes, link in topology.flat}
    return topology.with_links(topology.computes, **links).with_flat(flat)


def _with_overheads(link: Link, of_hop: float, of_near_byte: float, of_far_byte: float) -> Link:
    of_byte = of_near_byte if link.near else of_far_byte
    return replace(
        link,
        launch_us=of_hop * link.launch_us,
        gather_us_per_mb=of_byte * link.gather_us_per_mb,
        reduce_us_per_mb=of_byte * link.reduce_us_per_mb,
    )
