"""Near: ranks of one host hand each other values in shared memory.

Gloo sends a value to the process beside it as it does to another host: through TCP, copied into the kernel and out of
it, in pieces, by threads that have to wake up. Here the sender copies it into memory that both have mapped, and who
waits for it reads it where it lies. A letter of two numbers, over a Unix socket, says that it is there, and in which
room of that memory; letters keep their order, and who dies closes its sockets. A room is used again when all its
readers have written into it that they have read it; nobody waits for one, for there is another as soon as none is free.
Where all ranks of a group are near, what they gather lies in their arena (`shardc.arena`), and a letter only says that
a part of it is there.

Whom a Unix socket without a path reaches shares kernel and network with this rank, and that is what near means. Rooms
have no names (`memfd_create`; the socket passes the descriptor on), so they are gone with the last process that has
mapped them, however it ends; what nobody needs of their memory is given back whenever a model is gone.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardc import _torch
from shardc.arena import Arena, pages

CPU = torch.device("cpu")
TAG = 0x5AD + 1
"""of what is said when ranks find each other"""
LETTER = struct.Struct("qq")
"""Which room of the sender, and how many values it has had in it; or `IN_ARENA`, and where."""
IN_ARENA = -1
WASTE = 1.25
"""A room is as large as what it holds, or up to so many times as large, and the smallest that is free. With twice,
small values lay in large rooms while others had yet to read those of their size, and in time ranks had up to twice as
many large ones as they needed."""


class Room:
    """Memory for one value at a time. It begins with a number for each rank: of the last value that it has read."""

    def __init__(self, fd: int, ranks: int, readers: Sequence[int] = ()):
        self.memory = mmap.mmap(fd, 0)
        self.read = memoryview(self.memory).cast("q")
        self.offset = pages(8 * ranks)
        self.bytes = len(self.memory) - self.offset
        self.readers = readers
        self.value = 0
        """how many it has had"""
        self.is_filled = False
        """whether it takes memory"""

    @property
    def is_free(self) -> bool:
        return all(self.read[rank] == self.value for rank in self.readers)

    def put(self, x: torch.Tensor) -> None:
        self.value, self.is_filled = self.value + 1, True  # from here on it is not free
        self.like(x).copy_(x)

    def give_back(self) -> None:
        """Its memory, wherever it is mapped; it takes some again when it is used again."""
        self.memory.madvise(mmap.MADV_REMOVE, self.offset)
        self.is_filled = False

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """What is in it, which is like another tensor."""
        flat = torch.frombuffer(self.memory, dtype=x.dtype, count=x.numel(), offset=self.offset)
        return flat.view(x.shape)


class Peer:
    """Another rank, and what has come from it."""

    def __init__(self, rank: int, ranks: int, connection: socket.socket, timeout_s: float):
        self.rank, self.ranks, self.connection, self.timeout_s = rank, ranks, connection, timeout_s
        connection.settimeout(timeout_s)
        self.rooms: dict[int, Room] = {}
        self.letters: dict[int, tuple[int, int]] = {}
        """that nobody has taken yet, by their place in the order of all"""
        self.expected = self.came = 0
        self.changed = threading.Condition()
        self.is_read = False
        """whether a thread reads the socket"""

    def send(self, room: int, value: int, fd: int | None) -> None:
        try:
            socket.send_fds(self.connection, [LETTER.pack(room, value)], [] if fd is None else [fd])
        except OSError as error:
            raise RuntimeError(f"Connection to rank {self.rank} of the group: {error}") from None

    def expect(self) -> int:
        """The place of the next letter that nobody expects yet."""
        self.expected += 1
        return self.expected

    def take(self, place: int) -> tuple[int, int]:
        """Waits for a letter, and returns it. One thread reads the socket, for all."""
        with self.changed:
            while place not in self.letters:
                if self.is_read:
                    self.changed.wait()
                else:
                    self._next()
            return self.letters.pop(place)

    def _next(self) -> None:
        self.is_read = True
        self.changed.release()
        try:
            room, value, fds = self._received()
        finally:
            self.changed.acquire()
            self.is_read = False
            self.changed.notify_all()
        for fd in fds:
            self.rooms[room] = Room(fd, self.ranks)
            os.close(fd)
        self.came += 1
        self.letters[self.came] = room, value

    def _received(self) -> tuple[int, int, list[int]]:
        try:
            said, fds, _, _ = socket.recv_fds(self.connection, LETTER.size, 1)
        except TimeoutError:
            raise RuntimeError(
                f"Timed out after {self.timeout_s:g} s waiting for rank {self.rank} of the group"
            ) from None
        except OSError as error:
            raise RuntimeError(f"Connection to rank {self.rank} of the group: {error}") from None
        if not said:
            raise RuntimeError(f"Connection closed by rank {self.rank} of the group")
        return *LETTER.unpack(said), fds


class Near:
    """What a rank shares with those of its group that are near."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        connections: Mapping[int, socket.socket],
        timeout_s: float,
        arena: Arena | None = None,
    ):
        self.rank, self.ranks, self.arena = rank, ranks, arena
        self.rooms: list[Room] = []
        self.lock = threading.RLock()
        """for rooms: a lane may end on any thread, and in the middle of what this one does"""
        self.peers = {other: Peer(other, ranks, connection, timeout_s) for other, connection in connections.items()}

    def put(self, pieces: Sequence[torch.Tensor]) -> None:
        """For each peer its piece; what is the same for all is in one room."""
        with self.lock:
            if self.peers and all(piece is pieces[0] for piece in pieces):
                self._put(pieces[0], list(self.peers))
            else:
                for rank in self.peers:
                    self._put(pieces[rank], [rank])

    def _put(self, x: torch.Tensor, readers: Sequence[int]) -> None:
        fitting = (i for i, room in enumerate(self.rooms) if _fits(room, x, readers))
        index = min(fitting, key=lambda i: self.rooms[i].bytes, default=len(self.rooms))
        fd = self._more(x.nbytes, readers) if index == len(self.rooms) else None
        room = self.rooms[index]
        room.put(x)
        for rank in readers:
            self.peers[rank].send(index, room.value, fd)
        if fd is not None:
            os.close(fd)  # in flight it stays open

    def _more(self, size_bytes: int, readers: Sequence[int]) -> int:
        """One room more, and its descriptor."""
        fd = os.memfd_create("shardc")
        os.ftruncate(fd, pages(8 * self.ranks) + pages(size_bytes))
        self.rooms.append(Room(fd, self.ranks, readers))
        return fd

    def tell(self, offset: int) -> None:
        """All: what this rank has of a gather is in the arena."""
        for peer in self.peers.values():
            peer.send(IN_ARENA, offset, None)

    def give_back(self) -> None:
        """The memory of rooms that nobody has yet to read, and of what nobody holds in the arena."""
        if self.arena:
            self.arena.give_back()
        with self.lock:
            for room in self.rooms:
                if room.is_filled and room.is_free:
                    room.give_back()

    def expect(self, like: Sequence[torch.Tensor]) -> dict[int, Letter]:
        """The next value from each peer, which is like a tensor."""
        return {rank: Letter(self, peer, like[rank]) for rank, peer in self.peers.items()}


def _fits(room: Room, x: torch.Tensor, readers: Sequence[int]) -> bool:
    return x.nbytes <= room.bytes <= WASTE * pages(x.nbytes) and room.readers == readers and room.is_free


class Letter:
    """A value that another rank has put or will put."""

    def __init__(self, near: Near, peer: Peer, like: torch.Tensor):
        self.near, self.peer, self.like = near, peer, like
        self.place = peer.expect()

    def open(self) -> torch.Tensor:
        """Waits for the value, and returns it where it lies: not to be used after `close`."""
        number, self.value = self.peer.take(self.place)
        self.room = self.peer.rooms[number]
        return self.room.like(self.like)

    def told(self, offset: int) -> None:
        """Waits until the other rank's part of a gather is in the arena. Raises `RuntimeError` where it was about to do
        something else."""
        found = self.peer.take(self.place)
        if found != (IN_ARENA, offset):
            raise RuntimeError(f"Rank {self.peer.rank} of the group is at another collective: {found}")

    def close(self) -> None:
        """It was read."""
        self.room.read[self.near.rank] = self.value


_NEAR: WeakKeyDictionary[Any, Near] = WeakKeyDictionary()


def near(group: Any) -> Near:
    """Of a group on Gloo. The first time, all its ranks have to come here."""
    found = _NEAR.get(group)
    if found is None:
        timeout_s = _torch.timeout_of(group, CPU).total_seconds()
        connections = _connections(group, timeout_s)
        arena = _arena(group.rank(), connections) if len(connections) == group.size() - 1 else None
        found = _NEAR[group] = Near(group.rank(), group.size(), connections, timeout_s, arena)
    return found


def give_back(group: str | None = None) -> None:
    """What ranks that are near share for a group, by its name, or for all: nobody needs it for now."""
    for known, shared in list(_NEAR.items()):
        if group in (None, known.group_name):
            shared.give_back()


def held_bytes() -> int:
    """In all rooms that this process has filled, and its share of arenas."""
    rooms = sum(room.bytes for it in _NEAR.values() for room in it.rooms if room.is_filled)
    return rooms + sum(it.arena.held_bytes // it.ranks for it in _NEAR.values() if it.arena)


def is_shared(x: torch.Tensor) -> bool:
    """Whether it lies in an arena, so that it is there once for several ranks."""
    return any(it.arena.offset(x) is not None for it in _NEAR.values() if it.arena)


# How ranks find each other


def _connections(group: Any, timeout_s: float) -> dict[int, socket.socket]:
    """To each other rank that is near: the lower one calls, the higher one answers."""
    rank, ranks = group.rank(), group.size()
    name, secret = secrets.randbits(62), secrets.randbits(62)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(timeout_s)
        door.bind(_address(name))
        door.listen(ranks)
        said = _exchanged(group, {other: [name, secret] for other in range(ranks)})
        called = {other: _call(said[other], rank) for other in range(rank + 1, ranks)}
        calls = _exchanged(group, {other: [int(called.get(other) is not None)] for other in range(ranks)})
        answered = _answer(door, secret, sum(calls[other][0] for other in range(rank)), timeout_s)
    return answered | {other: it for other, it in called.items() if it is not None}


def _address(name: int) -> str:
    return f"\0shardc-{name:x}"


def _call(said: list[int], rank: int) -> socket.socket | None:
    """None where nobody is: the other rank is on another host."""
    name, secret = said
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_address(name))
    except ConnectionRefusedError:
        connection.close()
        return None
    connection.send(LETTER.pack(secret, rank))
    return connection


def _answer(door: socket.socket, secret: int, count: int, timeout_s: float) -> dict[int, socket.socket]:
    """To all that call, and know the secret."""
    found: dict[int, socket.socket] = {}
    while len(found) < count:
        connection, _ = door.accept()
        connection.settimeout(timeout_s)
        said = connection.recv(LETTER.size)
        if len(said) == LETTER.size and LETTER.unpack(said)[0] == secret:
            found[LETTER.unpack(said)[1]] = connection
        else:
            connection.close()
    return found


def _arena(rank: int, connections: Mapping[int, socket.socket]) -> Arena:
    """That the first rank makes, of a group whose ranks are all near."""
    if rank == 0:
        fd = Arena.made(len(connections) + 1)
        for connection in connections.values():
            socket.send_fds(connection, [b"arena"], [fd])
    else:
        _, fds, _, _ = socket.recv_fds(connections[0], len(b"arena"), 1)
        fd = fds[0]
    arena = Arena(fd, rank, len(connections) + 1)
    os.close(fd)
    return arena


def _exchanged(group: Any, numbers: dict[int, list[int]]) -> dict[int, list[int]]:
    """To each rank its numbers, and from each other one what it has for this one."""
    others = [rank for rank in numbers if rank != group.rank()]
    sent = {rank: torch.tensor(numbers[rank]) for rank in others}
    found = {rank: torch.empty_like(sent[rank]) for rank in others}
    works = [group.recv([found[rank]], rank, TAG) for rank in others]
    works += [group.send([sent[rank]], rank, TAG) for rank in others]
    for work in works:
        work.wait(_torch.timeout_of(group, CPU))
    return {rank: it.tolist() for rank, it in found.items()}
