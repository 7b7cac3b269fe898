"""Agree: before the first collective, every rank compares what it is about to do with rank 0, through the store.

A collective that only some ranks issue hangs. The store does not: each rank reads rank 0's text, compares, and
reports; all wait for all reports, so every rank raises, within the timeout, and names the first difference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest

import torch.distributed as dist

from passes.errors import Error
from shardc import _torch

_rounds = 0


def agree(what: str, lines: Sequence[str], timeout_s: float, *, ordered: bool = True) -> list[str]:
    """Compares `lines` with rank 0's (their order too, if `ordered`); returns rank 0's. `what` names what is
    compared."""
    global _rounds
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(lines)
    _rounds += 1
    return _compare(
        dist.PrefixStore(f"shardc/{_rounds}", _torch.default_store()),
        what,
        list(lines),
        timedelta(seconds=timeout_s),
        ordered,
    )


def _compare(store: dist.Store, what: str, lines: list[str], timeout: timedelta, ordered: bool) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        store.set("rank0", json.dumps(lines))
    _wait(store, "rank0", what, timeout)
    theirs = json.loads(store.get("rank0"))
    mine, wanted = (lines, theirs) if ordered else (sorted(lines), sorted(theirs))
    if mine != wanted:
        store.set("difference", _difference(rank, what, mine, wanted))
        store.add("differences", 1)
    if store.add("reports", 1) == world:
        store.set("all", "here")
    _wait(store, "all", what, timeout)
    if store.add("differences", 0):
        raise Error(
            f"Ranks disagree on the {what}: {store.get('difference').decode()}",
            fix="Build the model and the plan from the same code, configuration and seed on every rank.",
        )
    return theirs


def _wait(store: dist.Store, key: str, what: str, timeout: timedelta) -> None:
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise Error(
            f"Not all ranks came to compare their {what} within {timeout.total_seconds():.0f} s.",
            fix="Look for a rank that died or is behind; "
            "pass a larger `timeout_s` to shardc.compile if it is only slow.",
        ) from error


def _difference(rank: int, what: str, mine: list[str], theirs: list[str]) -> str:
    for i, (a, b) in enumerate(zip_longest(mine, theirs, fillvalue="(nothing)")):
        if a != b:
            return f"line {i + 1} of {what} is {a!r} on rank {rank} and {b!r} on rank 0."
    raise AssertionError("no difference")
