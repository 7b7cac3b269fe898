"""One module's part of a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from passes.errors import Error
from passes.excerpt import excerpt
from passes.parse import parse
from passes.text import to_text

TWO_BLOCKS = """\
def forward(blocks_0_w: f32[2, 4], blocks_10_w: f32[4, 4], x: f32[2, 4]):
    'blocks.0'
    a: f32[4, 4] = all_gather(blocks_0_w, 'gpu', 2, purpose='gather', params=['blocks.0.w'], again=True)
    f: f32[4, 4] = wait(a)
    'blocks.0.up'
    y: f32[2, 4] = mm(x, f)
    s: f32[2, 4] = relu(y)
    'blocks.10'
    z: f32[2, 4] = mm(s, blocks_10_w)
    u: f32[2, 4] = add.Tensor(z, y)
    return ([u], [s])
"""


def test_a_module_takes_its_hops_and_gives_what_others_use() -> None:
    assert (
        to_text(excerpt(parse(TWO_BLOCKS), "blocks.0"), "blocks_0")
        == """\
def blocks_0(blocks_0_w: f32[2, 4], x: f32[2, 4]):
    'blocks.0'
    a: f32[4, 4] = all_gather(blocks_0_w, 'gpu', 2, purpose='gather', params=['blocks.0.w'], again=True)
    f: f32[4, 4] = wait(a)
    'blocks.0.up'
    y: f32[2, 4] = mm(x, f)
    s: f32[2, 4] = relu(y)
    return [y, s]
"""
    )


def test_names_that_begin_alike_are_not_inside() -> None:
    assert len(excerpt(parse(TWO_BLOCKS), "blocks.1").nodes) == 1


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


PROGRAM = """\
def inner(inner_weight: f32[4, 4], x: f32[2, 4]):
    'inner'
    permute: f32[4, 4] = permute(inner_weight, [1, 0])
    mm: f32[2, 4] = mm(x, permute)
    return [mm]
"""


def test_a_layer_of_a_program_after_each_stage() -> None:
    program = shardc.trace(Residual(), shardc.Plan.zero3(shardc.Topology(gpu=2)), torch.ones(2, 4))
    assert program.layer_text("inner", after="capture") == PROGRAM
    inserted = program.layer_text("inner", after="insert")
    assert "all_gather(inner_weight, 'gpu', 2" in inserted
    assert "reduce_scatter" not in inserted
    assert program.layer_text("inner").startswith("def inner(inner_weight: f32[2, 4], x: f32[2, 4]):")


def wrapped(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return forward(*args, **kwargs)

    return call


class Wrapped(Residual):
    forward = wrapped(Residual.forward)


def test_a_layer_keeps_its_name_where_the_forward_is_wrapped() -> None:
    program = shardc.trace(Wrapped(), shardc.Plan.zero3(shardc.Topology(gpu=2)), torch.ones(2, 4))
    assert program.layer_text("inner", after="capture") == PROGRAM.replace("x", "args_1")


def test_an_unknown_layer_is_an_error_that_names_the_known() -> None:
    program = shardc.trace(Residual(), shardc.Plan.ddp(shardc.Topology(gpu=2)), torch.ones(2, 4))
    with pytest.raises(Error, match=r"no compute of module 'outer'(.|\n)*One of inner"):
        program.layer_text("outer")
