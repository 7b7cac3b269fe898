"""What shardc costs where there is nothing to communicate: one process, step time and peak memory against
`torch.compile`; beside them FSDP2 with compiled blocks, which pays for DTensors too.

    python examples/bench/overhead.py

All train the same Llama-like model on the same batches, a step of one after a step of the other, so that drift of the
machine hits all. Peak memory is the allocator's on a GPU; on a CPU it is the resident peak of a process of its own for
each. All compile without torch's caches: a hit leaves the compiler itself, some 30 MB, unloaded.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from llama import Config, Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardc

BASELINE = "torch.compile"
NAMES = (BASELINE, "shardc", "FSDP2")
SIZES = {
    "cpu": (Config(), 2),
    "cuda": (Config(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192, vocab=32768, context=2048), 2),
}


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.memory_of:
        print(peak_mb(args.memory_of, device, args.steps, args.fused))
        return
    steps = {name: step_function(name, device, args.fused) for name in NAMES}
    rounds = [{name: timed(step) for name, step in steps.items()} for _ in range(args.steps)]
    memory = {name: own_process(name, args) for name in NAMES}
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {args.steps} steps each, "
        f"AdamW(fused={args.fused})"
    )
    print(f"{'':<16}{'ms a step':>12}{'ratio':>8}{'peak MB':>10}{'ratio':>8}")
    for name in NAMES:
        milliseconds = statistics.median(times[name] for times in rounds) * 1e3
        ratio = statistics.median(times[name] / times[BASELINE] for times in rounds)
        more = memory[name] / memory[BASELINE]
        print(f"{name:<16}{milliseconds:12.1f}{ratio:8.3f}{memory[name]:10.0f}{more:8.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--fused", action=argparse.BooleanOptionalAction, default=True, help="AdamW(fused=...) for both"
    )
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    return parser.parse_args()


def step_function(name: str, device: str, fused: bool) -> Callable[[], None]:
    """A training step, warmed up."""
    config, rows = SIZES[device]
    torch.compiler.config.force_disable_caches = True
    torch.manual_seed(0)
    model = Llama(config).to(device)
    compiled = MAKE[name](model, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    x, y = torch.randint(config.vocab, (2, rows, config.context), device=device)

    def step() -> None:
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def plain(model: Llama, device: str) -> torch.nn.Module:
    return torch.compile(model, fullgraph=True, dynamic=False)


def sharded(model: Llama, device: str) -> torch.nn.Module:
    process_group(device)
    return shardc.compile(model, shardc.Plan.zero3(shardc.Topology(node=1, gpu=1)), progress=lambda text: None)


def fsdp2(model: Llama, device: str) -> torch.nn.Module:
    process_group(device)
    mesh = init_device_mesh(device, (1,))
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MAKE = {BASELINE: plain, "shardc": sharded, "FSDP2": fsdp2}


def process_group(device: str) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def own_process(name: str, args: argparse.Namespace) -> float:
    options = ["--steps", str(args.steps), "--fused" if args.fused else "--no-fused"]
    command = [sys.executable, __file__, "--memory-of", name, *options]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_mb(name: str, device: str, steps: int, fused: bool) -> float:
    """Of the steps alone: what compiling needed is not counted. Both have a process group."""
    process_group(device)
    step = step_function(name, device, fused)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    for _ in range(steps):
        step()
    return torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else resident_peak_mb()


def resident_peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
