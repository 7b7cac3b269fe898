"""Verify: the rules that every graph obeys after every pass.

`RULES` is the table: law, name, the graphs it holds for, what it says, and the function (`passes.rules`) that yields
what breaks it. The first thing found is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from passes import rules
from passes.errors import Error
from passes.layout import Layout
from passes.rules import Broken, Subject
from passes.text import line_of


def verify(
    layouts: Mapping[str, Layout],
    *,
    joint: fx.Graph | None = None,
    forward: fx.Graph | None = None,
    backward: fx.Graph | None = None,
    synced: bool = False,
    memory_limit_bytes: int | None = None,
) -> None:
    """Raise `Error` where a graph breaks a law.

    `layouts` by placeholder name. Give a joint graph, or a forward, or a forward and its backward (of any variation;
    `synced` says that the backward ends on the optim rung). A forward that returns copies has refreshed those.
    Memory is checked where a limit is given.
    """
    for subject in _subjects(layouts, joint, forward, backward, synced, memory_limit_bytes):
        for rule in RULES:
            if subject.role in rule.roles:
                _check(rule, subject)


def verify_pairs(graph: fx.Graph) -> None:
    """Law 1 alone, which needs no layout and no other graph."""
    for rule in RULES:
        if rule.law == 1:
            _check(rule, Subject(graph, "backward", {}))


def _check(rule: Rule, subject: Subject) -> None:
    broken = next(iter(rule.check(subject)), None)
    if broken:
        what = f"law {rule.law}, {rule.name}: {broken.what}"
        raise Error(what, where=graph_line(broken.node), fix=broken.fix)


def graph_line(node: fx.Node) -> str:
    """A node as it prints in its graph; of a placeholder, its name and type."""
    line = line_of(node)
    return line if len(line) <= 240 else line[:240] + " ..."


def _subjects(
    layouts: Mapping[str, Layout],
    joint: fx.Graph | None,
    forward: fx.Graph | None,
    backward: fx.Graph | None,
    synced: bool,
    limit: int | None,
) -> Iterator[Subject]:
    if joint:
        yield Subject(joint, "joint", layouts, memory_limit_bytes=limit)
    if forward:
        before = Subject(forward, "forward", layouts, memory_limit_bytes=limit)
        yield before
    if backward:
        if not forward:
            raise ValueError("a backward is verified with its forward")
        yield Subject(backward, "backward", layouts, before, synced, limit)


@dataclass(frozen=True)
class Rule:
    """One row of the table."""

    law: int
    name: str
    roles: tuple[str, ...]
    says: str
    check: Callable[[Subject], Iterator[Broken]]


_ALL = ("joint", "forward", "backward")
_DESCENDS = ("joint", "backward")

RULES = (
    Rule(
        1,
        "waited once",
        _ALL,
        "Waits and other hops alone use a start; it has one wait at most.",
        rules.waited_once,
    ),
    Rule(1, "waits for a hop", _ALL, "Every wait waits for a start.", rules.waits_for_hop),
    Rule(5, "on the mesh", _ALL, "A hop is over neighbouring axes of the mesh, at their size.", rules.on_mesh),
    Rule(5, "moves", _ALL, "A graph has only the moves of its kind, each by its collective.", rules.moves_of_graph),
    Rule(4, "exchange", ("backward",), "A backward takes what its forward saves, in order.", rules.takes_saved),
    Rule(2, "at rest", _ALL, "Parameters and accumulators come in on their rungs.", rules.at_rest),
    Rule(2, "outer first", _ALL, "A chain gathers over each axis once, outer axes first.", rules.outer_first),
    Rule(2, "named", _ALL, "A hop names parameters, and a gather carries their shards.", rules.names_what_it_carries),
    Rule(2, "gathered once", _ALL, "No graph gathers a parameter over an axis twice.", rules.gathered_once),
    Rule(2, "within the move", _ALL, "A refresh ends, and a gather starts, at the params rung.", rules.within_move),
    Rule(2, "interleaved", _ALL, "What is flat on the wire is in the order of ranks there.", rules.interleaved),
    Rule(2, "compacted", _ALL, "Padding is dropped from full values only, by their layout.", rules.compacted),
    Rule(2, "full when used", _ALL, "Compute, and the user, get parameters only when full.", rules.full_when_used),
    Rule(2, "copied", ("forward",), "A refreshed copy is the shard on the params rung.", rules.copied),
    Rule(3, "on its way", _DESCENDS, "A gradient crosses each axis once, inner axes first.", rules.on_route),
    Rule(3, "expanded", _DESCENDS, "A gradient is padded as its shards are before its first hop.", rules.expanded),
    Rule(3, "one sum", _DESCENDS, "On its way a gradient is only summed, scaled and cast.", rules.one_sum),
    Rule(3, "none lost", _DESCENDS, "Every gradient that is reduced is returned.", rules.none_lost),
    Rule(3, "reduced", _DESCENDS, "Every gradient returned has crossed all the axes of its way.", rules.reduced),
    Rule(4, "again", _ALL, "`again` marks the hops above the after_forward rung.", rules.again_above_rung),
    Rule(4, "repeats", ("backward",), "A backward gathers only above after_forward.", rules.repeats_marked_hops),
    Rule(4, "saved", ("forward",), "Nothing computed from full parameters alone is saved.", rules.saves_no_full),
    Rule(7, "wire", _ALL, "What a hop carries is in the format that it says.", rules.in_its_wire),
    Rule(3, "folded", _DESCENDS, "What an all-to-all brings is summed, once, before it goes on.", rules.folded),
    Rule(6, "memory", _ALL, "The peak stays under the limit.", rules.under_limit),
)
"""Every rule; the first broken one is raised."""
