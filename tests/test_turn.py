"""What stays in full where a forward turns into its backward."""

from __future__ import annotations

import pytest
import torch

import shardc
from passes import ops
from passes.parse import parse
from passes.turn import turned
from shardc.look import GPT

TURN = """\
def joint(w: f32[4, 4], v: f32[4, 8], b: f32[8], x: f32[2, 4], tangents_1: f32[2, 8]):
    '{first}'
    y: f32[2, 4] = mm(x, w)
    '{second}'
    z: f32[2, 8] = mm(y, v)
    s: f32[2, 8] = add.Tensor(z, b)
    t: f32[8, 4] = permute(v, [1, 0])
    g: f32[2, 4] = mm(tangents_1, t)
    '{first}'
    u: f32[4, 4] = permute(w, [1, 0])
    h: f32[2, 4] = mm(g, u)
    return ([s], {{'x': h}})
"""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("layers.0", "head", {"v", "b"}),
        ("layers.0", "", {"v", "b"}),
        ("layers.0", "layers.1", set()),
        ("body", "head", set()),
    ],
)
def test_what_is_behind_the_last_block_and_before_the_first(first: str, second: str, expected: set[str]) -> None:
    assert turned(parse(TURN.format(first=first, second=second)), {"w", "v", "b"}) == expected


def test_a_weight_that_is_needed_before_the_blocks_too_is_not_turned() -> None:
    text = """\
def joint(v: f32[4, 4], w: f32[4, 4], x: f32[2, 4], tangents_1: f32[2, 4]):
    'embed'
    e: f32[2, 4] = mm(x, v)
    'layers.0'
    y: f32[2, 4] = mm(e, w)
    'head'
    z: f32[2, 4] = mm(y, v)
    g: f32[2, 4] = mm(tangents_1, v)
    'layers.0'
    h: f32[2, 4] = mm(g, w)
    return ([z], {'x': h})
"""
    assert turned(parse(text), {"v", "w"}) == set()


def test_without_a_backward_nothing_turns() -> None:
    text = """\
def joint(w: f32[4, 4], v: f32[4, 8], x: f32[2, 4]):
    'layers.0'
    y: f32[2, 4] = mm(x, w)
    'head'
    z: f32[2, 8] = mm(y, v)
    return ([z], {})
"""
    assert turned(parse(text), {"w", "v"}) == set()


def test_a_head_is_gathered_once_and_layers_twice_under_zero3() -> None:
    with torch.device("meta"):
        model = GPT(layers=2, dim=16, heads=2, vocab=64)
    plan = shardc.Plan.zero3(shardc.Topology(node=2, gpu=2))
    forward, backward = shardc.trace(model, plan, torch.zeros(1, 8, dtype=torch.long)).halves
    assert backward
    again = {name for hop in ops.hops(backward, "gather") for name in ops.hop(hop).params}
    once = {name for hop in ops.hops(forward, "gather") for name in ops.hop(hop).params} - again
    assert {name for name in again if not name.startswith("layers.")} == set()
    assert {"norm.weight", "head.weight"} <= {name for name in once if not name.startswith("layers.")}
