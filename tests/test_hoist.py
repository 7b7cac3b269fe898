"""Hoist: reduces are issued early, lanes keep their order."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import shardc
from passes import ops
from passes.hoist import hoist
from passes.parse import parse
from shardc.fit import LEAST
from shardc.program import Program
from shardc.simulate import Clock
from test_simulate import PLANS, TOPOLOGY, Deep

BACKWARD = """\
def backward(w: f32[2, 4], tangents_1: f32[4, 4]):
    'layers.1'
    g1: f32[4, 4] = mm(tangents_1, tangents_1)
    r1: f32[2, 4] = reduce_scatter(g1, 'node', 2, purpose='reduce', params=['layers.1.w'])
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['layers.0.w'])
    f: f32[4, 4] = wait(a)
    g0: f32[4, 4] = mm(g1, f)
    r0: f32[2, 4] = reduce_scatter(g0, 'node', 2, purpose='reduce', params=['layers.0.w'])
    'embed'
    h: f32[4, 4] = mm(g0, g0)
    i: f32[4, 4] = mm(h, h)
    d0: f32[2, 4] = wait(r0)
    d1: f32[2, 4] = wait(r1)
    return {'layers.1.w': d1, 'layers.0.w': d0, 'embed.w': i}
"""


def events(text: str) -> str:
    return " ".join(node.name for node in hoist(parse(text)).nodes if node.op == "call_function")


def test_a_reduce_is_issued_behind_what_makes_its_gradient() -> None:
    late = BACKWARD.replace("    r0: f32[2, 4] = red", "    z: f32[4, 4] = mm(g0, f)\n    r0: f32[2, 4] = red")
    assert_expected_inline(events(late), """g1 r1 a f g0 r0 z h i d0 d1""")


def test_it_stays_behind_the_hop_before_it_on_its_lane() -> None:
    lines = BACKWARD.splitlines(keepends=True)
    r1 = lines.pop(3)
    later = "".join([*lines[:5], r1, *lines[5:]])
    assert_expected_inline(events(later), """g1 a r1 f g0 r0 h i d0 d1""")


def test_on_another_lane_it_passes_by() -> None:
    lines = BACKWARD.replace("(g1, 'node'", "(g1, 'gpu'").splitlines(keepends=True)
    r1 = lines.pop(3)
    later = "".join([*lines[:5], r1, *lines[5:]])
    assert_expected_inline(events(later), """g1 r1 a f g0 r0 h i d0 d1""")


def test_a_gather_takes_memory_and_stays_where_it_is() -> None:
    assert_expected_inline(events(BACKWARD), """g1 r1 a f g0 r0 h i d0 d1""")


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_by_the_clock_nothing_is_later_and_lanes_keep_their_order(
    plan: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardc.program.hoist", lambda graph, lanes: graph)
    program = shardc.trace(Deep(), PLANS[plan], torch.empty(64, 64, dtype=PLANS[plan].param_dtype), keep=False)
    for variant in program.step(micro_batches):
        graph = program.scheduled(program.draft(variant), variant)
        old, old_us = clocked(program, graph, variant.half)
        new, new_us = clocked(program, hoist(graph, TOPOLOGY.lanes), variant.half)
        assert {lane: [*hops] for lane, hops in old.items()} == {lane: [*hops] for lane, hops in new.items()}
        assert all(new[lane][hop] <= old[lane][hop] for lane in old for hop in old[lane])
        assert new_us <= old_us


def clocked(program: Program, graph: fx.Graph, half: str) -> tuple[dict[str, dict[ops.Hop, float]], float]:
    """By lane, when each hop is issued; and when all is over."""
    clock = Clock(TOPOLOGY.lanes)
    clock.run(graph, program.times_us(graph, half), half)
    lanes: dict[str, dict[ops.Hop, float]] = {}
    for event in clock.events:
        if event.hop:
            lanes.setdefault(event.lane, {})[event.hop] = event.issued_us
    return lanes, clock.now_us


def test_where_less_is_gathered_ahead_reduces_stay_where_they_are_put(monkeypatch: pytest.MonkeyPatch) -> None:
    program = shardc.trace(Deep(), PLANS["ddp"], torch.empty(64, 64), keep=False)
    backward = program.step()[-1]
    calls: list[fx.Graph] = []
    monkeypatch.setattr("shardc.program.hoist", lambda graph, lanes: calls.append(graph) or graph)
    program.scheduled(program.draft(backward), backward)
    assert len(calls) == 1
    program.allowances[backward] = LEAST
    program.scheduled(program.draft(backward), backward)
    assert len(calls) == 1
