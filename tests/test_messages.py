"""Messages: what Gloo's collectives bring, they bring."""

from __future__ import annotations

import threading
from functools import reduce
from operator import add

import pytest
import torch
import torch.distributed as dist

from passes import ops
from shardc import _torch
from shardc.lanes import Flying, Lane
from world import run

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn)


def started(lane: Lane, kind: str, x: torch.Tensor) -> Flying:
    return lane.start(ops.Hop(kind, "gpu", dist.get_world_size(), "gather", ("w",), again=False), x)


def numbered(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that tell ranks, hops and rows apart."""
    return (torch.arange(3 * rows).view(rows, 3) + 7 * rank + rows).remainder(100).to(dtype)


def many_in_flight() -> bool:
    """Gathers and exchanges of several sizes, all started before the first is waited for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lane = Lane(dist.group.WORLD.group_name)
    assert _torch.is_gloo(_torch.group_called(lane.group))
    flying = []
    for i in range(20):
        dtype, rows = DTYPES[i % len(DTYPES)], 1 + i * i * 50
        flying.append(started(lane, "all_gather", numbered(rank, rows, dtype)))
        flying.append(started(lane, "all_to_all", numbered(rank, rows * ranks, dtype)))
    for i in range(20):
        dtype, rows = DTYPES[i % len(DTYPES)], 1 + i * i * 50
        gathered, exchanged = (it.wait().float() for it in flying[2 * i : 2 * i + 2])
        assert gathered.equal(torch.cat([numbered(r, rows, dtype).float() for r in range(ranks)]))
        pieces = [numbered(r, rows * ranks, dtype).float().chunk(ranks)[rank] for r in range(ranks)]
        assert exchanged.equal(torch.cat(pieces))
    return True


def test_messages_bring_what_collectives_bring_and_in_their_order() -> None:
    assert all(run(many_in_flight, 3, timeout_s=60))


SUMMED = (torch.float32, torch.bfloat16, torch.float64)


def summed() -> bool:
    """In float32 at least, in the order of ranks; a bfloat16 is rounded once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lane = Lane(dist.group.WORLD.group_name)
    given = [[torch.randn(5 * ranks, 7, dtype=torch.float64).to(dtype) for _ in range(ranks)] for dtype in SUMMED]
    dist.broadcast_object_list(given, src=0)
    flying = [started(lane, "reduce_scatter", values[rank]) for values in given]
    for values, it in zip(given, flying, strict=True):
        exact = torch.promote_types(values[0].dtype, torch.float32)
        mine = [value.chunk(ranks)[rank].to(exact) for value in values]
        assert it.wait().equal(reduce(add, mine).to(values[0].dtype))
    return True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_scattered_is_summed_where_it_arrives(ranks: int) -> None:
    assert all(run(summed, ranks, timeout_s=60))


def waited_for_by_several() -> bool:
    """A hop that another relays is waited for by the thread of its lane, and by compute."""
    flying = started(Lane(dist.group.WORLD.group_name), "all_gather", numbered(dist.get_rank(), 5, torch.float32))
    others = [threading.Thread(target=flying.come) for _ in range(3)]
    for thread in others:
        thread.start()
    found = flying.wait()
    for thread in others:
        thread.join()
    return found.equal(torch.cat([numbered(r, 5, torch.float32) for r in range(dist.get_world_size())]))


def test_messages_may_be_waited_for_again_and_by_several_threads() -> None:
    assert all(run(waited_for_by_several, 2, timeout_s=60))


def what_is_watched() -> tuple[bool, list[str]]:
    """A group in Python stands before the real one, as it does where bytes are counted."""
    name = dist.group.WORLD.group_name
    seen: list[str] = []
    with _torch.watched(name, lambda kind, size_bytes, ranks: seen.append(kind)):
        direct = _torch.is_gloo(_torch.group_called(name))
        found = started(Lane(name), "all_gather", numbered(dist.get_rank(), 5, torch.float32)).wait()
    assert found.equal(torch.cat([numbered(r, 5, torch.float32) for r in range(dist.get_world_size())]))
    return direct, seen


def test_where_something_stands_before_gloo_its_collectives_are_called() -> None:
    assert run(what_is_watched, 2, timeout_s=60) == [(False, ["all_gather"])] * 2
