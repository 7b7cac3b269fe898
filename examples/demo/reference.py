"""The same training in one process, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gpt import GPT
from text import batch


def reference_losses(
    model: GPT,
    build_optimizer: Callable[[GPT], tuple[Optimizer, LRScheduler]],
    steps: int,
    micro_batches: int,
    world: int,
    rows: int,
) -> list[float]:
    """Loss of the first steps on the batches of all ranks, joined to one batch a step."""
    optimizer, scheduler = build_optimizer(model)
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        parts = [
            batch(step, micro, rank, rows=rows, context=model.config.context)
            for micro in range(micro_batches)
            for rank in range(world)
        ]
        x, y = (torch.cat(column).to(device) for column in zip(*parts, strict=True))
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
