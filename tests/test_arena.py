"""Arena: what ranks gather lies in one place for all of them, and stays there as long as one of them needs it."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
import torch.distributed as dist

import shardc
from passes import ops
from shardc import arena as arena_module
from shardc import near
from shardc.arena import Arena
from shardc.lanes import Lane
from test_messages import numbered
from world import run

F32 = torch.float32


def pair() -> tuple[Arena, Arena]:
    """As two ranks see it, in one process."""
    fd = Arena.made(2)
    both = Arena(fd, 0, 2), Arena(fd, 1, 2)
    os.close(fd)
    return both


def test_ranks_find_the_same_room_for_the_same_gather_whoever_comes_first() -> None:
    a, b = pair()
    first, second = a.room((4, 8), F32), a.room((2, 8), F32)
    other_first = b.room((4, 8), F32)
    third = b.room((4, 8), F32)  # not asked for by the other yet
    other_second, other_third = b.room((2, 8), F32), a.room((2, 8), F32)
    del third, other_second, other_third
    first[:2], other_first[2:] = 1.0, 2.0
    assert first.equal(other_first) and first.sum() == 48.0
    assert a.offset(first) == b.offset(other_first) != a.offset(second)


def test_room_is_used_again_when_all_have_given_it_up_and_not_before() -> None:
    a, b = pair()
    found, other = a.room((4, 8), F32), b.room((4, 8), F32)
    where = a.offset(found)
    part = found.chunk(2)[1].view(-1)  # keeps the whole
    del found, other
    later, other_later = a.room((4, 8), F32), b.room((4, 8), F32)
    assert a.offset(later) == b.offset(other_later) != where
    del part
    again = b.room((4, 8), F32)
    assert b.offset(again) == where
    assert a.offset(a.room((4, 8), F32)) == where


def test_a_process_that_is_forked_off_gives_nothing_up() -> None:
    a, b = pair()
    found, other = a.room((4, 8), F32), b.room((4, 8), F32)
    where = a.offset(found)
    child = os.fork()
    if child == 0:
        del found, other
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert a.offset(a.room((4, 8), F32)) != where
    assert found.equal(other)


def test_what_one_rank_has_yet_to_ask_for_is_not_taken_by_another() -> None:
    a, b = pair()
    where = a.offset(a.room((4, 8), F32))
    assert a.offset(a.room((4, 8), F32)) != where  # b comes to the first one later
    assert b.offset(b.room((4, 8), F32)) == where


def test_blocks_that_are_free_beside_each_other_are_joined_and_cut() -> None:
    a, b = pair()
    kept, others = [a.room((1024 * n,), F32) for n in (1, 2, 3)], [b.room((1024 * n,), F32) for n in (1, 2, 3)]
    first, second, third = (a.offset(x) for x in kept)
    del kept[:2], others[:2]
    assert a.offset(a.room((3072,), F32)) == first == b.offset(b.room((3072,), F32))  # where one and two were
    small, other_small = a.room((1024,), F32), b.room((1024,), F32)
    assert a.offset(small) == first == b.offset(other_small)
    assert a.offset(a.room((2048,), F32)) == second
    assert a.offset(kept[0]) == third


def test_the_smallest_block_that_is_large_enough_is_cut() -> None:
    a, b = pair()
    sizes = (4096, 1024, 2048, 1024)
    rooms, others = [a.room((n,), F32) for n in sizes], [b.room((n,), F32) for n in sizes]
    wanted = a.offset(rooms[2])
    del rooms[::2], others[::2]
    assert a.offset(a.room((1500,), F32)) == wanted


def test_memory_is_given_back_where_nobody_holds_it_and_taken_again() -> None:
    a, b = pair()
    held, other = a.room((4, 8), F32), b.room((4, 8), F32)
    held[:] = 3.0
    free, other_free = a.room((5000,), F32), b.room((5000,), F32)
    before = a.held_bytes
    free[:] = 4.0
    assert a.held_bytes == before + arena_module.pages(20_000)
    del free, other_free
    b.give_back()
    assert a.held_bytes == before
    assert other.eq(3.0).all()
    again = a.room((5000,), F32)
    assert not again.any() and a.held_bytes == before + arena_module.pages(20_000)


def test_a_tensor_that_is_elsewhere_has_no_place_in_it() -> None:
    a, _ = pair()
    assert a.offset(torch.ones(3)) is None


def test_more_than_a_host_has_is_refused() -> None:
    a, _ = pair()
    with pytest.raises(RuntimeError, match=r"Ranks of this host gather [\d,]+ MiB, beside 1 blocks: too much"):
        a.room((1 << 50,), F32)


def test_threads_of_one_rank_do_not_take_the_same_room() -> None:
    a, _ = pair()
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(a.room((64,), F32) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({a.offset(x) for x in found}) == 200


GATHER = ops.Hop("all_gather", "gpu", 2, "gather", ("w",), again=False)


def gathered_in_turns() -> int:
    """Gathers one after the other, results of which are kept for different times. Returns how many blocks there are."""
    lane, rank = Lane(dist.group.WORLD.group_name), dist.get_rank()
    kept: list[tuple[int, torch.Tensor]] = []
    for i in range(60):
        found = lane.start(GATHER, numbered(rank, 40 + i % 3, F32)).wait()
        kept = [*kept, (40 + i % 3, found)][-(1 + i % 4) :]
        del found
        for rows, x in kept:
            assert x.equal(torch.cat([numbered(r, rows, F32) for r in range(2)]))
    (shared,) = near._NEAR.values()
    assert shared.arena is not None
    dist.barrier()
    return shared.arena.head[0]


def test_what_is_kept_is_not_written_over_and_room_is_used_again() -> None:
    assert all(blocks <= 12 for blocks in run(gathered_in_turns, 2, timeout_s=60))


def relayed() -> bool:
    """One hop to another host's rank, and from there to the rank beside: it arrives where it is gathered."""
    mesh = shardc.Topology(node=2, gpu=2).mesh("cpu")
    node, gpu = (Lane(mesh.get_group(axis).group_name) for axis in ("node", "gpu"))
    outer = ops.Hop("all_gather", "node", 2, "gather", ("w",), again=False)
    flying = node.start(outer, numbered(dist.get_rank(), 10, F32), into=(gpu, GATHER))
    whole = gpu.start(GATHER, flying)
    found = whole.wait()
    assert found.equal(torch.cat([numbered(rank, 10, F32) for rank in (0, 2, 1, 3)]))
    assert near.is_shared(found) and not near.is_shared(torch.ones(1))
    return flying.out.untyped_storage().data_ptr() == found.untyped_storage().data_ptr()


def test_what_another_hop_brings_arrives_where_it_is_gathered() -> None:
    assert all(run(relayed, 4, timeout_s=60))


def at_another_collective() -> str:
    """A rank that gathers something else than the other."""
    lane = Lane(dist.group.WORLD.group_name)
    lane.start(GATHER, torch.ones(4, 4)).wait()
    beside = near.near(dist.group.WORLD)
    assert beside.arena is not None
    if dist.get_rank() == 0:
        beside.arena.room((1,), F32)  # and so is one ahead
    flying = lane.start(GATHER, torch.ones(4, 4))
    try:
        flying.wait()
    except shardc.Error as error:
        return str(error)
    finally:
        gc.collect()
        dist.barrier()
    return ""


def test_ranks_that_gather_different_things_say_so() -> None:
    assert all("is at another collective" in text for text in run(at_another_collective, 2, timeout_s=60))
