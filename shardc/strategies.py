"""Strategies: every published one is a row of the ladder. The table of all of them, on one's own mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from passes.errors import Error
from shardc.cost import crossing, step_bytes
from shardc.plan import PARO, Parameter, Plan
from shardc.rest import state_bytes
from shardc.topology import Topology


class Strategy(NamedTuple):
    """A row with a name."""

    name: str
    source: str
    make: Callable[..., Plan]
    """of a topology"""


def _amsp() -> Iterator[Strategy]:
    """Its nine triples: each of P, G, OS a full replica, a part (a host) or all; G is one of the others."""
    names = ("1", "part", "all")
    for p in range(3):
        for os in range(p, 3):
            for g in sorted({p, os}):
                yield Strategy(
                    f"AMSP {names[p]}/{names[g]}/{names[os]}",
                    "arXiv 2311.00257",
                    partial(_amsp_plan, triple=(p, g, os)),
                )


def _amsp_plan(topology: Topology, *, triple: tuple[int, int, int], **options: object) -> Plan:
    if len(topology.axes) < 2:
        raise Error(f"AMSP's partial factors need two axes, but {topology} has one", fix="Topology(node=..., gpu=...)")
    factors = (1, topology.world // topology.sizes[0], topology.world)
    p, g, os = (factors[i] for i in triple)
    return Plan.amsp(topology, p=p, g=g, os=os, **options)  # type: ignore[arg-type]


STRATEGIES = (
    Strategy("DDP", "arXiv 2006.15704", Plan.ddp),
    Strategy("ZeRO-1", "arXiv 1910.02054", Plan.zero1),
    Strategy("ZeRO-2", "arXiv 1910.02054", Plan.zero2),
    Strategy("ZeRO-3 = FSDP", "arXiv 1910.02054", Plan.zero3),
    Strategy("FSDP, no reshard", "arXiv 2304.11277", partial(Plan.zero3, reshard=False)),
    Strategy("HSDP", "arXiv 2304.11277", Plan.hsdp),
    Strategy("MiCS", "arXiv 2205.00119", Plan.mics),
    Strategy("hpZ", "arXiv 2306.10209", Plan.hpz),
    Strategy("ZeRO++", "arXiv 2306.10209", Plan.zeropp),
    Strategy("Frontier, 3 levels", "arXiv 2501.04266", Plan.frontier),
    *(Strategy(f"PaRO {letters}", "arXiv 2310.06003", partial(Plan.paro, letters=letters)) for letters in PARO),
    *_amsp(),
)
"""All of them; names are unique."""


def strategies(topology: Topology | None = None, *, billions: float = 7.0, micro_batches: int = 1) -> None:
    """Prints the table of all strategies: rungs, what a rank sends over each axis in a step, what it holds at rest.

    For a model of `billions` of parameters in even matrices, computed in bfloat16, with float32 master parameters and
    Adam, in steps of `micro_batches`. `topology`: the mesh (default: 4 hosts of 8); strategies that need other axes
    than it has are named behind the table.
    """
    print(table(Topology(node=4, gpu=8) if topology is None else topology, billions, micro_batches))


def table(topology: Topology, billions: float, micro_batches: int) -> str:
    """As `strategies` prints it."""
    head = ("strategy", "params", "after_forward", "grads", "optim", *(f"GB over {axis}" for axis in topology.axes))
    rows, lacking = [(*head, "GB a rank", "source")], []
    for strategy in STRATEGIES:
        try:
            plan = strategy.make(topology, param_dtype=torch.bfloat16)
        except Error as error:
            lacking.append(f"{strategy.name}: {error.what}")
        else:
            rows.append((strategy.name, *_cells(plan, billions, micro_batches), strategy.source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *lacking])


COLUMNS = 1 << 12


def _cells(plan: Plan, billions: float, micro_batches: int) -> Iterator[str]:
    pieces = plan.topology.world
    rows = max(pieces, round(billions * 1e9 / COLUMNS / pieces) * pieces)
    parameters: dict[str, Parameter] = {"matrix": ((rows, COLUMNS), torch.float32, True)}
    sent = crossing(step_bytes(plan, parameters, micro_batches), plan.topology)
    yield from map(plan.topology.rung_name, plan.default)
    yield from (f"{sent[axis] / 1e9:.2f}" for axis in plan.topology.axes)
    yield f"{sum(state_bytes(plan, parameters).values()) / 1e9:.2f}"
