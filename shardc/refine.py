"""Refine: memory that a plan leaves over buys less communication, layer by layer.

The best plan for the whole model gathers every layer in every forward and backward, or none. Between the two some
layers may keep their parameters on a lower rung, or in full from their forward to their backward (AMSP and DeepCompile,
arXiv 2311.00257 and 2504.09983, choose such layers greedily). Which of them is a small integer program over groups of
equal parameters, solved exactly (HiGHS): the least time of the busiest lane, in the memory that is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from shardc.cost import by_axis, step_bytes
from shardc.plan import Parameter, Plan
from shardc.predict import Prediction, Predictor
from shardc.rest import held_bytes, state_bytes
from shardc.times import bandwidth_us

WORTH = 0.01
"""Of a step, what a plan with overrides has to be faster by, for what it is harder to read."""
RESERVE = 0.01
"""Of memory, what is left free."""
TRIES = 4
"""Where a choice holds more than its closed form says, the next has so much less to spend."""


class Choice(NamedTuple):
    """Rungs of a group: where it rests between micro-batches, and between a forward and its backward."""

    params: int
    after_forward: int


class Group(NamedTuple):
    """Equal layers, or a parameter that is in none."""

    patterns: tuple[str, ...]
    """of each, in the order of the model"""
    parameters: Mapping[str, Parameter]
    """of one"""


def refined(
    prediction: Prediction,
    predictor: Predictor,
    parameters: Mapping[str, nn.Parameter],
    micro_batches: int,
    memory_bytes: int,
    optimizer_states: int,
) -> Prediction | None:
    """A better plan than one for the whole model that was foretold; None where there is none that is worth it."""
    groups = _groups(predictor, parameters)
    share = max(predictor.traced) / predictor.depth if predictor.depth else 1.0
    spare = int(memory_bytes * (1 - RESERVE) - prediction.peak_bytes)
    for _ in range(TRIES):
        chosen = choose(prediction, groups, micro_batches, spare)
        if not chosen:
            return None
        few = _with_overrides(prediction.plan, groups, chosen, share)
        better = predictor.changed(prediction, few, micro_batches, optimizer_states=optimizer_states)
        over = better.peak_bytes - memory_bytes * (1 - RESERVE)
        if over <= 0:
            faster = better.step_us < (1 - WORTH) * prediction.step_us
            return replace(better, plan=_with_overrides(prediction.plan, groups, chosen, 1.0)) if faster else None
        spare -= int(over)
    return None


def _groups(predictor: Predictor, parameters: Mapping[str, nn.Parameter]) -> list[Group]:
    of_layer: defaultdict[str, dict[str, Parameter]] = defaultdict(dict)
    for name, p in parameters.items():
        of_layer[predictor.layer_of(name) or name][name] = (tuple(p.shape), p.dtype, p.requires_grad)
    alike: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
    for layer, own in of_layer.items():
        alike[tuple(own.values()) if layer not in own else (layer,)].append(layer)
    return [
        Group(tuple(name if name in parameters else f"{name}.*" for name in layers), of_layer[layers[0]])
        for layers in alike.values()
    ]


def choose(
    prediction: Prediction, groups: Sequence[Group], micro_batches: int, spare_bytes: int
) -> list[dict[Choice, int]] | None:
    """Of each group, how many go on other rungs than the plan's; None where the closed forms see too little to gain."""
    plan = prediction.plan
    own = Choice(plan.params, plan.after_forward)
    choices = [own, *(c for p in range(plan.optim + 1) for a in range(p + 1) if (c := Choice(p, a)) != own)]
    costs = [[_cost(plan, group, choice, micro_batches) for choice in choices] for group in groups]
    counts = [len(group.patterns) for group in groups]
    now = np.sum([n * of_group[0].lanes_us for n, of_group in zip(counts, costs, strict=True)], 0)
    least_us = prediction.compute_us
    found = _solved(costs, counts, least_us, spare_bytes)
    lanes_us = [np.array([cost.lanes_us for cost in of_group]) for of_group in costs]
    then = np.sum([n @ of_group for n, of_group in zip(found, lanes_us, strict=True)], 0)
    if max(least_us, *then) > (1 - WORTH) * max(least_us, *now):
        return None
    return [{c: int(n) for c, n in zip(choices[1:], of_group[1:], strict=True) if n} for of_group in found]


class Cost(NamedTuple):
    """Of one of a group."""

    lanes_us: np.ndarray
    """in a step, at full bandwidth"""
    held_bytes: int
    """at rest beside the master, and between a forward and its backward"""


def _cost(plan: Plan, group: Group, choice: Choice, micro_batches: int) -> Cost:
    row = with_rows(plan, dict.fromkeys(group.parameters, choice))
    held = state_bytes(row, group.parameters)["copies"] + held_bytes(row, group.parameters)
    lanes_us: Counter[str] = Counter()
    for axis, sent_bytes in by_axis(step_bytes(row, group.parameters, micro_batches)).items():
        for lane in plan.topology.lanes(axis):
            lanes_us[lane] += bandwidth_us(plan.topology, "all_gather", axis, sent_bytes)  # type: ignore[assignment]
    lanes = dict.fromkeys(lane for axis in plan.topology.axes for lane in plan.topology.lanes(axis))
    return Cost(np.array([lanes_us[lane] for lane in lanes]), held)


def _solved(
    costs: Sequence[Sequence[Cost]], counts: Sequence[int], least_us: float, spare_bytes: int
) -> list[np.ndarray]:
    """How many of each group take each choice; the first is what they have now."""
    choices, lanes = len(costs[0]), len(costs[0][0].lanes_us)
    lanes_us = np.array([cost.lanes_us for of_group in costs for cost in of_group])
    more = np.array([cost.held_bytes - of_group[0].held_bytes for of_group in costs for cost in of_group])
    whole = np.kron(np.eye(len(counts)), np.ones(choices))
    width = len(costs) * choices
    rules = [
        LinearConstraint(np.c_[whole, np.zeros(len(counts))], counts, counts),
        LinearConstraint(np.c_[lanes_us.T, -np.ones(lanes)], -np.inf, 0),
        LinearConstraint(np.r_[more, 0][None], -np.inf, max(0, spare_bytes)),
    ]
    among_equals = 1e-4 * lanes_us.sum(1)
    bounds = Bounds(np.r_[np.zeros(width), least_us], np.r_[np.repeat(counts, choices), np.inf])
    found = milp(np.r_[among_equals, 1], constraints=rules, bounds=bounds, integrality=np.r_[np.ones(width), 0])
    assert found.x is not None, found.message  # what is now satisfies all rules
    return np.split(np.rint(found.x[:-1]), len(counts))


def _with_overrides(plan: Plan, groups: Sequence[Group], chosen: Sequence[Mapping[Choice, int]], share: float) -> Plan:
    """The last layers get the lowest rungs: their backward comes first. `share`: of the layers, how many there are."""
    rows: dict[str, Choice] = {}
    for group, of_group in zip(groups, chosen, strict=True):
        there = group.patterns[: round(share * len(group.patterns))] if len(group.patterns) > 1 else group.patterns
        for choice, n in sorted(of_group.items(), key=lambda item: item[0].after_forward):
            taken = round(share * n) if len(group.patterns) > 1 else n
            rows |= dict.fromkeys(there[len(there) - taken :], choice)
            there = there[: len(there) - taken]
    return with_rows(plan, rows)


def with_rows(plan: Plan, rows: Mapping[str, Choice]) -> Plan:
    """The plan with other rungs for parameters that match patterns."""
    more = ((pattern, tuple(choice._asdict().items())) for pattern, choice in rows.items())
    return replace(plan, overrides=(*plan.overrides, *more))
