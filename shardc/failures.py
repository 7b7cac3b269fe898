"""Failures: a collective that raises, at its start or while it is waited for, is named by its hop.

`shardc.lanes` does so itself; what Inductor generates for a whole graph calls collectives by no names of ours.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable
from typing import Any

from torch import fx

from passes import ops
from passes.errors import Error

HopOf = Callable[[RuntimeError], ops.Hop | None]
"""The hop that raised; None where it was something else."""


def naming_failures(function: Callable[[list[Any]], Any], hop_of: HopOf) -> Callable[[list[Any]], Any]:
    """`function`, which raises an `Error` with the hop and its parameters where a collective of it fails."""

    def run(args: list[Any]) -> Any:
        try:
            return function(args)
        except RuntimeError as error:
            hop = hop_of(error)
            if hop is None:
                raise
            raise failed(hop, error) from error

    return run


def in_generated_code(graph: fx.Graph) -> HopOf:
    """For what Inductor made of a graph: it keeps the order of starts and that of waits, so that the n-th of its file
    is the n-th of the graph."""
    starts, waits = filter(ops.is_start, graph.nodes), filter(ops.is_wait, graph.nodes)
    hops = {
        r"_c10d_functional\.(?!wait_tensor)\w+\.default\(": [ops.hop(node) for node in starts],
        r"_c10d_functional\.wait_tensor\.default\(": [ops.hop(node.args[0]) for node in waits],
    }

    def hop_of(error: RuntimeError) -> ops.Hop | None:
        for file, line in _lines(error):
            so_far = linecache.getlines(file)[:line]
            for call, of_kind in hops.items():
                if so_far and re.search(call, so_far[-1]):
                    return of_kind[sum(bool(re.search(call, text)) for text in so_far) - 1]
        return None

    return hop_of


def _lines(error: BaseException) -> list[tuple[str, int]]:
    """(file, line) that an exception passed through."""
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def failed(hop: ops.Hop, error: RuntimeError) -> Error:
    """The error that names it."""
    return Error(
        f"A collective failed: {hop}.\n    {str(error).strip().splitlines()[0]}",
        fix="Look at the ranks of this axis for one that raised, died, or runs another program; "
        "how long to wait is the `timeout` of init_process_group.",
    )
