"""Every pass shows in its docstring what it does to a graph; here each of them does it.

An example is a graph, a line that starts with `becomes`, and the graph (or graphs) that come out, to the letter.
"""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from passes.accumulate import accumulate
from passes.apart import apart
from passes.bucket import bucket
from passes.chunk import chunk
from passes.feedback import feedback
from passes.fuse import fuse
from passes.hoist import hoist
from passes.insert import Param, insert
from passes.layout import Layout
from passes.order import align, collective_order
from passes.parse import parse
from passes.partition import partition
from passes.refresh import refresh
from passes.regions import regions
from passes.schedule import schedule
from passes.sync import sync
from passes.text import to_text

MESH = (("gpu", 2), ("node", 2))
W = Layout("w", (8, 4), MESH, params=2, after_forward=1, grads=2, optim=2)
ON_GPU = replace(W, params=1, grads=1)


def param(layout: Layout, rest: torch.dtype = torch.float32) -> dict[str, Param]:
    return {layout.name: Param(layout, rest, torch.float32, torch.float32, grad_scale=0.25)}


PASSES: dict[str, Callable[[fx.Graph], fx.Graph | tuple[fx.Graph, ...]]] = {
    "insert": lambda graph: insert(graph, param(W)),
    "partition": lambda graph: partition(graph, {"w"}),
    "refresh": lambda graph: refresh(graph, param(ON_GPU, torch.bfloat16), {"w"}),
    "accumulate": lambda graph: accumulate(graph, param(ON_GPU)),
    "sync": lambda graph: sync(graph, param(replace(ON_GPU, optim=1))),
    "feedback": lambda graph: feedback(graph, {"w": replace(W, params=0, after_forward=0)}),
    "fuse": fuse,
    "bucket": lambda graph: bucket(graph, ["layers.0.w", "layers.0.v", "w", "v"]),
    "apart": apart,
    "chunk": lambda graph: chunk(graph, lambda chain: 2),
    "schedule": schedule,
    "hoist": hoist,
    "order": lambda graph: align(graph, collective_order(graph)[::-1]),
    "regions": regions,
}


def example(name: str) -> tuple[str, str]:
    """The text before and the text after, from the docstring of a module."""
    before, after = re.split(r"^becomes.*$", importlib.import_module(f"passes.{name}").__doc__ or "", flags=re.M)
    return indented(before), indented(after)


def indented(text: str) -> str:
    """What is indented in a docstring."""
    lines = [line for line in text.splitlines() if line.startswith("    ") or not line]
    return re.sub("\n{3,}", "\n\n", textwrap.dedent("\n".join(lines)).strip()) + "\n"


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_does_what_its_docstring_shows(name: str) -> None:
    before, after = example(name)
    result = PASSES[name](parse(before))
    graphs = result if isinstance(result, tuple) else (result,)
    # A region's `def` stands before that of its graph and prints with it.
    names = [it for it in re.findall(r"^def (\w+)", after, flags=re.M) if not it.startswith("region")]
    assert "\n".join(to_text(graph, it) for graph, it in zip(graphs, names, strict=True)) == after


@pytest.mark.parametrize("name", PASSES)
def test_a_docstring_starts_from_a_graph_as_it_prints(name: str) -> None:
    before, _ = example(name)
    defined = re.findall(r"^def (\w+)", before, flags=re.M)
    assert to_text(parse(before), defined[-1]) == before
