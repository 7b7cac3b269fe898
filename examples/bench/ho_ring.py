"""HO-Ring (PaRO, arXiv 2310.06003): hops over hosts beside hops inside a host, against one flat ring over all ranks.

    python examples/bench/ho_ring.py

One weight is gathered over 8 hosts of 8, and nothing else is done meanwhile, on emulated links (`shardc.emulate`): as
one flat collective, as a chain of two hops, and as that chain in pieces (`passes/chunk.py`). Links have the proportions
of hosts with NVLink and 100 Gb/s, slowed down so that moving memory on this device does not count. Bandwidth is bytes
of the full value a second, as compute sees it; medians. Reported in the paper: +36.5% over the flat ring.
"""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

import torch
from torch import nn

import shardc
from shardc import times
from shardc.emulate import emulate
from shardc.links import Device, Link

SLOWER = 40.0
"""than links of 300 GB/s inside a host, and of 100 Gb/s for its 8 ranks"""
LATENCY_US = {"node": 12.0, "gpu": 4.0}
STEPS = 7


def main() -> None:
    topology = shardc.Topology(node=8, gpu=8).with_links(
        Device("a CPU core", 0.13, 30.0, 16.0),
        node=Link(12.5 / 8 / SLOWER, LATENCY_US["node"] * SLOWER),
        gpu=Link(300.0 / SLOWER, LATENCY_US["gpu"] * SLOWER),
    )
    print(f"torch {torch.__version__}; 8 hosts of 8, links {SLOWER:.0f} times slower than NVLink and 100 Gb/s")
    print(
        "| weight MiB | flat MB/s | hops in a chain | in pieces | against flat | foretold |\n|---|---|---|---|---|---|"
    )
    for rows in (64, 512, 4096, 16384):
        weight_bytes = rows * 1024 * 4
        flat = measured(topology, rows, "flat")
        hops = measured(topology, rows, "hop")
        at_once = measured(topology, rows, "hop", pieces=False)
        cells = (f"{weight_bytes / took_s / 1e6:.1f}" for took_s in (flat[0], at_once[0], hops[0]))
        print(
            f"| {weight_bytes >> 20} | {' | '.join(cells)} | {flat[0] / hops[0] - 1:+.1%} "
            f"| {flat[1] / hops[1] - 1:+.1%} |",
            flush=True,
        )


def measured(topology: shardc.Topology, rows: int, chain: str, pieces: bool = True) -> tuple[float, float]:
    """Seconds that a forward waits for the weight: as they were, and as they are foretold."""
    torch.manual_seed(0)
    plan = shardc.Plan.zero3(topology, chain=chain)
    at_most = times.PIECES if pieces else 1
    with patch.object(times, "PIECES", at_most), emulate(topology) as world:
        model = shardc.compile(nn.Linear(1024, rows, bias=False), plan, backend="eager", progress=lambda text: None)
        x = torch.randn(1, 1024)
        model(x)
        found = []
        for _ in range(STEPS):
            world.clear()
            began = time.perf_counter()
            model(x)
            found.append(world.exposed_s or time.perf_counter() - began)
        foretold_s = shardc.simulate(shardc.programs(model)[0]).exposed_us / 1e6
    return statistics.median(found), foretold_s


if __name__ == "__main__":
    main()
