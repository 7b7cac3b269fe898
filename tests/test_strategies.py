"""Every strategy of the papers: its row, what it moves where, and that it trains as one process."""

from __future__ import annotations

import re

import pytest
import torch

import shardc
from shardc.cost import step_bytes
from shardc.strategies import STRATEGIES, Strategy, table
from test_numerics import AllRanks, all_ranks_error
from training import LIMIT, one_process, small

TWO = shardc.Topology(node=2, gpu=2)
THREE = shardc.Topology(node=2, gpu=2, gcd=2)
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}
FULL = 64 * 8 * 4
"""Bytes of one matrix."""
STEPS = (1, 2)


def made(strategy: Strategy, **options: object) -> shardc.Plan:
    return strategy.make(THREE if "3 levels" in strategy.name else TWO, **options)


def test_names_are_unique_and_paro_and_amsp_are_whole() -> None:
    assert len(BY_NAME) == len(STRATEGIES)
    assert sum(name.startswith("PaRO") for name in BY_NAME) == 14
    assert sum(name.startswith("AMSP") for name in BY_NAME) == 9


def test_two_names_of_one_strategy_are_one_plan() -> None:
    same = {"HSDP": "MiCS", "PaRO III": "MiCS", "PaRO NNN": "DDP", "PaRO NNG": "ZeRO-1", "PaRO NGG": "ZeRO-2"}
    for name, other in same.items():
        assert made(BY_NAME[name]) == made(BY_NAME[other])


HALF, QUARTER = FULL // 2, FULL // 4
PLACED: dict[str, dict[str, dict[str, int]]] = {
    # strategy -> move -> axis -> bytes a rank sends in a step; of an all-reduce both times around
    "DDP": {"sync": {"gpu+node": 3 * HALF}},
    "ZeRO-1": {"refresh": {"gpu": HALF, "node": QUARTER}, "sync": {"gpu": HALF, "node": QUARTER}},
    "ZeRO-2": {"refresh": {"gpu": HALF, "node": QUARTER}, "reduce": {"gpu": HALF, "node": QUARTER}},
    "ZeRO-3 = FSDP": {
        "forward gather": {"gpu": HALF, "node": QUARTER},
        "backward gather": {"gpu": HALF, "node": QUARTER},
        "reduce": {"gpu": HALF, "node": QUARTER},
    },
    "FSDP, no reshard": {"forward gather": {"gpu": HALF, "node": QUARTER}, "reduce": {"gpu": HALF, "node": QUARTER}},
    "MiCS": {
        "forward gather": {"gpu": HALF},
        "backward gather": {"gpu": HALF},
        "reduce": {"gpu": HALF},
        "sync": {"node": HALF},
    },
    "hpZ": {
        "forward gather": {"gpu": HALF, "node": QUARTER},
        "backward gather": {"gpu": HALF},
        "reduce": {"gpu": HALF, "node": QUARTER},
    },
    "PaRO NNI": {"refresh": {"gpu": HALF}, "sync": {"gpu": HALF, "node": HALF}},
    "PaRO NII": {"refresh": {"gpu": HALF}, "reduce": {"gpu": HALF}, "sync": {"node": HALF}},
    "PaRO INI": {
        "forward gather": {"gpu": HALF},
        "backward gather": {"gpu": HALF},
        "sync": {"gpu": HALF, "node": HALF},
    },
    "PaRO NIG": {
        "refresh": {"gpu": HALF, "node": QUARTER},
        "reduce": {"gpu": HALF},
        "sync": {"node": QUARTER},
    },
    "PaRO ING": {
        "refresh": {"node": QUARTER},
        "forward gather": {"gpu": HALF},
        "backward gather": {"gpu": HALF},
        "sync": {"gpu": HALF, "node": QUARTER},
    },
    "PaRO IIG": {
        "refresh": {"node": QUARTER},
        "forward gather": {"gpu": HALF},
        "backward gather": {"gpu": HALF},
        "reduce": {"gpu": HALF},
        "sync": {"node": QUARTER},
    },
    "PaRO IGG": {
        "refresh": {"node": QUARTER},
        "forward gather": {"gpu": HALF},
        "backward gather": {"gpu": HALF},
        "reduce": {"gpu": HALF, "node": QUARTER},
    },
    "PaRO GNG": {
        "forward gather": {"gpu": HALF, "node": QUARTER},
        "backward gather": {"gpu": HALF, "node": QUARTER},
        "sync": {"gpu": HALF, "node": QUARTER},
    },
    "PaRO GIG": {
        "forward gather": {"gpu": HALF, "node": QUARTER},
        "backward gather": {"gpu": HALF, "node": QUARTER},
        "reduce": {"gpu": HALF},
        "sync": {"node": QUARTER},
    },
}


@pytest.mark.parametrize("name", PLACED)
def test_a_strategy_moves_what_its_paper_says_over_each_axis(name: str) -> None:
    moved = step_bytes(made(BY_NAME[name]), {"w": ((64, 8), torch.float32, True)}, 1)
    found: dict[str, dict[str, int]] = {}
    for (move, axis), size_bytes in moved.items():
        if size_bytes:
            found.setdefault(move, {})[axis] = size_bytes
    assert found == PLACED[name]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_strategy_trains_as_one_process(name: str) -> None:
    plan = made(BY_NAME[name])
    if not (plan.gather_wire or plan.reduce_wire):
        assert all_ranks_error(plan, STEPS) < LIMIT
        return
    ranks, expected = AllRanks(plan), one_process(plan.topology.world, STEPS)
    for step, count in enumerate(STEPS):
        assert ranks.step(step, count) == pytest.approx(expected.losses[step], rel=0.05)
        ranks.update()


def test_the_table_has_a_row_a_strategy_and_names_those_that_need_other_axes() -> None:
    text = table(shardc.Topology(node=4, gpu=8), 7.0, 1)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert all(name in rows for name in BY_NAME if "3 levels" not in name)
    assert "Frontier, 3 levels: frontier needs three axes" in text
    # 7e9 in bf16: 14 GB; a rank sends 3 x 7/8 of it inside a host, and 3 x 3/4 of an eighth between hosts.
    assert f"{3 * 14 * 7 / 8:.2f}" in rows["ZeRO-3 = FSDP"] and f"{3 * 14 / 8 * 3 / 4:.2f}" in rows["ZeRO-3 = FSDP"]
    assert re.search(
        r"Frontier, 3 levels +gcd +gcd +gcd\+gpu +all ", table(shardc.Topology(node=4, gpu=4, gcd=2), 1.0, 1)
    )


def test_strategies_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    shardc.strategies(TWO, billions=1.0)
    assert "PaRO IIG" in capsys.readouterr().out


# What wires lose


def test_quantization_error_is_small_in_int8_larger_in_int4_and_only_of_what_has_a_wire() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    x = torch.randn(8, 64)
    model(x).square().mean().backward()
    program = shardc.trace(model, shardc.Plan.zeropp(TWO), x)
    lost = shardc.quantization_error(program, dict(model.named_parameters()))
    assert lost.keys() == {"0.weight", "1.weight"}
    for name in lost:
        assert 0.001 < lost[name].gather < 0.02
        assert lost[name].reduce is not None and 0.02 < lost[name].reduce < 0.3
    model.zero_grad()
    assert shardc.quantization_error(program, dict(model.named_parameters()))["0.weight"].reduce is None
    with pytest.raises(shardc.Error, match="lacks '0.weight'"):
        shardc.quantization_error(program, dict(small().named_parameters()))
