"""Opt: a graph in text form through the stages that follow the one it was printed after.

    python -m shardc opt --after insert < joint.txt                     forward and backward, scheduled and cut
    python -m shardc opt --after insert --until schedule < joint.txt    the same, not cut
    python -m shardc opt --after partition < forward.txt                one half

A text says less than a traced graph: blocks that the model checkpoints are not marked in it, and no plan comes with it,
so the first stage that can follow is partition. `--verify` checks the laws against layouts read from the graph's own
hops: what is left of laws 2 to 4 is that the graph is at one with itself, and of a backward alone only law 1 can be
told.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torch import fx

from passes import ops
from passes.bucket import bucket
from passes.build import identifier, outputs, placeholders
from passes.errors import Error
from passes.follow import hop_axes
from passes.hoist import hoist
from passes.layout import Layout
from passes.parse import parse
from passes.partition import partition
from passes.regions import Region, regions
from passes.relay import relay
from passes.schedule import schedule
from passes.text import line_of, to_text
from passes.verify import verify, verify_pairs
from shardc.compile import forward_only

STAGES = ("insert", "partition", "bucket", "schedule", "regions")


def add_to(commands: Any) -> None:
    """The command `opt`."""
    it = commands.add_parser("opt", help="run the stages that follow on a graph in text form", epilog=__doc__,
                             formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    it.add_argument("file", nargs="?", type=argparse.FileType(), default=sys.stdin, help="the text (default: stdin)")
    it.add_argument("--after", choices=STAGES[:-1], required=True, help="the stage that the graph was printed after")
    it.add_argument("--until", choices=STAGES[1:], default=STAGES[-1], help="the last stage to run")
    it.add_argument("--verify", action="store_true", help="check the laws before and after")
    it.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints the graphs that come out."""
    stages = STAGES[STAGES.index(options.after) + 1 : STAGES.index(options.until) + 1]
    if not stages:
        raise Error(f"Stage {options.until} does not follow {options.after}.", fix=f"The stages: {', '.join(STAGES)}.")
    graph = parse(options.file.read())
    layouts = layouts_of(graph) if options.verify else None
    print("\n".join(to_text(it, role(it)) for it in optimise(graph, stages, layouts)), end="")


def optimise(graph: fx.Graph, stages: tuple[str, ...], layouts: dict[str, Layout] | None) -> list[fx.Graph]:
    """The graphs after the last of `stages`."""
    halves: list[fx.Graph | None] = [graph]
    names = registered(graph)
    if "partition" in stages:
        check(layouts, joint=graph)
        halves = [*(partition if trains(graph) else forward_only)(graph, parameters(graph))]
    graphs = [half for half in halves if half is not None]
    if "bucket" in stages:
        graphs = [bucket(half, names) for half in graphs]
    if "schedule" in stages:
        graphs = [hoist(schedule(relay(half))) for half in graphs]
    check(layouts, **{role(half): half for half in graphs})
    known: dict[str, Region] = {}
    return [regions(half, known) for half in graphs] if "regions" in stages else graphs


def check(layouts: dict[str, Layout] | None, **graphs: fx.Graph) -> None:
    """The laws, as far as they can be told."""
    if layouts is not None and list(graphs) != ["backward"]:
        verify(layouts, **graphs)
    elif layouts is not None:
        verify_pairs(graphs["backward"])


def trains(graph: fx.Graph) -> bool:
    return any(name.startswith("tangents_") for name in placeholders(graph))


def role(graph: fx.Graph) -> str:
    """What a half is, by what it returns."""
    return "backward" if isinstance(outputs(graph), dict) else "forward"


def parameters(graph: fx.Graph) -> dict[str, str]:
    """Placeholders that are parameters, by the names in hops and gradients."""
    result = outputs(graph)
    names = {name for start in ops.hops(graph) for name in ops.hop(start).params}
    names |= {
        name for part in (result if isinstance(result, tuple) else [result]) if isinstance(part, dict) for name in part
    }
    return {identifier(name): name for name in sorted(names) if identifier(name) in placeholders(graph)}


def registered(graph: fx.Graph) -> list[str]:
    """Parameters in the model's order, as far as a text tells it: of gradients, else of placeholders, else of hops."""
    result, by_place = outputs(graph), parameters(graph)
    grads = result if isinstance(result, dict) else next((part for part in result if isinstance(part, dict)), {})
    there = [by_place[place] for place in placeholders(graph) if place in by_place]
    carried = [name for start in ops.hops(graph) for name in ops.hop(start).params]
    return list(dict.fromkeys([*grads, *there, *carried]))


# Layouts


def layouts_of(graph: fx.Graph) -> dict[str, Layout]:
    """Where each parameter must rest for the graph's hops to make sense. Rungs start at the innermost axis, so the
    longest route of all shows the mesh."""
    for start in ops.hops(graph):
        if len(hop_axes(start)) > 1 or len(ops.hop(start).params) > 1:
            fix = "leave out --verify, or give a graph whose hops are over one axis and of one parameter each"
            raise Error(
                "layouts cannot be read from a hop over several axes or parameters", where=line_of(start), fix=fix
            )
    moves = {place: _Moves(graph, place, name) for place, name in parameters(graph).items()}
    mesh = max((route for found in moves.values() for route in found.routes), key=len, default=())
    return {place: found.layout(mesh) for place, found in moves.items()}


class _Moves:
    """The hops of one parameter."""

    def __init__(self, graph: fx.Graph, place: str, name: str):
        self.name, self.node = name, placeholders(graph)[place]
        self.starts = [start for start in ops.hops(graph) if name in ops.hop(start).params]

    @property
    def routes(self) -> list[tuple[tuple[str, int], ...]]:
        """The axes that it crosses, up and down, each with its size, inner axis first."""
        up = [start for start in self.starts if ops.hop(start).kind == "all_gather"]
        down = [start for start in self.starts if ops.hop(start).kind != "all_gather"]
        return [tuple((ops.hop(it).axis, ops.hop(it).size) for it in chain) for chain in (up[::-1], down)]

    def layout(self, mesh: tuple[tuple[str, int], ...]) -> Layout:
        gathers, refreshes = self.of("gather"), self.of("refresh")
        scattered = [it for it in self.starts if ops.hop(it).kind == "reduce_scatter"]
        full, split = self.full()
        optim = max(len(gathers + refreshes), len(scattered), len(split))
        beyond = tuple((f"axis{i}", size) for i, size in enumerate(split) if i >= len(mesh))
        again = sum(ops.hop(it).again for it in gathers)
        return Layout(self.name, full, mesh + beyond, len(gathers), again, len(self.of("reduce")), optim)

    def of(self, purpose: str) -> list[fx.Node]:
        return [it for it in self.starts if ops.hop(it).purpose == purpose]

    def full(self) -> tuple[tuple[int, ...], list[int]]:
        """The full shape, and the sizes of the optim axes where its rows do not divide by them."""
        node, split = self.node, []
        for start in self.of("refresh") + self.of("gather"):
            node = next(iter(start.users))
        for user in node.users:
            if user.target is ops.compact:
                node, split = user, [size for size in user.args[2] if size > 1]
        return tuple(node.meta["val"].shape), split
