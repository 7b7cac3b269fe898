"""Messages: on Gloo, all but all-reduces are messages from each rank of a group to each other one.

Gloo's own gather and all-to-all of two ranks keep the two directions of a connection busy one after the other (on a
link of 400 Mbit/s they reach 27 to 40 MB/s each way where messages reach 47), and its reduce-scatter sends twice what
is needed. A message goes from where a value is to where it is needed, in both directions at once, and no thread in
between has to wake up. Messages between two ranks arrive in the order in which they were sent. What is for a rank
of the same host goes through shared memory (`shardc.near`).

What is to be summed is summed where it arrives, by whoever waits for it first, in the order of ranks and in float32. As
an op of the graph the sum would fuse with what follows it, but the next hop of its chain would have to wait until
compute comes by: with two hosts at 400 Mbit/s a step took 14% longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from shardc import _torch
from shardc.near import near

CPU = torch.device("cpu")
TAG = 0x5AD
"""of all messages between two ranks of a group; they are told apart by their order"""


class Messages:
    """A collective under way. It may be waited for again, and by several threads; what Gloo gives may not."""

    def __init__(self, group: Any, works: list[Any], then: Callable[[], Any] = lambda: None):
        """`then` is done once, when all have come."""
        self.works, self.then = works, [then]
        self.timeout = _torch.timeout_of(group, CPU)  # a message would wait for as long as Gloo itself does
        self.lock = threading.Lock()
        self.error: RuntimeError | None = None

    def wait(self) -> None:
        """Raises the same error again, at once."""
        with self.lock:
            if self.error:
                raise self.error
            try:
                self._end()
            except RuntimeError as error:
                self.error = error
                raise

    def _end(self) -> None:
        while self.works:
            self.works[-1].wait(self.timeout)
            self.works.pop()
        while self.then:
            self.then.pop()()


def in_arena(group: Any, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
    """Room for what the next gather brings, which ranks that are all near have in common. Others have no such room."""
    arena = near(group).arena
    return arena.room(shape, like.dtype) if arena and prod(shape) else None


def all_gather(group: Any, out: torch.Tensor, x: torch.Tensor) -> Messages:
    """`out` holds what all ranks have as `x`, by rank; it may be there already."""
    places, rank, arena = out.chunk(group.size()), group.rank(), near(group).arena
    offset = arena.offset(out) if arena else None
    if offset is not None:
        return _all_gather_in_arena(group, offset, places, x)
    post = Post(group, [x] * len(places), places)
    places[rank].copy_(x)
    return Messages(group, post.works, post.deliver)


def _all_gather_in_arena(group: Any, offset: int, places: Sequence[torch.Tensor], x: torch.Tensor) -> Messages:
    beside, own = near(group), places[group.rank()]
    letters = beside.expect(places)
    if x.data_ptr() != own.data_ptr():
        own.copy_(x)
    beside.tell(offset)

    def come() -> None:
        for letter in letters.values():
            letter.told(offset)

    return Messages(group, [], come)


def all_to_all(group: Any, out: torch.Tensor, x: torch.Tensor) -> Messages:
    """Rank i gets the i-th piece of `x` of each rank."""
    pieces, places, rank = x.chunk(group.size()), out.chunk(group.size()), group.rank()
    post = Post(group, pieces, places)
    places[rank].copy_(pieces[rank])
    return Messages(group, post.works, post.deliver)


def reduce_scatter(group: Any, out: torch.Tensor, x: torch.Tensor) -> Messages:
    """Rank i gets the sum of the i-th pieces of `x` of all ranks."""
    pieces, rank, peers = x.chunk(group.size()), group.rank(), near(group).peers
    parts = [pieces[i] if i == rank else out if i in peers else torch.empty_like(out) for i in range(len(pieces))]
    post = Post(group, pieces, parts)
    return Messages(group, post.works, partial(_sum, post, parts, out))


def _sum(post: Post, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    parts = [post.letters[rank].open() if rank in post.letters else part for rank, part in enumerate(parts)]
    torch.add(_exact_sum(parts[:-1], out), parts[-1], out=out)  # rounds once
    for letter in post.letters.values():
        letter.close()


def _exact_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """In float32 at least, in place of what it may write into. Of one part nothing is copied."""
    if len(parts) == 1:
        return parts[0]
    exact = torch.promote_types(out.dtype, torch.float32)
    total = torch.add(parts[0].to(exact), parts[1], out=out if out.dtype == exact else None)
    for part in parts[2:]:
        total += part
    return total


class Post:
    """To each other rank its piece, and from each what goes to its place: by Gloo, or in shared memory from those that
    are near."""

    def __init__(self, group: Any, pieces: Sequence[torch.Tensor], places: Sequence[torch.Tensor]):
        rank, ranks, beside = group.rank(), group.size(), near(group)
        others = [(rank + i) % ranks for i in range(1, ranks)]
        far = [other for other in others if other not in beside.peers]
        self.places = places
        self.letters = beside.expect(places)
        received = [group.recv([places[other]], other, TAG) for other in reversed(far)]
        self.works = [*(group.send([pieces[other]], other, TAG) for other in far), *received]
        beside.put(pieces)

    def deliver(self) -> None:
        for rank, letter in self.letters.items():
            self.places[rank].copy_(letter.open())
            letter.close()
