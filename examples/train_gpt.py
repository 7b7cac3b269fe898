"""Train a small GPT, sharded over a mesh of 2 nodes with 2 ranks each (here: 4 processes on one machine).

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py

The text is the source of Python's standard library. On GPUs start one process a GPU.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import shardc
from demo import report
from demo.reference import reference_losses
from demo.sample import sample
from gpt import GPT, Config
from shardc.testing import count_bytes
from text import batch

STEPS = 160
WARMUP = 10
MICRO_BATCHES = 2
GLOBAL_BATCH = 32  # sequences a step, over all ranks and micro-batches
LEARNING_RATE = 3e-3
CHECKED_STEPS = 20  # trained again in one process, to compare
MAX_DIFFERENCE = 1e-4  # of a loss, between the ranks and one process
MAX_LAST_LOSS = 2.2  # nats a byte


def build_model(device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(Config()).to(device)


def build_optimizer(model: GPT) -> tuple[torch.optim.Optimizer, LambdaLR]:
    def scale(step: int) -> float:
        return min((step + 1) / WARMUP, 0.05 + 0.95 * (1 + math.cos(math.pi * step / STEPS)) / 2)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, scale)


def train(model: GPT, device: torch.device, rows: int) -> tuple[list[float], dict[str, float]]:
    """Loss of every step, the mean over all ranks, and the bytes that this rank sent over each axis in a step; `rows`
    is the number of sequences in one micro-batch of one rank."""
    optimizer, scheduler = build_optimizer(model)
    losses, sent = [], Counter()
    for step in range(STEPS):
        report.reset_peak_memory()
        start, total = time.perf_counter(), torch.zeros((), device=device)
        with count_bytes(model) as counted:
            for micro in range(MICRO_BATCHES):
                last = micro == MICRO_BATCHES - 1
                x, y = batch(step, micro, dist.get_rank(), rows=rows, context=model.config.context)
                with nullcontext() if last else model.no_sync():
                    loss = model(x.to(device), y.to(device)) / MICRO_BATCHES
                    loss.backward()
                total += loss.detach()
        sent.update(counted)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        tokens = dist.get_world_size() * MICRO_BATCHES * rows * model.config.context
        report.step(step, losses[-1], tokens / (time.perf_counter() - start))
    return losses, {axis: total / STEPS for axis, total in sent.items()}


def main() -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world = dist.get_world_size()
    rows = GLOBAL_BATCH // (MICRO_BATCHES * world)

    topology = shardc.Topology(node=2, gpu=2) if world == 4 else shardc.Topology(node=1, gpu=world)
    plan = shardc.Plan.paro(topology, "IIG")
    model = build_model(device)
    report.plan(plan, model)
    report.graphs(plan, build_model, rows, MICRO_BATCHES)
    model = shardc.compile(model, plan, backend="inductor")

    losses, sent = train(model, device, rows)
    report.traffic(plan, model, MICRO_BATCHES, sent)
    report.title("Sample")
    report.say(sample(model, b"def __init__(self", length=100, device=device))

    failures = []
    if dist.get_rank() == 0:
        expected = reference_losses(build_model(device), build_optimizer, CHECKED_STEPS, MICRO_BATCHES, world, rows)
        failures = report.verdict(losses, expected, MAX_DIFFERENCE, MAX_LAST_LOSS)
    dist.barrier()
    dist.destroy_process_group()
    return len(failures)


if __name__ == "__main__":
    sys.exit(main())
