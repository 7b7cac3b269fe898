"""Golden text: a small model under four plans, after every stage. A change of a pass that changes none is neutral.

    pytest tests/test_goldens.py --update-goldens      writes them anew

Decompositions differ between versions of torch, so they hold for the one that they were made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import shardc
from passes.parse import parse
from passes.text import to_text
from shardc import Plan, Program, Topology

GOLDENS = Path(__file__).parent / "goldens"
TORCH = "2.13"
TOPOLOGY = Topology(node=2, gpu=2)
PLANS = {
    "zero3": Plan.zero3(TOPOLOGY),
    "iig": Plan.paro(TOPOLOGY, "IIG"),
    "hpz": Plan.hpz(TOPOLOGY, param_dtype=torch.bfloat16),
    "ddp": Plan.ddp(TOPOLOGY),
}


class Block(nn.Module):
    """Six rows do not divide by four ranks, four do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """Two blocks, and a scale that is 0-dim."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def traced(program: Program) -> Iterator[tuple[str, fx.Graph]]:
    """What no plan changes: titles and graphs."""
    for stage in ("capture", "decompose"):
        yield f"joint after {stage}", program.after(stage)[0]


def compiled(program: Program) -> Iterator[tuple[str, fx.Graph]]:
    """What comes of a plan."""
    yield "joint after insert", program.after("insert")[0]
    for name, half in zip(("forward", "backward"), program.after("partition"), strict=True):
        yield f"{name} after partition", half
    assert program.backward
    yield "forward", program.forward
    yield "backward", program.backward
    yield "forward that refreshes", program.refreshed()
    yield "backward that accumulates and syncs", program.variation(synced=True)


@cache
def trace(name: str) -> Program:
    plan = PLANS[name]
    return shardc.trace(Tiny(), plan, torch.zeros(3, 4, dtype=plan.param_dtype or torch.float32))


def text(graphs: Iterable[tuple[str, fx.Graph]]) -> str:
    """Each graph under its title; one that is equal to an earlier one is named only."""
    seen: dict[str, str] = {}
    parts = []
    for title, graph in graphs:
        printed = to_text(graph, title.split()[0])
        parts.append(f"# {title}\n{printed}" if printed not in seen else f"# {title}: as {seen[printed]}\n")
        seen.setdefault(printed, title)
    return "\n".join(parts)


GRAPHS: dict[str, Callable[[], Iterator[tuple[str, fx.Graph]]]] = {"model": lambda: traced(trace("zero3"))}
GRAPHS |= {name: lambda name=name: compiled(trace(name)) for name in PLANS}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_stage_gives_the_golden_text(name: str, request: pytest.FixtureRequest) -> None:
    if not torch.__version__.startswith(TORCH + "."):
        pytest.skip(f"the goldens were made with torch {TORCH}, this is {torch.__version__}")
    found, path = text(GRAPHS[name]()), GOLDENS / f"{name}.txt"
    if request.config.getoption("--update-goldens"):
        path.write_text(found)
    assert found == path.read_text(), f"{path.name} differs; if it should, run pytest {__file__} --update-goldens"


@pytest.mark.parametrize("name", GRAPHS)
def test_every_stage_reads_back(name: str) -> None:
    for title, graph in GRAPHS[name]():
        assert to_text(parse(to_text(graph))) == to_text(graph), title
