"""Peak memory of a step, as foretold by `shardc.simulate` and as the allocator had it: 4 ranks, six plans.

    torchrun --standalone --nproc-per-node 4 examples/bench/forecast.py --micro-batches 1 2

Of the first rank: bytes that the C library's allocator has given out, looked at every 0.3 ms during a step, above what
they are between steps, plus master parameters and optimizer state. A Llama-like model through Inductor. Gloo's own
buffers are in the forecast, and so is memory that ranks share: links are calibrated first, which takes some minutes.
Exits with 1 where a forecast is off by more than `--limit`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial
from itertools import product
from typing import TextIO

import torch
import torch.distributed as dist
from allocator import grown
from llama import Config, Llama

import shardc
from shardc.footprint import Footprint, footprint
from shardc.near import give_back, held_bytes

SHAPE = shardc.Topology(node=2, gpu=2)
PLANS = {
    "zero3": shardc.Plan.zero3,
    "hpz": shardc.Plan.hpz,
    "mics": shardc.Plan.mics,
    "zero1": shardc.Plan.zero1,
    "IIG": partial(shardc.Plan.paro, letters="IIG"),
    "ddp": shardc.Plan.ddp,
}
CONFIG = Config(dim=256, layers=4, heads=4, kv_heads=4, hidden=688, vocab=2048, context=256)
BATCH, WARMUP, STEPS = 2, 2, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--limit", type=float, default=0.05)
    options = parser.parse_args()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    topology = shardc.calibrate(SHAPE, progress=lambda text: say(text, sys.stderr))
    say(f"torch {torch.__version__}, cpu, 4 Gloo ranks as node=2, gpu=2; MiB of one rank")
    say("| plan | micro-batches | measured | foretold | off | at the peak |\n|---|---|---|---|---|---|")
    worst = 0.0
    for name, micro_batches in product(PLANS, options.micro_batches):
        measured, foretold = measure(PLANS[name](topology), micro_batches)
        off = foretold.peak.bytes / measured - 1
        worst = max(worst, abs(off))
        at = max(foretold.peak.by_kind, key=foretold.peak.by_kind.__getitem__)
        numbers = f"{measured / 2**20:.1f} | {foretold.peak.bytes / 2**20:.1f} | {off:+.1%}"
        say(f"| {name} | {micro_batches} | {numbers} | mostly {at} |")
    say(f"\nworst: {worst:.1%} off (limit {options.limit:.0%})")
    dist.destroy_process_group()
    return int(worst > options.limit)


def say(text: str, file: TextIO = sys.stdout) -> None:
    if dist.get_rank() == 0:
        print(text, file=file, flush=True)


def measure(plan: shardc.Plan, micro_batches: int) -> tuple[int, Footprint]:
    """Bytes at the peak, and what was foretold."""
    torch._dynamo.reset()  # what it holds of models of plans before: they give back what they have shared when they go
    gc.collect()
    give_back()
    torch.manual_seed(0)
    model = shardc.compile(Llama(CONFIG), plan, progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randint(CONFIG.vocab, (2, BATCH, CONFIG.context))

    def accumulate() -> None:
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            model(*batch).backward()

    peaks = []
    for _ in range(WARMUP + STEPS):
        peaks.append(grown(accumulate))
        optimizer.step()
        optimizer.zero_grad()
    program = shardc.programs(model)[0]
    foretold = footprint(program, [(v, program.graph(v)) for v in program.step(micro_batches)])
    measured = foretold.rest_bytes + batch.nbytes + sorted(peaks[WARMUP:])[STEPS // 2] + held_bytes()
    return measured, foretold


if __name__ == "__main__":
    sys.exit(main())
