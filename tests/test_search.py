"""The search: nothing legal is left out, closed forms are bounds, and the best is the best."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import shardc
from passes.errors import Error
from shardc.__main__ import main
from shardc.cost import step_bytes
from shardc.links import Device, Link
from shardc.model import named
from shardc.plan import bytes_of
from shardc.predict import Prediction, Predictor, predicted
from shardc.refine import Cost, _solved, refined
from shardc.rest import state_bytes
from shardc.search import TOLERANCE, Found
from shardc.space import Factors, Space, Wiring, facts_of, rows, wirings
from shardc.times import bandwidth_us
from shardc.topology import Topology
from test_predict import IDS, deep

FAST, SLOW = Link(50.0, 3.0), Link(2.0, 10.0)
DEVICE = Device("a device", 100, 1000, 80)
TWO = Topology(node=2, gpu=2).with_links(DEVICE, node=SLOW, gpu=FAST)
FOUR = Topology(node=2, gpu=4).with_links(DEVICE, node=SLOW, gpu=FAST)
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": None}


def space_of(topology: Topology, micro_batches: int = 1) -> tuple[Space, Predictor]:
    model, base = deep(4), shardc.Plan.zero3(topology, **BF16)
    predictor = Predictor(model, base, IDS)
    return Space(topology, facts_of(predictor, named(model), base), BF16, micro_batches, 2), predictor


# The space


def test_without_factors_inside_axes_rows_are_the_legal_plans() -> None:
    space, _ = space_of(TWO)
    found = {space.plan(row, Wiring()) for row in rows(TWO)}
    assert found == {shardc.Plan(TWO, **plan.default._asdict(), **BF16) for plan in shardc.Plan.legal(TWO)}


def test_factors_inside_axes_are_rows_too() -> None:
    assert len(list(rows(Topology(gpu=2)))) == 7
    assert len(list(rows(Topology(node=128, gpu=8)))) == 2431
    assert all(b % a == 0 for row in rows(Topology(gpu=6)) for a, b in product(row, row) if a <= b and {a, b} != {2, 3})
    assert not any({2, 3} <= {*row} for row in rows(Topology(gpu=6)))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_is_moved_is_what_plans_move(micro_batches: int) -> None:
    space, _ = space_of(FOUR, micro_batches)
    parameters = {n: (tuple(p.shape), p.dtype, True) for n, p in named(deep(4)).items()}
    even = {n: p for n, p in parameters.items() if p[0][0] % 8 == 0}
    assert even == parameters
    for row, wiring in product(rows(FOUR), wirings(FOUR, ["bf16"], ["bf16"])):
        if not space.is_legal(row, wiring):
            continue
        plan = space.plan(row, wiring)
        sent = step_bytes(plan, parameters, micro_batches, regathered=_regathered(parameters))
        by_move: dict[str, dict[str, float]] = {}
        for (move, axis), size_bytes in sent.items():
            of_move = by_move.setdefault(move, {})
            for lane in plan.topology.lanes(axis):
                of_move[lane] = of_move.get(lane, 0.0) + bandwidth_us(plan.topology, "", axis, size_bytes)
        for move, us in space.moved(row, wiring).items():
            assert us == pytest.approx([by_move[move].get("gpu", 0.0), by_move[move].get("node", 0.0)], rel=1e-3)


def _regathered(parameters: object) -> set[str]:
    """The weights whose products need them for the gradient of their input, but for what turns."""
    return {n for n in parameters if n.endswith("weight") and not n.startswith(("embed", "head"))}  # type: ignore[attr-defined]


def test_quantized_wires_cost_their_bits_and_a_scale_a_block() -> None:
    space, _ = space_of(FOUR)
    plain, wired = (space.moved(row, w) for row in [(8, 8, 8, 8)] for w in (Wiring(), Wiring("int8", 2, "int4", 2)))
    big = sum(n for group, n in space.facts.groups.items() if group.wired) / sum(space.facts.groups.values())
    assert wired["forward gather"][1] / plain["forward gather"][1] == pytest.approx(
        1 - big * (1 - (1 + 4 / 256) / 2), rel=1e-6
    )
    assert wired["reduce"][1] / plain["reduce"][1] == pytest.approx(1 - big * (1 - (0.5 + 4 / 256) / 2), rel=1e-6)


@cache
def predictions(micro_batches: int, memory: str) -> tuple[Space, dict[Factors, Prediction]]:
    """Of all rows, within a limit."""
    space, predictor = space_of(TWO, micro_batches)
    limit = bytes_of(memory)
    return space, {row: predictor(space.plan(row, Wiring()), micro_batches, memory_bytes=limit) for row in rows(TWO)}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_no_plan_takes_less_or_holds_less_than_its_bounds(micro_batches: int) -> None:
    space, found = predictions(micro_batches, "80GB")
    for row, it in found.items():
        assert it.step_us >= space.bound_us(row, Wiring())
        assert it.update_us == pytest.approx(space.update_us(row), rel=1e-3)
        assert it.peak_bytes >= space.rest_bytes(row)


# The search


def search(layers: int = 4, topology: Topology = TWO, **options: object) -> Found:
    return shardc.search(deep(layers), topology, IDS, progress=lambda text: None, **options)


@pytest.mark.parametrize(("micro_batches", "memory"), [(1, "80GB"), (1, "30MB"), (4, "80GB")])
def test_the_best_is_as_fast_as_any_that_fits(micro_batches: int, memory: str) -> None:
    found = search(micro_batches=micro_batches, memory=memory, most=25)
    limit = bytes_of(memory)
    _, all_of_them = predictions(micro_batches, memory)
    fastest_us = min(it.step_us for it in all_of_them.values() if it.peak_bytes <= limit)
    assert found.best.step_us <= fastest_us / (1 - TOLERANCE)
    assert found.best.holds_bytes <= limit
    assert found.gap <= TOLERANCE
    assert found.simulated < len(found.ranked)


def test_plans_are_ranked_and_say_why_they_are_not_the_best() -> None:
    found = search(memory="22MB")
    simulated = [c for c in found.ranked if c.prediction and c.holds_bytes <= found.memory_bytes]
    assert simulated == sorted(simulated, key=lambda c: c.step_us)
    assert found.plan.memory_limit == found.memory_bytes
    reasons = {c.row: found.why(c) for c in found.ranked}
    assert reasons[found.best.row] == ""
    assert all(why for row, why in reasons.items() if row != found.best.row)
    assert "more than there is" in reasons[1, 1, 1, 1]


def test_memory_that_no_plan_meets_names_the_nearest() -> None:
    with pytest.raises(Error, match=r"No plan fits 1\.00 MiB a rank: the one that needs least needs .* more \("):
        search(memory="1MiB")


def test_wires_are_used_where_they_are_allowed() -> None:
    assert search().plan.gather_wire == ()
    found = search(memory="30MB", gather_wires=["int8"], reduce_wires=["int4"])
    assert found.plan.reduce_wire
    assert found.best.step_us < search(memory="30MB").best.step_us


def test_a_topology_without_links_is_refused() -> None:
    with pytest.raises(Error, match="does not say what its devices are"):
        search(topology=Topology(node=2, gpu=2))


# Layer by layer


def test_the_integer_program_finds_what_trying_all_finds() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        counts = [4, 3, 1]
        costs = [[Cost(random.uniform(1, 9, 2), int(held)) for held in (0, *random.integers(1, 9, 2))] for _ in counts]
        spare = int(random.integers(0, 30))
        found = _solved(costs, counts, 10.0, spare)

        def busy_us(taken: object, costs: object = costs) -> float:
            lanes = sum(
                n * cost.lanes_us for ns, of in zip(taken, costs, strict=True) for n, cost in zip(ns, of, strict=True)
            )
            return max(10.0, *lanes)

        def held(taken: object, costs: object = costs) -> int:
            return sum(
                n * cost.held_bytes for ns, of in zip(taken, costs, strict=True) for n, cost in zip(ns, of, strict=True)
            )

        ways = [[(n - a - b, a, b) for a in range(n + 1) for b in range(n + 1 - a)] for n in counts]
        fits = [taken for taken in product(*ways) if held(taken) <= spare]
        assert held(found) <= spare
        assert busy_us(found) <= min(map(busy_us, fits)) * 1.02


def test_spare_memory_keeps_some_layers_from_their_forward_to_their_backward() -> None:
    slow = Topology(node=4, gpu=2).with_links(DEVICE, node=Link(0.5, 10.0), gpu=FAST)
    model, base = deep(16), shardc.Plan.zero3(slow, **BF16)
    predictor = Predictor(model, base, IDS)
    plain = predictor(base, 2)
    limit = int(1.15 * plain.peak_bytes)
    better = refined(plain, predictor, named(model), 2, limit, 2)
    assert better
    layers = [pattern for pattern, _ in better.plan.overrides if pattern.startswith("layers.")]
    assert 0 < len(layers) < 16
    programs = [shardc.trace(model, it.plan, IDS, keep=False) for it in (better, plain)]
    steps_us = [predicted(program, 2).step_us for program in programs]
    assert steps_us[0] < steps_us[1]
    assert better.step_us == pytest.approx(steps_us[0], rel=0.03)
    assert predicted(programs[0], 2).peak_bytes <= limit


# What people see


def test_a_difference_between_plans_is_a_line_each() -> None:
    a, b = shardc.Plan.zero3(TWO), shardc.Plan.hsdp(TWO, param_dtype=torch.bfloat16)
    parameters = {n: (tuple(p.shape), p.dtype, True) for n, p in named(deep(4)).items()}
    assert shardc.Plan.diff(a, a, parameters) == ""
    lines = shardc.Plan.diff(a, b, parameters).splitlines()
    keys = [line.split("  ")[0] for line in lines]
    assert keys[:5] == ["params", "after_forward", "grads", "optim", "param_dtype"]
    assert lines[0].split() == ["params", "all", "(4", "ranks", "a", "copy)", "gpu", "(2", "ranks", "a", "copy)"]
    masters = [state_bytes(plan, parameters)["master"] for plan in (a, b)]
    assert f"{masters[0] / 2**20:.2f}" in shardc.Plan.diff(a, b, parameters)


def test_the_command_prints_the_table_and_writes_the_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology, out = tmp_path / "topology.json", tmp_path / "plan.json"
    topology.write_text(json.dumps(TWO.to_dict()))
    given = ["--model", "gpt", "--layers", "2", "--sequence", "64", "--topology", str(topology), "--out", str(out)]
    assert main(["plan", *given]) == 0
    printed = capsys.readouterr().out
    assert "plans looked at" in printed
    assert "why not" in printed
    assert str(shardc.Plan.load(out)) in printed
