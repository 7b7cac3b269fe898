"""What shardc costs where there is nothing to communicate: one process, step time and peak memory against
`torch.compile`.

    python examples/bench/overhead.py

Both train the same Llama-like model on the same batches, a step of the one after a step of the other, so that drift
of the machine hits both. Peak memory is the allocator's on a GPU; on a CPU it is the resident peak of a process of its
own for each. Both compile without torch's caches: a hit leaves the compiler itself, some 30 MB, unloaded.
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

import shardc

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
    ours, theirs = (step_function(name, device, args.fused) for name in ("shardc", "torch.compile"))
    pairs = [(timed(ours), timed(theirs)) for _ in range(args.steps)]
    a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(x / y for x, y in pairs)
    memory = {name: own_process(name, args) for name in ("shardc", "torch.compile")}
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {args.steps} steps each, "
        f"AdamW(fused={args.fused})"
    )
    print(f"{'':<16}{'ms a step':>12}{'peak MB':>10}")
    print(f"{'shardc':<16}{a * 1e3:12.1f}{memory['shardc']:10.0f}")
    print(f"{'torch.compile':<16}{b * 1e3:12.1f}{memory['torch.compile']:10.0f}")
    print(f"{'ratio':<16}{ratio:12.3f}{memory['shardc'] / memory['torch.compile']:10.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--fused", action=argparse.BooleanOptionalAction, default=True, help="AdamW(fused=...) for both"
    )
    parser.add_argument("--memory-of", choices=["shardc", "torch.compile"], help=argparse.SUPPRESS)
    return parser.parse_args()


def step_function(name: str, device: str, fused: bool) -> Callable[[], None]:
    """A training step, warmed up."""
    config, rows = SIZES[device]
    torch.compiler.config.force_disable_caches = True
    torch.manual_seed(0)
    model = Llama(config).to(device)
    compiled = sharded(model, device) if name == "shardc" else torch.compile(model, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    x, y = torch.randint(config.vocab, (2, rows, config.context), device=device)

    def step() -> None:
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def sharded(model: torch.nn.Module, device: str) -> torch.nn.Module:
    process_group(device)
    return shardc.compile(model, shardc.Plan.zero3(shardc.Topology(node=1, gpu=1)), progress=lambda text: None)


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
