"""The order of collectives is decided once: ranks that feed different shapes still meet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardc
from passes import ops
from world import run

LENGTHS = {(step, rank): 3 + (5 * step + 7 * rank) % 11 for step in range(4) for rank in range(4)}
"""A sequence length of its own for every rank, another one in every step."""


class Ragged(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.embed.weight), ids)


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(17, (LENGTHS[step, rank],), generator=generator)


def alone(micro_batches: int) -> list[float]:
    """One process, all ranks' batches one after the other."""
    torch.manual_seed(0)
    model = Ragged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for first in range(0, 4, micro_batches):
        steps = range(first, first + micro_batches)
        total = sum(model(batch(step, rank)) for step in steps for rank in range(4)) / 4
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def ragged(micro_batches: int) -> list[float]:
    torch.manual_seed(0)
    topology = shardc.Topology(node=2, gpu=2)
    plan = shardc.Plan.paro(topology, "IIG")
    model = shardc.compile(Ragged(), plan, backend="eager", progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for first in range(0, 4, micro_batches):
        mean = torch.zeros(())
        for step in range(first, first + micro_batches):
            model.set_requires_gradient_sync(step == first + micro_batches - 1)
            loss = model(batch(step, dist.get_rank()))
            loss.backward()
            mean += loss.detach() / 4
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_rank_feeds_its_own_lengths_changing_every_step(micro_batches: int):
    for losses in run(ragged, 4, micro_batches):
        torch.testing.assert_close(losses, alone(micro_batches), rtol=1e-5, atol=1e-6)


def cleared_half_way() -> list[torch.Tensor]:
    """The first micro-batch weighs nothing, so that the rank that drops its gradients changes none."""
    torch.manual_seed(0)
    plan = shardc.Plan.paro(shardc.Topology(node=2, gpu=2), "IIG")
    model = shardc.compile(Ragged(), plan, backend="eager", progress=lambda text: None)
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        (step * model(batch(step, dist.get_rank()))).backward()
        if step == 0 and dist.get_rank() == 0:
            model.zero_grad()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_a_rank_that_drops_its_gradients_half_way_keeps_to_the_order_of_the_others():
    torch.manual_seed(0)
    model = Ragged()
    (sum(model(batch(1, rank)) for rank in range(4)) / 4).backward()
    for grads in run(cleared_half_way, 4):
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()], rtol=1e-5, atol=1e-6)


class TwoOrders(nn.Module):
    """Long inputs use the parameters in another order than short ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (self.a, self.b) if len(x) < 4 else (self.b, self.a)
        return first(x).sum() * second(x).sum()


def two_orders() -> list[float]:
    torch.manual_seed(0)
    plan = shardc.Plan.zero3(shardc.Topology(node=1, gpu=2))
    model = shardc.compile(TwoOrders(), plan, backend="eager", progress=lambda text: None)
    x = torch.ones(2 + 4 * dist.get_rank(), 4)
    loss = model(x)
    loss.backward()
    return [loss.item(), model.a.weight.grad.full_tensor().sum().item()]


def test_ranks_whose_first_batches_use_the_parameters_in_different_orders_follow_rank_0():
    torch.manual_seed(0)
    model = TwoOrders()
    losses = [model(torch.ones(2, 4)), model(torch.ones(6, 4))]
    (sum(losses) / 2).backward()
    found = run(two_orders, 2)
    torch.testing.assert_close([loss for loss, _ in found], [loss.item() for loss in losses])
    torch.testing.assert_close(found[0][1], model.a.weight.grad.sum().item())


class TwoBuckets(nn.Module):
    """Long inputs need a weight in another block than short ones, so they would pack it with others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(nn.Linear(4, 4)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, self.scale if i == (len(x) > 4) else None)
        return x.sum()


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return self.layer(x) if scale is None else self.layer(x) * scale


def packed(rows: int) -> list[tuple[str, ...]]:
    """What each gather of a forward carries, as one rank alone would have it."""
    plan = shardc.Plan.zero3(shardc.Topology(node=1, gpu=2))
    graph = shardc.trace(TwoBuckets(), plan, torch.ones(rows, 4)).forward
    return [ops.hop(start).params for start in ops.hops(graph, "gather")]


def two_buckets() -> tuple[list[tuple[str, ...]], float, float]:
    torch.manual_seed(0)
    plan = shardc.Plan.zero3(shardc.Topology(node=1, gpu=2))
    model = shardc.compile(TwoBuckets(), plan, backend="eager", progress=lambda text: None)
    loss = model(torch.ones(2 + 4 * dist.get_rank(), 4))
    loss.backward()
    sent = [ops.hop(start).params for start in ops.hops(shardc.programs(model)[0].forward, "gather")]
    return sent, loss.item(), model.scale.grad.full_tensor().sum().item()


def test_ranks_that_would_pack_buckets_differently_follow_rank_0():
    assert packed(2) != packed(6)
    torch.manual_seed(0)
    model = TwoBuckets()
    losses = [model(torch.ones(2, 4)), model(torch.ones(6, 4))]
    (sum(losses) / 2).backward()
    found = run(two_buckets, 2)
    for (sent, value, grad), loss in zip(found, losses, strict=True):
        assert sent == packed(2)
        torch.testing.assert_close([value, grad], [loss.item(), model.scale.grad.sum().item()])
