"""Bytes: what passes through the process groups is what the plan's closed form says, axis by axis, micro-step by micro-step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from passes.errors import Error
from shardc.cost import MOVES, by_axis, micro_step_bytes, step_bytes
from shardc.plan import Parameter
from shardc.testing import Sent, count_bytes
from world import run

MICRO_BATCHES = 4
TOPOLOGY = shardc.Topology(node=2, gpu=2)
PRESETS = {
    "DDP": shardc.Plan.ddp(TOPOLOGY),
    "ZeRO-1": shardc.Plan.zero1(TOPOLOGY),
    "ZeRO-2": shardc.Plan.zero2(TOPOLOGY),
    "ZeRO-3": shardc.Plan.zero3(TOPOLOGY),
    "MiCS": shardc.Plan.mics(TOPOLOGY),
    "hpZ": shardc.Plan.hpz(TOPOLOGY),
    **{letters: shardc.Plan.paro(TOPOLOGY, letters) for letters in ("NIG", "IIG", "IGG", "ING")},
}
CASES = {
    **{(name, False): plan for name, plan in PRESETS.items()},
    ("bf16 on the wire", False): shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16),
    **{(name, True): PRESETS[name] for name in ("ZeRO-2", "hpZ", "IIG", "IGG")},
}
"""Plans by name and whether the model's rows are uneven."""


class Perceptron(nn.Module):
    """Three linear layers with biases. With `uneven`, 5, 7 and 9 rows divide by neither axis."""

    def __init__(self, uneven: bool):
        super().__init__()
        first, second, third = (5, 7, 9) if uneven else (8, 16, 4)
        self.first = nn.Linear(12, first)
        self.second = nn.Linear(first, second)
        self.third = nn.Linear(second, third)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.third(torch.tanh(self.second(x))).square().mean()


REGATHERED = ("second.weight", "third.weight")
"""A bias has no part in any gradient, and the first weight is only needed for the gradient of the input, which nobody wants."""


def described(model: nn.Module) -> dict[str, Parameter]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


def counted(case: tuple[str, bool], steps: int = 2) -> list[dict[str, int]]:
    """Bytes of every micro-step of the last of some optimizer steps, on the ranks of the running process group."""
    torch.manual_seed(0)
    model = shardc.compile(Perceptron(case[1]), CASES[case], backend="eager", progress=lambda line: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[dict[str, int]] = []
    with count_bytes(model) as sent:
        for _ in range(steps):
            found = [dict(part) for part in _micro_steps(model, sent)]
            optimizer.step()
            optimizer.zero_grad()
    return found


def _micro_steps(model: nn.Module, sent: Sent) -> Iterator[Sent]:
    for index in range(MICRO_BATCHES):
        model.set_requires_gradient_sync(index == MICRO_BATCHES - 1)
        model(torch.ones(2, 12)).backward()
        yield sent.taken()


def counted_cases() -> dict[tuple[str, bool], list[dict[str, int]]]:
    return {case: counted(case) for case in CASES}


@pytest.fixture(scope="module")
def measured() -> list[dict[tuple[str, bool], list[dict[str, int]]]]:
    """By rank; one launch for all cases."""
    return run(counted_cases, TOPOLOGY.world)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{' uneven' * case[1]}")
def test_each_axis_moves_what_the_closed_form_says(measured, case):
    parameters = described(Perceptron(case[1]))
    expected = [
        by_axis(micro_step_bytes(CASES[case], parameters, MICRO_BATCHES, index, regathered=REGATHERED))
        for index in range(MICRO_BATCHES)
    ]
    for rank, found in enumerate(measured):
        assert found[case] == expected, f"rank {rank}"
