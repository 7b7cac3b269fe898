"""Training: the small model, its data, and what one process makes of them; what every plan has to reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

MicroBatches = tuple[int, ...]
"""How many in each step."""
VOCABULARY, WIDTH = 13, 6
LIMIT = 1e-5
"""Largest relative error, measured against the largest magnitude of a tensor."""


class Block(nn.Module):
    """5 and 7 rows divide by nothing, 1 row leaves most ranks empty, `scale` has no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.mix = nn.Linear(5, 7, bias=False)
        self.down = nn.Linear(7, WIDTH)
        self.gain = nn.Parameter(torch.ones(1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.mix.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(F.gelu(self.up(self.norm(x)))))
        return x + self.scale * self.gain * self.down(h)


class Small(nn.Module):
    """Uneven dims, a tied, a frozen, a 0-dim and an unused parameter."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def small(depth: int = 1) -> Small:
    torch.manual_seed(0)
    return Small(depth)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """(ids, labels)"""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    ids, labels = torch.randint(0, VOCABULARY, (2, 2, 4), generator=generator)
    return ids, labels


def adamw(parameters: Any, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    """With the default eps, the rounding of a zero gradient becomes a full step; here it is multiplied by lr / eps."""
    return torch.optim.AdamW(parameters, lr=lr, eps=1e-3, **options)


@dataclass
class Trained:
    """What training gave: a loss and gradients a step, parameters at the end."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]


@cache
def one_process(world: int, micro_batches: MicroBatches, depth: int = 1) -> Trained:
    """Each micro-batch of each rank is a micro-batch here."""
    model = small(depth)
    optimizer = adamw(model.parameters())
    losses, grads = [], []
    for step, count in enumerate(micro_batches):
        loss = torch.zeros(())
        for micro in range(count):
            for rank in range(world):
                part = model(*batch(step, micro, rank)) / (world * count)
                part.backward()
                loss += part.detach()
        losses.append(float(loss))
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: p.detach().clone() for n, p in model.named_parameters()})


def sharded(plan: shardc.Plan, micro_batches: MicroBatches, backend: str, depth: int = 1) -> Trained:
    """The same training on the ranks of the running process group."""
    model = shardc.compile(small(depth), plan, backend=backend, progress=lambda line: None)
    optimizer = adamw(model.parameters())
    losses, grads = [], []
    for step, count in enumerate(micro_batches):
        loss = torch.zeros(())
        for micro in range(count):
            model.set_requires_gradient_sync(micro == count - 1)
            part = model(*batch(step, micro, dist.get_rank())) / count
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss)
        losses.append(float(loss) / dist.get_world_size())
        grads.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, grads, {n: p.detach().full_tensor() for n, p in model.named_parameters()})


def worst_error(found: Trained, expected: Trained) -> float:
    """The largest relative error over losses, gradients and parameters."""
    return max(error(a, b) for a, b in _pairs(found, expected))


def _pairs(found: Trained, expected: Trained) -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.tensor(found.losses), torch.tensor(expected.losses)
    for ours, theirs in zip([*found.grads, found.params], [*expected.grads, expected.params], strict=True):
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        yield from ((ours[name], theirs[name]) for name in theirs)


def error(found: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Relative to the largest magnitude of the tensor, where that is above `floor`."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    difference = (found - expected).abs().max() / expected.abs().max().clamp_min(floor)
    return float(difference.nan_to_num(torch.inf))


def spelled(plan: shardc.Plan) -> str:
    """params/after_forward/grads/optim as numbers of inner axes, '2/1/2/2' for hpZ."""
    return "/".join(map(str, plan.default))
