"""Every way to write a loop gives what it gives in one process."""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardc
from loops import (
    COMPILED,
    LOOPS,
    OPTIMIZERS,
    Loop,
    compiled,
    of_lengths,
    run_loops,
    small_gpt,
    too_far,
    with_optimizer,
    worst,
)
from world import run

TOPOLOGY = shardc.Topology(node=2, gpu=1)
IIG, ZERO3 = shardc.Plan.paro(TOPOLOGY, "IIG"), shardc.Plan.zero3(TOPOLOGY)
BF16_LIMIT = 1e-3
"""Muon orthogonalises in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "loops"), [(IIG, LOOPS[::2]), (ZERO3, LOOPS[1::2])], ids=["IIG", "zero3"])
def test_every_loop_trains_as_in_one_process(plan: shardc.Plan, loops: list[Loop]) -> None:
    """Each under one plan; `examples/bench/loops.py` has all."""
    names = [loop.__name__ for loop in loops]
    assert too_far(run(run_loops, 2, names, plan, "eager")[0]) == {}


@pytest.mark.slow
def test_compiled_loops_train_as_in_one_process() -> None:
    names = [loop.__name__ for loop in COMPILED]
    assert too_far(run(run_loops, 2, names, IIG, "inductor")[0]) == {}


@pytest.mark.slow
def test_every_optimizer_that_takes_dtensors_trains_as_in_one_process() -> None:
    errors = run(run_optimizers, 2)[0]
    assert errors.pop("Muon {}") <= BF16_LIMIT
    assert too_far(errors) == {}


def run_optimizers() -> dict[str, float]:
    """One model for all: it starts from the same values each time."""
    reference, model = small_gpt(), compiled(small_gpt(), IIG, "eager")
    start = copy.deepcopy(model.state_dict())
    errors = {}
    for name, options in OPTIMIZERS:
        model.load_state_dict(start)
        errors[f"{name} {options}"] = worst(
            partial(with_optimizer, name=name, options=options), model, copy.deepcopy(reference)
        )
    return errors


# Shapes


DYNAMIC = [3, 4, 3]
"""None is 2, the batch size: torch takes dims that are equal at first for one."""


def dynamic_lengths() -> tuple[list[float], int]:
    model = shardc.compile(small_gpt(), IIG, dynamic=True, progress=lambda line: None)
    return of_lengths(model, DYNAMIC), len(shardc.programs(model))


@pytest.mark.slow
def test_dynamic_dims_take_one_program() -> None:
    losses, programs = run(dynamic_lengths, 2)[0]
    torch.testing.assert_close(losses, of_lengths(small_gpt(), DYNAMIC))
    assert programs == 1


def bounded_lengths() -> tuple[int, list[str]]:
    """Only rank 1 meets many lengths."""
    importlib.import_module("shardc.compile").SIGNATURES = 2
    model = compiled(small_gpt(), IIG, "eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_lengths(model, [2, 3, 4, 3, 2, 4] if dist.get_rank() == 1 else [2] * 6)
    return len(shardc.programs(model)), [str(w.message) for w in caught if str(w.message).startswith("shardc")]


@pytest.mark.slow
def test_programs_are_bounded_on_each_rank_with_one_warning() -> None:
    (few, silent), (bounded, warned) = run(bounded_lengths, 2)
    assert (few, silent) == (1, [])
    assert bounded <= 2
    assert len(warned) == 1 and "was called with 2 signatures" in warned[0]
