"""Calibrate: how fast the axes of the running job and its devices are, measured.

    torchrun --nproc-per-node 4 -m shardc calibrate --out links.json

Every axis, and all neighbouring ones together, are measured while all the groups along them are busy, which is how a
step uses them. Of each kind of collective the time of a few sizes goes into a table; latency and bandwidth are fitted
to the gathers and reduce-scatters, for sizes between and beyond. What computes is measured too (`gauge.py`). On CPUs a
collective takes some of the time of those that compute: to be issued and waited for, and for each byte. Where ranks
share cores, a library's own threads take some, too; where they do not, products lose some to whatever moves bytes. That
is measured for one collective of a kind at a time, and set right in whole steps (`trial.py`).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from passes import ops
from passes.errors import Error
from shardc.gauge import BATCHES, Say, end, gauged, rising
from shardc.heap import keep_freed
from shardc.lanes import Lane, lane_of
from shardc.links import Link, Table, ring_steps
from shardc.near import near
from shardc.topology import Topology
from shardc.trial import of_rank_0, tried

KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
SIZES = tuple(1 << n for n in range(12, 27, 2))
"""Bytes of the full value of a collective."""
SECONDS = 0.25
"""for which a collective of one size is repeated; a size that takes longer is the last"""


def calibrate(
    topology: Topology | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    out: str | Path | None = None,
    progress: Say = lambda text: None,
) -> Topology:
    """The topology of the running job with measured links and device; the same on all ranks, which call it together.

    topology: its shape (default: from the launcher). sizes: bytes of the full values that are moved. out: a JSON file
    that `Topology.load` reads, written by rank 0. Raises `Error` without a process group, and where the job is not of
    that shape.
    """
    topology = one_by_one(Topology.from_torchrun() if topology is None else topology, sizes, progress)
    if topology.computes.library and topology.world > 1:
        topology = tried(topology, partial(_overheads_again, progress=progress), progress)
    if out is not None and dist.get_rank() == 0:
        topology.save(out)
    return topology


def one_by_one(topology: Topology, sizes: Sequence[int], progress: Say = lambda text: None) -> Topology:
    """Each link, and the device, while nothing else goes on. It raises, and is called, as `calibrate`."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in _backend() else torch.device("cpu")
    if device.type == "cpu":
        keep_freed()
    groups = _groups(topology, device)
    links = {axes: _measured(group, sizes, device, progress) for axes, group in groups.items()}
    flat = {axes: links.pop(axes) for axes in topology.neighbours()}
    return of_rank_0(topology.with_links(gauged(device, progress), **links).with_flat(flat))


def _groups(topology: Topology, device: torch.device) -> dict[str, Any]:
    """Of each axis, and of neighbouring ones."""
    mesh = topology.mesh(device.type)
    groups = {axis: mesh.get_group(axis) for axis, _ in topology.inner}
    return groups | {axes: topology.flat_group(axes) for axes in topology.neighbours()}


def _backend() -> str:
    if not dist.is_initialized():
        raise Error(
            "the process group is not initialised",
            fix="torch.distributed.init_process_group(...) before, under torchrun; or python -m shardc calibrate",
        )
    return dist.get_backend()


def _measured(group: Any, sizes: Sequence[int], device: torch.device, progress: Say) -> Link:
    """Of a group of one rank nothing is."""
    size = group.size()
    tables = {kind: _table(kind, group, size, sizes, device, progress) for kind in KINDS} if size > 1 else {}
    link = fitted(tables, size)
    if device.type == "cuda" or size == 1:
        return link
    return with_overhead(replace(link, near=near(group).arena is not None), group, progress)


def _table(kind: str, group: Any, size: int, sizes: Sequence[int], device: torch.device, progress: Say) -> Table:
    """(bytes that one rank sends, microseconds), rising."""
    points: list[tuple[int, float]] = []
    for full_bytes in sorted(sizes):
        rounds = 2 if kind == "all_reduce" else 1
        progress(f"measuring {kind} of {full_bytes:,} bytes over {size} ranks")
        us = slowest(_timed_us(_collective(kind, group, size, full_bytes, device), device), device)
        points.append((rounds * full_bytes * (size - 1) // size, us))
        if us > SECONDS * 1e6:
            break
    return rising(points)


def _collective(kind: str, group: Any, size: int, full_bytes: int, device: torch.device) -> Callable[[], Any]:
    """As a step does it, all-reduces in place."""
    full = torch.zeros(max(size, full_bytes // 4 // size * size), device=device)
    x = full[: len(full) // size].clone() if kind == "all_gather" else full
    lane, hop = lane_of(group.group_name), ops.Hop(kind, "", size, "gather", ("",), again=False)
    return lambda: lane.start(hop, x, in_place=kind == "all_reduce").wait()


def _timed_us(call: Callable[[], Any], device: torch.device) -> float:
    """Of one of many calls in a row, for links may be faster for a moment; median of batches, which all ranks begin
    together."""
    _once_us(call, device)
    once_us = slowest(_once_us(call, device), device)
    count = max(1, min(16, int(SECONDS * 1e6 / BATCHES / max(1.0, once_us))))

    def batch() -> None:
        for _ in range(count):
            call()

    return median(_once_us(batch, device) for _ in range(BATCHES)) / count


def _once_us(call: Callable[[], Any], device: torch.device) -> float:
    dist.barrier()
    end(device)
    began = time.perf_counter()
    call()
    end(device)
    return (time.perf_counter() - began) * 1e6


def slowest(us: float, device: torch.device) -> float:
    """Of all ranks."""
    value = torch.tensor(us, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def fitted(tables: Mapping[str, Table], size: int) -> Link:
    """A link with tables, and the latency and bandwidth that fit them best, each point by its own size.

    Least squares of t = steps * latency + sent / bandwidth, relative to t. A group of one rank has no tables: its link
    takes no time.
    """
    points = [
        (ring_steps(kind, size) / us, sent / us)
        for kind in ("all_gather", "reduce_scatter")
        for sent, us in tables.get(kind, ())
    ]
    if not points:
        return Link(1e6, 0.0)
    rows = torch.tensor(points, dtype=torch.float64)
    latency_us, us_per_byte = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0]
    if latency_us < 0:
        latency_us, us_per_byte = torch.tensor(0.0), 1 / rows[:, 1].median()
    floor = min(us / sent for table in tables.values() for sent, us in table) / 2
    return Link(1 / max(float(us_per_byte), floor) / 1e3, float(latency_us), tables)


# What collectives take of compute

ROUNDS = 30
"""of which the median counts"""
TINY = 256
"""values that each rank sends, to measure what does not depend on bytes"""
OVER_US = 1e4
"""after so long they have come"""
LONG_US, LARGE = 1e5, 2 << 20
"""No collective takes longer or sends more, of those whose bytes are counted: as buckets are."""
COLD = 64 << 20
"""bytes that are sent before the same ones are sent again: no cache holds what a step sends either"""
OWN = 0.9
"""of a core: what has so much of one shares it with nobody"""


def with_overhead(link: Link, group: Any, progress: Say = lambda text: None) -> Link:
    """With what a collective of a group of CPUs takes of compute: a small one, and large ones for each byte. On a GPU
    it is nothing: the thread that issues it is ahead of what computes."""
    progress(f"measuring how long a collective over {group.size()} ranks takes to issue")
    issued_us = launch_us(group)
    found = {}
    for kind in ("all_gather", "reduce_scatter"):
        table = link.tables[kind]
        sent_bytes, us = max((it for it in table if it[0] <= LARGE and it[1] <= LONG_US), default=table[0])
        progress(f"measuring what {kind} of {sent_bytes:,} bytes takes of compute")
        piece = max(1, sent_bytes // 4 // (group.size() - 1))
        taken_us = _overhead_us(group, kind, piece, OVER_US + 2 * us)
        found[kind] = max(0.0, (taken_us - issued_us) / sent_bytes * 1e6)
    return replace(
        link, launch_us=issued_us, gather_us_per_mb=found["all_gather"], reduce_us_per_mb=found["reduce_scatter"]
    )


def _overheads_again(topology: Topology, progress: Say) -> dict[str, Link]:
    """Of each axis, and of neighbouring ones: its link with what collectives take of compute now. All ranks call it
    together."""
    groups, links = _groups(topology, torch.device("cpu")), topology.links + topology.flat
    return {axes: with_overhead(link, groups[axes], progress) for axes, link in links if groups[axes].size() > 1}


def launch_us(group: Any) -> float:
    """What a collective of a group of CPUs takes of compute, as small as it may be. All ranks call it together."""
    return _overhead_us(group, "all_gather", TINY, OVER_US, threads=False)


def _overhead_us(group: Any, kind: str, piece: int, us: float, threads: bool = True) -> float:
    """Of a collective that sends each rank a piece of so many values, and is under way for less than so long, as ranks
    have it on average. Matrix products before and meanwhile leave caches as a step does. `threads`: with those of a
    library; what these do for one small collective, mostly waking up, is lost in what else they do."""
    lane, a = lane_of(group.group_name), torch.randn(256, 256)
    values = piece if kind == "all_gather" else piece * group.size()
    sources = torch.zeros(min(ROUNDS, -(-COLD // (4 * values))), values)
    hop = ops.Hop(kind, "", group.size(), "gather" if kind == "all_gather" else "reduce", ("",), again=False)
    taken = [_taken_us(lane, hop, x, a, us, threads) for x in islice(cycle(sources), ROUNDS)]
    found = torch.tensor(median(taken), dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def _taken_us(lane: Lane, hop: ops.Hop, x: torch.Tensor, a: torch.Tensor, us: float, threads: bool) -> float:
    """On the clock of this thread, which stands still while others have its core; what products meanwhile get of that
    core says how much longer it takes. Beside that, where ranks share cores, what other threads have of these; on a
    core of its own, what products lose, to whatever it is."""
    before = _multiplied(a, us)
    began, all_began = time.thread_time_ns(), time.process_time_ns()
    flying = lane.start(hop, x)
    issued = time.thread_time_ns()
    beside = _multiplied(a, us)
    over = time.thread_time_ns()
    flying.wait()
    ended, all_ended = time.thread_time_ns(), time.process_time_ns()
    took_ns = (issued - began + ended - over) / beside.share
    if threads and beside.share < OWN:
        took_ns += (all_ended - all_began - (ended - began)) / beside.share
    elif threads:
        took_ns += beside.wall_ns - beside.made * before.wall_ns / before.made
    return took_ns / 1e3


class Products(NamedTuple):
    """Of matrices, one after the other."""

    made: int
    thread_ns: int
    wall_ns: int

    @property
    def share(self) -> float:
        """Of a core."""
        return self.thread_ns / self.wall_ns


def _multiplied(a: torch.Tensor, us: float) -> Products:
    """For so long."""
    began, clock, count = time.thread_time_ns(), time.perf_counter_ns(), 0
    while time.perf_counter_ns() < clock + us * 1e3:
        a @ a
        count += 1
    return Products(count, time.thread_time_ns() - began, time.perf_counter_ns() - clock)


# The command


def add_to(commands: Any) -> None:
    command = commands.add_parser("calibrate", help="measure the links and the devices of a job, under torchrun")
    command.add_argument("--out", default="topology.json", help="the topology as JSON, for Plan and --topology")
    command.add_argument("--axes", help='"node=2,gpu=4", outermost first (default: hosts and their ranks)')
    command.set_defaults(run=run)


def run(options: Any) -> None:
    """Under torchrun or srun, on all ranks."""
    topology = _spelled(options.axes) if options.axes else Topology.from_torchrun()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        first = dist.get_rank() == 0
        measured = calibrate(topology, out=options.out, progress=_say if first else lambda text: None)
        if first:
            print(summary(measured))
            print(f"written to {options.out}")
    finally:
        dist.destroy_process_group()


def _spelled(axes: str) -> Topology:
    try:
        return Topology(**{name: int(size) for name, size in (pair.split("=") for pair in axes.split(","))})
    except ValueError as error:
        raise Error(f"--axes {axes!r} does not read", fix="--axes node=2,gpu=4, outermost first") from error


def _say(text: str) -> None:
    print(f"shardc: {text}", file=sys.stderr, flush=True)


def summary(topology: Topology) -> str:
    """A line an axis, or several together, and the device."""
    device = topology.computes
    lines = [f"{'axis':<8} {'ranks':>6} {'GB/s a rank':>12} {'latency us':>11} {'launch us':>10} {'and a MB':>13}"]
    links = {axis: topology.link(axis) for axis, _ in topology.inner} | dict(topology.flat)
    for axis, link in links.items():
        size = topology.group_size(axis)
        lines.append(
            f"{axis:<8} {size:>6} {link.gb_per_s:>12.3f} {link.latency_us:>11.1f} "
            f"{link.launch_us:>10.0f} {link.gather_us_per_mb:>6.0f}/{link.reduce_us_per_mb:<6.0f}"
        )
    lines.append(
        f"{device.name}: {device.tflops:.2g} TFLOP/s in bf16, {device.tflops / device.slower_fp32:.2g} in fp32; "
        f"copies at {device.memory_gb_per_s:.0f} GB/s; {device.memory_gb:.1f} GB"
    )
    return "\n".join(lines)
