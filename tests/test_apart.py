"""Small gradients that wait do not keep their buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from passes.apart import SMALL, apart
from passes.build import outputs
from passes.memory import lives
from passes.parse import parse
from passes.text import to_text
from shardc.program import Variant

HOSTS = shardc.Topology(node=2, gpu=2)
PLANS = {
    "zero3": shardc.Plan.zero3(HOSTS),
    "hsdp": shardc.Plan.hsdp(HOSTS),
    "NIG": shardc.Plan.paro(HOSTS, letters="NIG"),
}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def kept(program: shardc.Program, variant: Variant) -> dict[str, float]:
    """How many times as much memory as a gradient needs it keeps, by parameter."""
    graph = program.graph(variant)
    storage = {node: life.bytes for life in lives(graph) for node in life.values}
    return {name: storage[grad] / grad.meta["val"].nbytes for name, grad in outputs(graph).items()}


@pytest.mark.parametrize("plan", PLANS)
def test_what_waits_for_later_micro_batches_keeps_little_more_than_it_needs(plan: str) -> None:
    program = shardc.trace(Normed(), PLANS[plan], torch.empty(8, 64), keep=False)
    first, once = program.step(3)[1], program.step(1)[1]
    assert max(kept(program, first).values()) < SMALL
    norms = [times for name, times in kept(program, once).items() if name.startswith("layers.1.0")]
    assert min(norms) > SMALL  # what syncs at once goes with its bucket


def test_only_what_is_small_is_copied() -> None:
    program = shardc.trace(Normed(), PLANS["NIG"], torch.empty(8, 64), keep=False)
    grads = outputs(program.graph(program.step(3)[1]))
    copied = {name for name, grad in grads.items() if "clone" in grad.name}
    assert copied == {name for name in grads if not name.endswith(".1.weight")}


def test_what_no_bucket_brings_is_left_as_it_is() -> None:
    text = """\
def backward(t: f32[2, 34]):
    ''
    add: f32[2, 34] = add.Tensor(t, t)
    split_with_sizes = split_with_sizes(add, [32, 2], 1)
    getitem: f32[2, 2] = split_with_sizes[1]
    return {'x': getitem}
"""
    assert to_text(apart(parse(text)), "backward") == text
