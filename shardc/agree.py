"""Agree: before collectives that are new, every rank compares what it is about to do with rank 0, through the store.

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


def agree(what: str, lines: Sequence[str], timeout_s: float, offer: Sequence[str] = ()) -> list[str]:
    """Compares `lines` with rank 0's; returns what rank 0 offers. `what` names what is compared."""
    global _rounds
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(offer)
    _rounds += 1
    store = dist.PrefixStore(f"shardc/{_rounds}", _torch.default_store())
    return _compare(store, what, list(lines), list(offer), timedelta(seconds=timeout_s))


def _compare(store: dist.Store, what: str, lines: list[str], offer: list[str], timeout: timedelta) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        store.set("rank0", json.dumps([lines, offer]))
    _wait(store, "rank0", what, timeout)
    theirs, offered = json.loads(store.get("rank0"))
    if lines != theirs:
        store.set("difference", _difference(rank, what, lines, theirs))
        store.add("differences", 1)
    if store.add("reports", 1) == world:
        store.set("all", "here")
    _wait(store, "all", what, timeout)
    if store.add("differences", 0):
        raise Error(
            f"Ranks disagree on the {what}: {store.get('difference').decode()}",
            fix="Build the model and the plan from the same code, configuration and seed on every rank.",
        )
    return offered


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
