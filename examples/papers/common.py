"""What the papers' scripts share: models on the meta device, machines with their fitted constants, rows of a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from llama import Config, Llama

from shardc import Plan, Topology
from shardc.look import GPT
from shardc.predict import Prediction, Predictor


def llama(config: Config) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def gpt(layers: int, dim: int, heads: int, vocab: int = 50304) -> GPT:
    with torch.device("meta"):
        return GPT(layers, dim, heads, vocab)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.zeros((rows, length), dtype=torch.long, device="meta")


class Constants(NamedTuple):
    """What is fitted, of a machine."""

    efficiency: float
    """of the device's peak, in matrix products and in memory traffic"""
    node: float
    """of the bandwidth between hosts"""


def machine(preset: str, nodes: int, constants: Constants, **links: float) -> Topology:
    """A preset with fitted constants. `links`: other bandwidths than the preset's, GB/s a rank, before fitting."""
    shape = Topology.preset(preset, nodes=nodes)
    found = {axis: replace(link, gb_per_s=links.get(axis, link.gb_per_s)) for axis, link in shape.links}
    found["node"] = replace(found["node"], gb_per_s=found["node"].gb_per_s * constants.node)
    return shape.with_links(replace(shape.computes, efficiency=constants.efficiency), **found)


class Setup(NamedTuple):
    """A model and its batch."""

    model: nn.Module
    batch: tuple[torch.Tensor, ...]
    dtype: torch.dtype = torch.bfloat16

    def predictor(self, topology: Topology) -> Predictor:
        return Predictor(self.model, Plan.zero3(topology, param_dtype=self.dtype), *self.batch)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [[*map(str, head)], *([*map(str, row)] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def compared(paper: float | None, ours: float, form: str = ".0f") -> tuple[str, str, str]:
    """Paper, ours, ratio."""
    if paper is None:
        return "-", f"{ours:{form}}", "-"
    return f"{paper:{form}}", f"{ours:{form}}", f"{ours / paper:.2f}"


def refresh_apart(prediction: Prediction) -> float:
    """Microseconds of the step, were nothing computed while parameters are refreshed."""
    moved = sum(us for (move, _), us in prediction.moves_us.items() if move == "refresh")
    exposed = sum(us for (move, _), us in prediction.exposed_us.items() if move == "refresh")
    return prediction.step_us + moved - exposed
