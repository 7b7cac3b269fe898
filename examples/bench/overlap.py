"""Overlap: how much of what a plan has to move hides behind compute, against FSDP2, on emulated links.

    python examples/bench/overlap.py                            # worlds 8, 64, 1024; two hours on 2 cores
    python examples/bench/overlap.py --worlds 64 --plans zero3 --ratios 1

One process is one rank (`shardc.emulate`): compute is real, collectives take as long as the links would. For each row
the links are set so that the busiest lane of the plan has `ratio` times as much to do as compute (as one process has
it, compiled block by block). All systems train the same Llama-like model, a step of one after a step of the other. A
step is a forward and a backward; medians.

    FSDP2                   fully_shard on every block and on the model, prefetching `--prefetch` blocks
    FSDP2 + compile         the same with compiled blocks
    shardc, torch's pass    shardc's plan, scheduled by torch's own overlap pass; on GPUs only, for it needs Triton
    shardc                  compile(measure=True), with the measured peak of FSDP2 + compile as its memory limit

On a CPU FSDP2 stands still in every reduce, for it leaves overlap to streams; so here it gets what a GPU would give it:
reduces that are only waited for at the end of the backward, or when one is in flight. IIG has no counterpart in FSDP2;
it is compared with HSDP.

bound: by the plan's own dependencies, one hop a parameter and no latencies, with compute as measured region by region.
exposed: that compute stood still in waits. foretold: the step as `shardc.simulate` has it. peak: with master parameters
and AdamW's state.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from allocator import grown, keep
from fsdp2 import sharded_by_fsdp2
from llama import Config, Llama

import shardc
from shardc.cost import by_axis, step_bytes
from shardc.emulate import World, emulate
from shardc.links import Device, Link

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "cpu": (Config(dim=256, layers=32, heads=4, kv_heads=4, hidden=704, vocab=4096, context=256), 8),
    "cuda": (Config(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256, context=4096), 1),
}
DEVICES = {"cpu": Device("a CPU core", 0.05, 10.0, 16.0), "cuda": Device("H200-SXM", 989, 4800, 141, slower_fp32=2.0)}
WORLDS = {8: (2, 4), 64: (8, 8), 1024: (128, 8)}
PLANS = ("zero3", "hsdp", "IIG")
LATENCY_US = {"node": 12.0, "gpu": 4.0}
FASTER_INSIDE = 9.0
"""how many times as fast a link inside a host is: 450 to 50 GB/s in a DGX H100"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prefetch", type=int, default=1)
    return parser.parse_args()


@dataclass
class System:
    """What is compared."""

    name: str
    model: torch.nn.Module
    settle: Callable[[], None] = lambda: None
    """waits for what is still in flight when the backward is over"""

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.peak = 0

    def step(self, batch: torch.Tensor) -> float:
        """Returns the seconds that it took to settle."""
        self.model(*batch).backward()
        began = time.perf_counter()
        self.settle()
        return time.perf_counter() - began

    def timed(self, batch: torch.Tensor, world: World) -> None:
        world.clear()
        wait_for_device()
        began = time.perf_counter()
        settled_s = self.step(batch)
        wait_for_device()
        self.seconds.append(time.perf_counter() - began)
        self.exposed.append(world.exposed_s + settled_s)
        self.rest()

    def rest(self) -> None:
        """As it is between two steps."""
        self.model.zero_grad()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    keep()
    config, rows = SIZES[DEVICE]
    if options.layers:
        config = replace(config, layers=options.layers)
    batch = torch.randint(config.vocab, (2, rows, config.context), device=DEVICE)
    compute_s = alone_s(config, batch)
    print(f"torch {torch.__version__}, {DEVICE}, {config}, {rows} rows; alone {compute_s * 1e3:.0f} ms a step\n")
    names = ("world", "plan", "comm / compute", "system", "step ms", "exposed ms", "bound ms", "bound / step")
    print(f"| {' | '.join(names)} | foretold ms | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for world, plan, ratio in product(options.worlds, options.plans, options.ratios):
        compare(world, plan, ratio, config, batch, compute_s, options)


def alone_s(config: Config, batch: torch.Tensor) -> float:
    """A step in one process, compiled block by block."""
    model = made(config)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    world = World(shardc.Topology(rank=1), torch.device(DEVICE))
    alone = System("alone", model)
    for _ in range(7):
        alone.timed(batch, world)
    return statistics.median(alone.seconds[2:])


def made(config: Config) -> Llama:
    torch.manual_seed(0)
    return Llama(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def compare(
    world: int,
    name: str,
    ratio: float,
    config: Config,
    batch: torch.Tensor,
    compute_s: float,
    options: argparse.Namespace,
) -> None:
    """A row for each system."""
    shape = shardc.Topology(node=WORLDS[world][0], gpu=WORLDS[world][1])
    topology = with_links(shape, name, config, ratio * compute_s)
    with emulate(topology, DEVICE) as emulated:
        systems = baselines(config, topology, name, options.prefetch)
        for system in systems:
            look_at_peak(system, batch, rest_bytes(config, topology, "zero3" if name == "zero3" else "hsdp"))
        limit = next(system.peak for system in systems if system.name == "FSDP2 + compile")
        if DEVICE == "cuda":
            systems.append(by_torch(config, topology, name, batch))
            look_at_peak(systems[-1], batch, rest_bytes(config, topology, name))
        systems.append(ours(config, topology, name, limit))
        look_at_peak(systems[-1], batch, rest_bytes(config, topology, name))
        for _ in range(2 + options.steps):
            for system in systems:
                system.timed(batch, emulated)
        timeline = shardc.simulate(shardc.programs(systems[-1].model)[0])
    bound_s, foretold_s = timeline.bound.us / 1e6, timeline.step_us / 1e6
    for system in systems:
        step_s, exposed_s = statistics.median(system.seconds[2:]), statistics.median(system.exposed[2:])
        foretold = f"{foretold_s * 1e3:.0f} ({foretold_s / step_s - 1:+.1%})" if system.name == "shardc" else "-"
        print(
            f"| {world} | {name} | {ratio} | {system.name} | {step_s * 1e3:.0f} | {exposed_s * 1e3:.0f} "
            f"| {bound_s * 1e3:.0f} | {bound_s / step_s:.3f} | {foretold} | {system.peak / 2**20:.1f} |",
            flush=True,
        )


def look_at_peak(system: System, batch: torch.Tensor, rest: int) -> None:
    for _ in range(2):
        system.peak = rest + grown(lambda: system.step(batch))
        system.rest()


def rest_bytes(config: Config, topology: shardc.Topology, name: str) -> int:
    """Master parameters and AdamW's two values of each element."""
    pieces = topology.sizes[1] if name == "hsdp" else topology.world
    return sum(3 * p.nbytes for p in made_on_meta(config).parameters()) // pieces


def plan_of(name: str, topology: shardc.Topology, **options: Any) -> shardc.Plan:
    if name == "IIG":
        return shardc.Plan.paro(topology, "IIG", **options)
    return {"zero3": shardc.Plan.zero3, "hsdp": shardc.Plan.hsdp}[name](topology, **options)


def with_links(shape: shardc.Topology, name: str, config: Config, busy_s: float) -> shardc.Topology:
    """Links with which the busiest lane of a plan has so much to do at full bandwidth."""
    parameters = {n: (tuple(p.shape), p.dtype, True) for n, p in made_on_meta(config).named_parameters()}
    sent = by_axis(step_bytes(plan_of(name, shape), parameters, 1))
    slowest = max(sent["node"], sent["gpu"] / FASTER_INSIDE)
    node = slowest / busy_s / 1e9
    links = {"node": Link(node, LATENCY_US["node"]), "gpu": Link(node * FASTER_INSIDE, LATENCY_US["gpu"])}
    return shape.with_links(DEVICES[DEVICE], **links)


def made_on_meta(config: Config) -> Llama:
    with torch.device("meta"):
        return Llama(config).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def baselines(config: Config, topology: shardc.Topology, name: str, prefetch: int) -> list[System]:
    """FSDP2, with the best settings that it has."""
    found = []
    for compiled in (False, True):
        model, settle = sharded_by_fsdp2(
            made(config), DEVICE, topology.sizes, replicated=name != "zero3", compiled=compiled, prefetch=prefetch
        )
        found.append(System("FSDP2" + " + compile" * compiled, model, settle))
    return found


def ours(config: Config, topology: shardc.Topology, name: str, limit: int) -> System:
    plan = plan_of(name, topology, memory_limit=limit)
    return System("shardc", shardc.compile(made(config), plan, measure=True, progress=lambda text: None))


def by_torch(config: Config, topology: shardc.Topology, name: str, batch: torch.Tensor) -> System:
    """The same plan, compiled as one graph with torch's own overlap pass."""
    options = {"backend": "inductor-whole", "progress": lambda text: None}
    system = System("shardc, torch's pass", shardc.compile(made(config), plan_of(name, topology), **options))
    with torch._inductor.config.patch({"aten_distributed_optimizations.enable_overlap_scheduling": True}):
        system.step(batch)
    system.rest()
    return system


def wait_for_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
