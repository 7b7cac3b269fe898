"""Overlap: how much of what a plan has to move hides behind compute, against FSDP2, on emulated links.

    python examples/bench/overlap.py                            # worlds 8, 64, 1024; a row takes five minutes
    python examples/bench/overlap.py --worlds 64 --plans zero3 --ratios 1

One process is one rank (`shardc.emulate`): compute is real, collectives take as long as the links would. For each row
the links are set so that the busiest lane of the plan has `ratio` times as much to do as compute (as one process has
it, compiled block by block). All systems train the same Llama-like model, each in a process of its own, a step of one
after a step of the other. A step is a forward and a backward, without Python's garbage collector; medians.

    FSDP2                   fully_shard on every block and on the model, prefetching `--prefetch` blocks
    FSDP2 + compile         the same with compiled blocks
    shardc, torch's pass    shardc's plan, scheduled by torch's own overlap pass; on GPUs only, for it needs Triton
    shardc                  compile(measure=True), with the measured peak of FSDP2 + compile as its memory limit

On a CPU FSDP2 stands still in every reduce, for it leaves overlap to streams; so here it gets what a GPU would give it:
reduces that are only waited for at the end of the backward, or when one is in flight. IIG has no counterpart in FSDP2;
it is compared with HSDP.

exposed: that compute stood still in waits (on a GPU, where streams wait, it is not told from compute). compute: the
rest of the step. bound: by the plan's own dependencies, one hop a parameter and no latencies. foretold: the step as
`shardc.simulate` has it. Both go by regions as they are measured one by one, between the steps, and on a CPU scaled to
what compute takes in the step before, copies into buckets and out of them included: the speed of a machine that is
shared drifts by a tenth within seconds. peak: with master parameters and AdamW's state.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from allocator import grown
from fsdp2 import sharded_by_fsdp2
from llama import Config, Llama
from torch._inductor.fx_passes import node_runtime_estimation

import shardc
from shardc.cost import by_axis, step_bytes
from shardc.emulate import World, emulate
from shardc.heap import keep_freed
from shardc.links import Device, Link
from shardc.measure import measure
from shardc.model import runtime_of
from shardc.program import Pace
from shardc.timeline import COMPUTE
from shardc.times import collective_us

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "cpu": (Config(dim=1024, layers=8, heads=16, kv_heads=16, hidden=3072, vocab=4096, context=256), 4),
    "cuda": (Config(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocab=128256, context=4096), 1),
}
DEVICES = {"cpu": Device("a CPU core", 0.13, 30.0, 16.0), "cuda": Device("H200-SXM", 989, 4800, 141, slower_fp32=2.0)}
WORLDS = {8: (2, 4), 64: (8, 8), 1024: (128, 8)}
PLANS = ("zero3", "hsdp", "IIG")
LATENCY_US = {"node": 12.0, "gpu": 4.0}
CONTEXT = multiprocessing.get_context("spawn")
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


@dataclass(frozen=True)
class Row:
    """What systems are compared on."""

    world: int
    plan: str
    ratio: float
    config: Config
    rows: int
    topology: shardc.Topology
    prefetch: int
    limit: int | None = None
    """bytes, for shardc"""

    def batch(self) -> torch.Tensor:
        return torch.randint(self.config.vocab, (2, self.rows, self.config.context), device=DEVICE)


@dataclass
class System:
    """What is compared, in the process that it has to itself."""

    row: Row
    world: World
    model: torch.nn.Module
    rest_bytes: int
    settle: Callable[[], None] = lambda: None
    """waits for what is still in flight when the backward is over"""
    computed_s: float = 0.0
    """in the step before"""

    def __post_init__(self) -> None:
        self.batch = self.row.batch()

    def step(self) -> float:
        """Returns the seconds that it took to settle."""
        self.model(*self.batch).backward()
        began = time.perf_counter()
        self.settle()
        return time.perf_counter() - began

    def peak(self) -> int:
        """Bytes, with what is there between two steps."""
        for _ in range(2):
            found = grown(self.step)
            self.model.zero_grad()
        return self.rest_bytes + found

    def timed(self) -> tuple[float, float]:
        """Seconds of a step, and those that were exposed."""
        self.world.clear()
        wait_for_device()
        began = time.perf_counter()
        settled_s = self.step()
        wait_for_device()
        took_s = time.perf_counter() - began
        self.model.zero_grad()
        gc.collect()
        exposed_s = self.world.exposed_s + settled_s
        self.computed_s = took_s - exposed_s
        return took_s, exposed_s

    def foretold(self) -> tuple[float, float]:
        """The bound, and the step as it is simulated, in seconds, with regions as they are timed now; on a CPU as long
        in all as they took in the step before."""
        program = shardc.programs(self.model)[0]
        measure(program, runtime_of(self.model).lowering)
        timeline = shardc.simulate(program)
        if DEVICE == "cpu":
            scale = self.computed_s * 1e6 / sum(e.us for e in timeline.events if e.lane == COMPUTE)
            for half, pace in program.pace.items():
                program.pace[half] = Pace({name: scale * us for name, us in pace.us.items()}, scale * pace.copies)
            timeline = shardc.simulate(program)
        return timeline.bound.us / 1e6, timeline.step_us / 1e6


class Host:
    """A process with one system; the others are quiet while it is asked for something."""

    def __init__(self, make: Callable[[Row, World], System], row: Row):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, make, row), daemon=True)
        self.process.start()
        theirs.close()  # so that `recv` raises where the process has died

    def ask(self, what: str) -> Any:
        self.pipe.send(what)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def serve(pipe: Any, make: Callable[[Row, World], System], row: Row) -> None:
    torch.set_num_threads(1)
    keep_freed()
    with emulate(row.topology, DEVICE) as world:
        system = make(row, world)
        gc.disable()
        while what := pipe.recv():
            pipe.send(getattr(system, what)())


def main() -> None:
    options = arguments()
    config, rows = SIZES[DEVICE]
    if options.layers:
        config = replace(config, layers=options.layers)
    one = shardc.Topology(rank=1).with_links(DEVICES[DEVICE], rank=Link(1.0, 0.0))
    alone = Host(plain, Row(1, "", 0.0, config, rows, one, 0))
    compute_s = statistics.median([alone.ask("timed")[0] for _ in range(7)][2:])
    alone.end()
    print(f"torch {torch.__version__}, {DEVICE}, {config}, {rows} rows; alone {compute_s * 1e3:.0f} ms a step\n")
    names = ("world", "plan", "comm / compute", "system", "step ms", "compute ms", "exposed ms", "bound ms")
    print(f"| {' | '.join(names)} | bound / step | foretold ms | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for world, plan, ratio in product(options.worlds, options.plans, options.ratios):
        shape = shardc.Topology(node=WORLDS[world][0], gpu=WORLDS[world][1])
        topology = with_links(shape, plan, config, ratio * compute_s)
        compare(Row(world, plan, ratio, config, rows, topology, options.prefetch), options.steps)


def compare(row: Row, steps: int) -> None:
    """A line for each system."""
    hosts = {"FSDP2": Host(fsdp2, row), "FSDP2 + compile": Host(fsdp2_compiled, row)}
    peaks = {name: host.ask("peak") for name, host in hosts.items()}
    if DEVICE == "cuda":
        hosts["shardc, torch's pass"] = Host(ours_by_torch, row)
    hosts["shardc"] = Host(ours, replace(row, limit=peaks["FSDP2 + compile"]))
    peaks |= {name: host.ask("peak") for name, host in hosts.items() if name not in peaks}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in hosts}
    foretold: list[tuple[float, float]] = []
    for _ in range(steps):
        for name, host in hosts.items():
            taken[name].append(host.ask("timed"))
        foretold.append(hosts["shardc"].ask("foretold"))
    bound_s, foretold_s = medians(foretold)
    for name, host in hosts.items():
        step_s, exposed_s = medians(taken[name])
        computed_s = statistics.median(step_s - exposed_s for step_s, exposed_s in taken[name])
        told = f"{computed_s * 1e3:.0f} | {exposed_s * 1e3:.0f}" if DEVICE == "cpu" else "- | -"
        simulated = f"{foretold_s * 1e3:.0f} ({foretold_s / step_s - 1:+.1%})" if name == "shardc" else "-"
        print(
            f"| {row.world} | {row.plan} | {row.ratio} | {name} | {step_s * 1e3:.0f} | {told} "
            f"| {bound_s * 1e3:.0f} | {bound_s / step_s:.3f} | {simulated} "
            f"| {peaks[name] / 2**20:.1f} |",
            flush=True,
        )
        host.end()


def medians(found: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*found, strict=True)
    return statistics.median(first), statistics.median(second)


def made(config: Config) -> Llama:
    torch.manual_seed(0)
    return Llama(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def made_on_meta(config: Config) -> Llama:
    with torch.device("meta"):
        return Llama(config).to(torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def rest_bytes(row: Row, pieces: int) -> int:
    """Master parameters and AdamW's two values of each element."""
    return sum(3 * p.nbytes for p in made_on_meta(row.config).parameters()) // pieces


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


# The systems


def plain(row: Row, world: World) -> System:
    """One process, compiled block by block."""
    model = made(row.config)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    return System(row, world, model, rest_bytes(row, 1))


def fsdp2(row: Row, world: World, compiled: bool = False) -> System:
    """FSDP2, with the best settings that it has."""
    replicated, sizes = row.plan != "zero3", row.topology.sizes
    model, settle = sharded_by_fsdp2(
        made(row.config), DEVICE, sizes, replicated=replicated, compiled=compiled, prefetch=row.prefetch
    )
    return System(row, world, model, rest_bytes(row, sizes[1] if replicated else row.world), settle)


def fsdp2_compiled(row: Row, world: World) -> System:
    return fsdp2(row, world, compiled=True)


def ours(row: Row, world: World) -> System:
    plan = plan_of(row.plan, row.topology, memory_limit=row.limit)
    model = shardc.compile(made(row.config), plan, measure=True, progress=lambda text: None)
    return System(row, world, model, rest_bytes(row, row.topology.sizes[1] if row.plan == "hsdp" else row.world))


def ours_by_torch(row: Row, world: World) -> System:
    """The same plan, compiled as one graph with torch's own overlap pass."""
    for log in ("_log_compute_estimations", "_log_collective_benchmarks"):
        # Of estimates that torch 2.11 cannot make: for fewer heads of keys than of queries, for emulated groups.
        setattr(node_runtime_estimation, log, lambda *args, **kwargs: None)
    settings = torch._inductor.config.aten_distributed_optimizations
    settings.enable_overlap_scheduling = True
    settings.custom_runtime_estimation = partial(known_ms, row.topology)
    plan = plan_of(row.plan, row.topology)
    model = shardc.compile(made(row.config), plan, backend="inductor-whole", progress=lambda text: None)
    return System(row, world, model, rest_bytes(row, row.topology.sizes[1] if row.plan == "hsdp" else row.world))


def known_ms(topology: shardc.Topology, node: torch.fx.Node, numel: int | None = None) -> float | None:
    """How long a collective takes, for torch's pass, which knows no emulated links; compute it measures itself."""
    kind = re.search(r"_c10d_functional\.(all_gather|reduce_scatter|all_reduce)", str(node.target))
    if kind is None:
        return None
    value = node.args[0].meta["val"]
    group = dist.distributed_c10d._resolve_process_group([a for a in node.args if isinstance(a, str)][-1])
    given_bytes = (value.numel() if numel is None else numel) * value.element_size()
    full_bytes = given_bytes * (group.size() if kind[1] == "all_gather" else 1)
    sent_bytes = (2 if kind[1] == "all_reduce" else 1) * full_bytes * (group.size() - 1) / group.size()
    return collective_us(topology, kind[1], group.axis, sent_bytes, group.size()) / 1e3


def wait_for_device() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
