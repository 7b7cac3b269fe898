"""Near: ranks of one host hand each other values in shared memory, in order, and room is used again."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from shardc import near as near_module
from shardc.lanes import Lane
from shardc.near import Letter, Near, Room, near
from test_messages import many_in_flight, numbered, started
from world import run

LIKE = torch.empty(6, 4)


def pair(timeout_s: float = 30.0) -> tuple[Near, Near]:
    """Two ranks of a group of two, in one process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return tuple(Near(rank, 2, {1 - rank: ends[rank]}, timeout_s) for rank in (0, 1))  # type: ignore[return-value]


def values(count: int) -> list[torch.Tensor]:
    return [torch.full_like(LIKE, float(i)) for i in range(count)]


def put(sender: Near, x: torch.Tensor) -> None:
    sender.put([x, x])


def expected(reader: Near, like: torch.Tensor = LIKE) -> Letter:
    return reader.expect([like, like])[1 - reader.rank]


def test_letters_are_in_the_order_in_which_values_were_put_whoever_is_opened_first() -> None:
    sender, reader = pair()
    letters = [expected(reader) for _ in range(3)]
    for x in values(3):
        put(sender, x)
    for i in (2, 0, 1):
        assert letters[i].open().equal(values(3)[i])
        letters[i].close()


def test_room_is_used_again_when_it_was_read_and_not_before() -> None:
    sender, reader = pair()
    for x in values(4):
        put(sender, x)
        letter = expected(reader)
        assert letter.open().equal(x)
        letter.close()
    assert len(sender.rooms) == 1
    unread = [expected(reader) for _ in range(3)]
    for x in values(3):
        put(sender, x)
    assert len(sender.rooms) == 3
    assert all(letter.open().equal(x) for letter, x in zip(unread, values(3), strict=True))


def test_what_is_small_does_not_take_the_place_of_what_is_large() -> None:
    sender, reader = pair()
    large, small = torch.ones(100_000), torch.ones(1000)
    for x in (large, small):
        put(sender, x)
        letter = expected(reader, x)
        letter.open()
        letter.close()
    put(sender, large)
    assert [room.value for room in sender.rooms] == [2, 1]


def test_a_value_lies_in_the_smallest_room_that_is_free() -> None:
    sender, reader = pair()
    large, small = torch.ones(100_000), torch.ones(90_000)
    for x in (large, small):
        put(sender, x)
    for x in (large, small):
        letter = expected(reader, x)
        letter.open()
        letter.close()
    put(sender, small)
    assert [room.value for room in sender.rooms] == [1, 2]


def test_memory_is_given_back_of_what_was_read_and_taken_again() -> None:
    sender, reader = pair()
    read, unread = expected(reader), expected(reader)
    for x in values(3)[1:]:
        put(sender, x)
    assert read.open().equal(values(3)[1])
    read.close()
    sender.give_back()
    assert [room.is_filled for room in sender.rooms] == [False, True]
    assert not sender.rooms[0].like(LIKE).any()
    assert unread.open().equal(values(3)[2])
    put(sender, values(3)[1])
    assert len(sender.rooms) == 2
    assert expected(reader).open().equal(values(3)[1])


def test_memory_is_not_given_back_while_a_value_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane may end, and give back, at any time."""
    sender, reader = pair()
    put(sender, LIKE)
    letter = expected(reader)
    letter.open()
    letter.close()
    like = Room.like

    class Written:
        def __init__(self, room: Room, x: torch.Tensor):
            self.there = like(room, x)

        def copy_(self, x: torch.Tensor) -> None:
            self.there.copy_(x)
            sender.give_back()

    with monkeypatch.context() as patch:
        patch.setattr(Room, "like", lambda room, x: Written(room, x))
        put(sender, values(2)[1])
    assert len(sender.rooms) == 1
    assert expected(reader).open().equal(values(2)[1])


def test_a_thread_that_waits_for_a_later_letter_hands_out_earlier_ones() -> None:
    sender, reader = pair()
    first, second = expected(reader), expected(reader)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(second.open()))
    thread.start()
    put(sender, values(2)[0])
    assert first.open().equal(values(2)[0])
    put(sender, values(2)[1])
    thread.join(30)
    assert found[0].equal(values(2)[1])


def test_a_value_of_one_who_has_gone_is_still_there() -> None:
    sender, reader = pair()
    put(sender, values(2)[1])
    sender.peers[1].connection.close()
    del sender
    assert expected(reader).open().equal(values(2)[1])
    with pytest.raises(RuntimeError, match="Connection closed by rank 0 of the group"):
        expected(reader).open()


def test_one_who_has_nothing_to_say_is_waited_for_as_long_as_the_group_waits() -> None:
    _, reader = (both := pair(timeout_s=0.1))
    assert len(both) == 2
    with pytest.raises(RuntimeError, match=r"Timed out after 0\.1 s waiting for rank 0 of the group"):
        expected(reader).open()


def test_nothing_is_sent_to_one_who_has_gone() -> None:
    sender, reader = pair()
    reader.peers[0].connection.close()
    with pytest.raises(RuntimeError, match="Connection to rank 1 of the group: .*[Bb]roken pipe"):
        put(sender, LIKE)


def by_shared_memory() -> tuple[list[int], int]:
    """Whom a rank is near, and how many rooms it has made for exchanges that come one after the other; gathers have
    one block in common. They are empty when the lane is gone."""
    lane, rank, ranks = Lane(dist.group.WORLD.group_name), dist.get_rank(), dist.get_world_size()
    for i in range(10):
        parts = [numbered(r, 50 + i % 2, torch.float32) for r in range(ranks)]
        assert started(lane, "all_gather", parts[rank]).wait().equal(torch.cat(parts))
        pieces = [numbered(r, ranks * (50 + i % 2), torch.float32).chunk(ranks) for r in range(ranks)]
        exchanged = started(lane, "all_to_all", torch.cat(pieces[rank])).wait()
        assert exchanged.equal(torch.cat([it[rank] for it in pieces]))
        dist.barrier()
    beside = near(dist.group.WORLD)
    assert beside.arena is not None
    assert beside.arena.held_bytes >= ranks * parts[0].nbytes
    assert near_module.held_bytes() >= sum(room.bytes for room in beside.rooms)
    dist.barrier()
    del lane
    gc.collect()
    dist.barrier()
    assert near_module.held_bytes() <= 8 * mmap.PAGESIZE  # the arena's table
    return sorted(beside.peers), len(beside.rooms)


def test_ranks_of_one_host_are_near_each_other() -> None:
    assert run(by_shared_memory, 3, timeout_s=60) == [([1, 2], 2), ([0, 2], 2), ([0, 1], 2)]


def some_on_another_host() -> list[int]:
    """The last rank's door has another address, as in another network namespace."""
    if dist.get_rank() == dist.get_world_size() - 1:
        near_module._address = lambda name: f"\0elsewhere-{name:x}"
    assert many_in_flight()
    return sorted(near(dist.group.WORLD).peers)


def test_those_on_another_host_get_messages() -> None:
    assert run(some_on_another_host, 3, timeout_s=60) == [[1], [0], []]


def strangers_call() -> list[int]:
    """Somebody who does not know the secret, before everybody else."""
    listen = socket.socket.listen

    def listened(door: socket.socket, backlog: int) -> None:
        listen(door, backlog + 1)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(door.getsockname())
        stranger.send(os.urandom(16))

    near_module.socket.socket.listen = listened  # type: ignore[method-assign]
    assert many_in_flight()
    return sorted(near(dist.group.WORLD).peers)


def test_strangers_are_not_answered() -> None:
    assert run(strangers_call, 2, timeout_s=60) == [[1], [0]]
