"""One device, where there is nothing to communicate: what shardc costs, against `torch.compile`, FSDP2 and eager.

    python examples/bench/single.py
    python examples/bench/single.py --steps 5 --systems torch.compile shardc

All train the same Llama-like model (1.1B parameters on a GPU, 20M on a CPU) with fused AdamW, each in a process of its
own, a step of one after a step of the other; medians. shardc and FSDP2 run on a world of one rank (`shardc.emulate`).

compile: what the first step took beyond the others, without torch's caches. peak: what the allocator gives out in a
step beyond what lives between steps, with master parameters and AdamW's state. MFU: 6 operations for each parameter
but the embedding and each token, and 12 x layers x dim x context for attention (PaLM, arXiv 2204.02311, appendix B),
against what the vendor says of the device; none for a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fsdp2 import sharded_by_fsdp2
from llama import Config
from overlap import DEVICE, DEVICES, Host, Row, System, made, made_on_meta, rest_bytes

import shardc
from shardc.emulate import World
from shardc.links import Link

SIZES = {
    "cpu": (Config(layers=8), 2),
    "cuda": (Config(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=32768, context=2048), 2),
}
"""The model, and the sequences of a batch."""
BASELINE = "torch.compile"
WARMUP = 3


@dataclass
class Trained(System):
    """With an optimizer; a step has its update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        self.model(*self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def row() -> Row:
    config, rows = SIZES[DEVICE]
    shape = shardc.Topology(node=1, gpu=1)
    topology = shape.with_links(DEVICES[DEVICE], node=Link(1.0, 0.0), gpu=Link(1.0, 0.0))
    return Row(1, "zero3", 0.0, config, rows, topology, 1)


def uncached(row: Row) -> torch.nn.Module:
    torch.compiler.config.force_disable_caches = True
    return made(row.config)


def trained(row: Row, world: World, model: torch.nn.Module) -> Trained:
    return Trained(row, world, model, rest_bytes(row, 1))


def eager(row: Row, world: World) -> Trained:
    return trained(row, world, uncached(row))


def whole(row: Row, world: World) -> Trained:
    return trained(row, world, torch.compile(uncached(row), fullgraph=True, dynamic=False))


def fsdp2(row: Row, world: World) -> Trained:
    model, _ = sharded_by_fsdp2(
        uncached(row), DEVICE, row.topology.sizes, replicated=False, compiled=True, prefetch=1, reduces="own"
    )
    return trained(row, world, model)


def ours(row: Row, world: World) -> Trained:
    plan = shardc.Plan.zero3(row.topology)
    return trained(row, world, shardc.compile(uncached(row), plan, progress=lambda text: None))


SYSTEMS: dict[str, Callable[[Row, World], System]] = {
    BASELINE: whole,
    "shardc": ours,
    "FSDP2, compiled blocks": fsdp2,
    "eager": eager,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    settings = row()
    hosts = {name: Host(SYSTEMS[name], settings) for name in options.systems}
    first_s = {name: host.ask("timed")[0] for name, host in hosts.items()}
    peaks = {name: host.ask("peak") for name, host in hosts.items()}
    rounds = [{name: host.ask("timed")[0] for name, host in hosts.items()} for _ in range(WARMUP + options.steps)]
    for host in hosts.values():
        host.end()
    show(settings, first_s, peaks, rounds[WARMUP:])


def show(row: Row, first_s: dict[str, float], peaks: dict[str, int], rounds: list[dict[str, float]]) -> None:
    """A line a system."""
    medians_s = {name: statistics.median(taken[name] for taken in rounds) for name in first_s}
    count = sum(p.numel() for p in made_on_meta(row.config).parameters())
    print(
        f"torch {torch.__version__}, {DEVICE}, {row.config}, {count / 1e6:.1f}M parameters, {row.rows} rows, ", end=""
    )
    print(f"{len(rounds)} steps each\n")
    print("| system | ms a step | against torch.compile | peak MiB | against torch.compile | compile s | MFU |")
    print("|---|---|---|---|---|---|---|")
    for name, step_s in medians_s.items():
        slower = memory = "-"
        if BASELINE in medians_s:
            slower = f"{statistics.median(taken[name] / taken[BASELINE] for taken in rounds):.3f}"
            memory = f"{peaks[name] / peaks[BASELINE]:.3f}"
        times = f"{step_s * 1e3:.1f} | {slower} | {peaks[name] / 2**20:.1f} | {memory} | {first_s[name] - step_s:.1f}"
        print(f"| {name} | {times} | {used(row, step_s)} |")


def used(row: Row, step_s: float) -> str:
    """Of what a GPU could do, the part that the model needed."""
    if DEVICE == "cpu":
        return "-"
    config, tokens = row.config, row.rows * row.config.context
    count = sum(p.numel() for name, p in made_on_meta(config).named_parameters() if "embed" not in name)
    flops = tokens * (6 * count + 12 * config.layers * config.dim * config.context)
    return f"{flops / step_s / DEVICES[DEVICE].tflops / 1e12:.1%}"


if __name__ == "__main__":
    sys.exit(main())
