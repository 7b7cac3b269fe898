"""Bytes: what passes through the process groups is what the closed form says, by axis and micro-step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
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
WIRES = {"wire_block": 8, "wire_except": ["*bias"]}
IN_WIRES = (
    shardc.Plan.zero3(TOPOLOGY, gather_wire={"node": "int8"}, reduce_wire={"node": "int4", "gpu": "int8"}, **WIRES),
    shardc.Plan.hpz(TOPOLOGY, gather_wire={"node": "int4", "gpu": "fp8"}, reduce_wire={"gpu": "bf16"}, **WIRES),
    shardc.Plan.paro(TOPOLOGY, "IIG", gather_wire={"node": "int8"}, reduce_wire={"node": "int4"}, **WIRES),
)
FLAT = (
    shardc.Plan.zero3(TOPOLOGY, chain="flat"),
    shardc.Plan.ddp(TOPOLOGY, chain="flat"),
    shardc.Plan.hpz(TOPOLOGY, chain="flat", gather_wire={"node": "int8"}, reduce_wire={"gpu": "int4"}, **WIRES),
)
CASES = {
    **{(name, False): plan for name, plan in PRESETS.items()},
    ("bf16 on the wire", False): shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16),
    **{(name, True): PRESETS[name] for name in ("ZeRO-2", "hpZ", "IIG", "IGG")},
    **{(f"{plan.default} flat", uneven): plan for plan in FLAT for uneven in (False, True)},
    **{(f"{plan.default} in wires", uneven): plan for plan in IN_WIRES for uneven in (False, True)},
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
"""No gradient depends on a bias, and only that of the input, which nobody wants, on the first weight."""


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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{' uneven' * case[1]}")
def test_each_axis_moves_what_the_closed_form_says(measured, case):
    parameters = described(Perceptron(case[1]))
    expected = [
        by_axis(micro_step_bytes(CASES[case], parameters, MICRO_BATCHES, index, regathered=REGATHERED))
        for index in range(MICRO_BATCHES)
    ]
    for rank, found in enumerate(measured):
        assert list(map(nonzero, found[case])) == list(map(nonzero, expected)), f"rank {rank}"


def nonzero(sent: dict[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in sent.items() if size}


ONE_MATRIX: dict[str, Parameter] = {"w": ((16, 8), torch.float32, True)}
"""512 bytes."""


def test_iig_moves_by_hand():
    moved = step_bytes(PRESETS["IIG"], ONE_MATRIX, MICRO_BATCHES)
    assert {key: sent for key, sent in moved.items() if sent} == {
        ("refresh", "node"): 128,  # half of the 256 bytes that rest on gpu
        ("forward gather", "gpu"): 4 * 256,
        ("backward gather", "gpu"): 4 * 256,
        ("reduce", "gpu"): 4 * 256,
        ("sync", "node"): 128,
    }


def test_hpz_keeps_the_backward_inside_the_node():
    moved = step_bytes(PRESETS["hpZ"], ONE_MATRIX, 1)
    assert moved["forward gather", "node"] == 128
    assert moved["backward gather", "node"] == 0
    assert moved["backward gather", "gpu"] == 256


def test_zero_on_one_axis_moves_the_model_two_and_three_times():
    """ZeRO (arXiv 1910.02054), section 7: 2 Phi for DDP and stages 1 and 2, 3 Phi for stage 3; here (n-1)/n of it."""
    line = shardc.Topology(gpu=8)
    times = {shardc.Plan.ddp: 2, shardc.Plan.zero1: 2, shardc.Plan.zero2: 2, shardc.Plan.zero3: 3}
    for preset, expected in times.items():
        assert by_axis(step_bytes(preset(line), ONE_MATRIX, 1)) == {"gpu": expected * 512 * 7 // 8}


def test_dtypes_frozen_and_unused_parameters():
    plan = shardc.Plan.zero3(shardc.Topology(gpu=2), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parameters = {**ONE_MATRIX, "frozen": ((16, 8), torch.float32, False), "unused": ((16, 8), torch.float32, True)}
    moved = step_bytes(plan, parameters, 1, used=["w", "frozen"], regathered=["w"])
    assert {move: moved[move, "gpu"] for move in MOVES} == {
        "refresh": 0,
        "forward gather": 2 * 128,
        "backward gather": 128,
        "reduce": 256,
        "sync": 0,
    }


def test_uneven_rows_travel_padded():
    # 5 rows on 2 x 2 lie as 2 + 1 and 1 + 1: four pieces of two rows.
    moved = step_bytes(PRESETS["ZeRO-2"], {"w": ((5, 4), torch.float32, True)}, 1)
    assert moved["reduce", "gpu"] == 8 * 16 // 2


def test_what_is_taken_is_what_was_sent_since():
    sent = Sent({"gpu": 0, "node": 0})
    sent.add("gpu", "all_gather", 64, 4)
    assert sent.taken() == {"gpu": 48, "node": 0}
    sent.add("gpu", "all_reduce", 64, 4)
    part = sent.taken()
    assert part == {"gpu": 96, "node": 0}
    assert part.by_kind == {("gpu", "all_reduce"): 96}
    assert sent == {"gpu": 144, "node": 0}
    assert sent.by_kind == {("gpu", "all_gather"): 48, ("gpu", "all_reduce"): 96}


def test_only_a_compiled_model_is_counted():
    with pytest.raises(Error, match="Linear is not a compiled model"), count_bytes(nn.Linear(2, 2)):
        pass
