"""HO-Ring (PaRO, arXiv 2310.06003): hops over hosts beside hops inside a host, against one flat ring over all ranks.

    python examples/bench/ho_ring.py                                    # on emulated links, 8 hosts of 8
    sudo python examples/bench/ho_ring.py --hosts 2 4 --rate 400mbit    # on real ones: namespaces, Gloo, TCP

One weight is gathered, and nothing else is done meanwhile: as one flat collective, as a chain of two hops, and as that
chain in pieces (`passes/chunk.py`). Emulated links (`shardc.emulate`) have the proportions of hosts with NVLink and
100 Gb/s, slowed down so that moving memory on this device does not count; real hosts (`hosts.py`) have two ranks each,
and their links are measured first, each by itself: what `calibrate` tries beyond that is how links and compute share
cores, and nothing is computed here. Bandwidth: bytes of the full value a second, as the slowest rank sees it; medians.
Reported in the paper: +36.5% over the flat ring.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hosts import Hosts, Missing
from torch import nn

import shardc
from shardc import times
from shardc.calibrate import SIZES, one_by_one
from shardc.emulate import emulate
from shardc.links import Device, Link

SLOWER = 40.0
"""than links of 300 GB/s inside a host, and of 100 Gb/s for its 8 ranks"""
LATENCY_US = {"node": 12.0, "gpu": 4.0}
STEPS = 7
ROWS = {"emulated": (64, 512, 4096, 16384), "real": (256, 1024, 4096)}
"""of weights with 1024 columns"""
RANKS = 2
"""of a real host"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[])
    parser.add_argument("--rate", default="400mbit", help="of real links, as tc has it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    print(f"torch {torch.__version__}\n")
    print("| links | weight MiB | flat MB/s | hops in a chain | in pieces | against flat | foretold |")
    print("|---|---|---|---|---|---|---|", flush=True)
    if not options.hosts:
        topology = emulated()
        compare("8 x 8 emulated", topology, ROWS["emulated"], lambda: emulate(topology))
    for count in options.hosts:
        try:
            on_hosts(count, options.rate)
        except Missing as missing:
            print(f"ho_ring.py: {missing}", file=sys.stderr)
            return 2
    return 0


def emulated() -> shardc.Topology:
    return shardc.Topology(node=8, gpu=8).with_links(
        Device("a CPU core", 0.13, 30.0, 16.0),
        node=Link(12.5 / 8 / SLOWER, LATENCY_US["node"] * SLOWER),
        gpu=Link(300.0 / SLOWER, LATENCY_US["gpu"] * SLOWER),
    )


def on_hosts(count: int, rate: str) -> None:
    with Hosts(count) as hosts, tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"hosts": count, "about": f"{count} x {RANKS}, {rate}"}))
        hosts.rate(rate)
        printed = hosts.torchrun([str(Path(__file__).resolve()), "--worker", str(job)], processes=RANKS)
        print(*(line for line in printed.splitlines() if line.startswith("|")), sep="\n", flush=True)


def worker(path: Path) -> int:
    """One rank of a real job."""
    torch.set_num_threads(1)
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    topology = one_by_one(shardc.Topology(node=job["hosts"], gpu=RANKS), SIZES)
    compare(job["about"], topology, ROWS["real"], nullcontext)
    dist.destroy_process_group()
    return 0


def compare(
    about: str, topology: shardc.Topology, rows: tuple[int, ...], world: Callable[[], AbstractContextManager[Any]]
) -> None:
    for count in rows:
        weight_bytes = count * 1024 * 4
        flat, whole, pieces = (
            measured(topology, count, world, *how) for how in (("flat", 1), ("hop", 1), ("hop", times.PIECES))
        )
        if dist.is_initialized() and dist.get_rank() != 0:
            continue
        cells = (f"{weight_bytes / took_s / 1e6:.1f}" for took_s, _ in (flat, whole, pieces))
        print(
            f"| {about} | {weight_bytes / 2**20:g} | {' | '.join(cells)} | {flat[0] / pieces[0] - 1:+.1%} "
            f"| {flat[1] / pieces[1] - 1:+.1%} |",
            flush=True,
        )


def measured(
    topology: shardc.Topology, rows: int, world: Callable[[], AbstractContextManager[Any]], chain: Any, pieces: int
) -> tuple[float, float]:
    """Seconds of a forward that does little but to gather its weight, on the slowest rank; and as it is foretold."""
    torch.manual_seed(0)
    plan = shardc.Plan.zero3(topology, chain=chain)
    with patch.object(times, "PIECES", pieces), world():
        model = shardc.compile(nn.Linear(1024, rows, bias=False), plan, backend="eager", progress=lambda text: None)
        x = torch.randn(1, 1024)
        with torch.no_grad():
            model(x)
            found = [once_s(model, x) for _ in range(STEPS)]
        timeline = shardc.simulate(shardc.programs(model)[0])
    return statistics.median(found), timeline.exposed_us / 1e6


def once_s(model: nn.Module, x: torch.Tensor) -> float:
    real = dist.is_initialized() and dist.get_backend() == "gloo"
    if real:
        dist.barrier()
    began = time.perf_counter()
    model(x)
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    if real:
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


if __name__ == "__main__":
    sys.exit(main())
