"""The matrix: models x plans x backends x micro-batches, each against training in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from models import MODELS, Call
from training import LIMIT, adamw, batch, error

STEPS = 2


class Case(NamedTuple):
    model: str
    plan: str
    backend: str
    micro_batches: int


def plans_of(topology: shardc.Topology) -> dict[str, shardc.Plan]:
    """One with every kind of state, one with none, one with full copies, one that gathers twice in different ways."""
    make = shardc.Plan
    return {
        "IIG": make.paro(topology, "IIG"),
        "zero3": make.zero3(topology),
        "zero1": make.zero1(topology),
        "hpz": make.hpz(topology),
    }


def quietly(model: nn.Module, plan: shardc.Plan, backend: str = "eager", **options: object) -> nn.Module:
    return shardc.compile(model, plan, backend=backend, progress=lambda line: None, **options)


def errors_of(cases: Sequence[Case], topology: shardc.Topology) -> dict[Case, float]:
    """The worst error of each case over all ranks; to be run on each."""
    worst = torch.tensor([max(_errors(case, plans_of(topology)[case.plan])) for case in cases])
    if dist.get_world_size() > 1:
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return dict(zip(cases, worst.tolist(), strict=True))


def too_far(errors: Mapping[Case, float]) -> dict[Case, float]:
    return {case: e for case, e in errors.items() if not e <= LIMIT}


def table(errors: Mapping[Case, float]) -> str:
    """A row a model; a column for each plan, backend and number of micro-batches."""
    columns = list(dict.fromkeys(case[1:] for case in errors))
    models = list(dict.fromkeys(case.model for case in errors))
    width = max(map(len, models)) + 2
    heads = [f"{plan} {backend} x{micro}" for plan, backend, micro in columns]
    lines = ["worst relative error".ljust(width) + "".join(f"{head:>20}" for head in heads)]
    for model in models:
        cells = [errors.get(Case(model, *column)) for column in columns]
        lines.append(model.ljust(width) + "".join(f"{'' if e is None else f'{e:.1e}':>20}" for e in cells))
    return "\n".join([*lines, f"worst {max(errors.values()):.1e}, limit {LIMIT:.0e}"])


def _errors(case: Case, plan: shardc.Plan) -> Iterator[float]:
    """Of losses, gradients, parameters and this rank's buffers."""
    make, call = MODELS[case.model]
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    torch.manual_seed(0)
    reference = make().to(device)
    ranks = [_sharing_parameters(reference) for _ in range(dist.get_world_size())]
    model = quietly(copy.deepcopy(reference), plan, case.backend)
    ours, theirs = adamw(model.parameters(), lr=1e-3), adamw(reference.parameters(), lr=1e-3)
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            last = micro == case.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                loss = call(model, step, *_batch(step, micro, dist.get_rank(), device))
                loss.backward()
            yield error(mean(loss.detach()), _reference_backward(ranks, call, step, micro))
        yield from _gradient_errors(model, reference)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    smallest = _floor(reference.parameters())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        yield error(p.detach().full_tensor(), q.detach(), smallest)
    for b, c in zip(model.buffers(), ranks[dist.get_rank()].buffers(), strict=True):
        yield error(b.double(), c.double())


def _sharing_parameters(model: nn.Module) -> nn.Module:
    """A copy with buffers of its own, such as the running statistics of a rank."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def _reference_backward(ranks: list[nn.Module], call: Call, step: int, micro: int) -> Tensor:
    """The mean loss over the batches of all ranks; its gradients are added."""
    device = next(ranks[0].parameters()).device
    total = torch.zeros((), device=device)
    for rank, replica in enumerate(ranks):
        loss = call(replica, step, *_batch(step, micro, rank, device)) / len(ranks)
        loss.backward()
        total += loss.detach()
    return total


def _batch(step: int, micro: int, rank: int, device: torch.device | str) -> list[Tensor]:
    return [x.to(device) for x in batch(step, micro, rank)]


def _gradient_errors(model: nn.Module, reference: nn.Module) -> Iterator[float]:
    smallest = _floor(q.grad for q in reference.parameters() if q.grad is not None)
    for (name, p), (same_name, q) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert (name, p.grad is None) == (same_name, q.grad is None)
        if p.grad is not None:
            yield error(p.grad.full_tensor(), q.grad, smallest)


def _floor(tensors: Iterable[Tensor]) -> float:
    """What is zero but for rounding (the bias of keys, or before a normalisation) is measured against the others."""
    return 1e-2 * max(float(t.detach().abs().max()) for t in tensors)


def mean(value: Tensor) -> Tensor:
    """Over all ranks."""
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
