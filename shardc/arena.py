"""Arena: memory in which what ranks of one host gather lies once, for all of them.

Each rank writes its part where the result is to be, and reads those of others there: nothing is sent, and nothing is
copied a second time. Which block of the arena the n-th gather of a group is in, the first rank that comes to it
decides, and writes down for the others. A rank gives a block up when its last tensor there is gone; it is used again
when all have. Nobody waits for a block, for there is another as soon as none is free.

The arena is one file without a name (`memfd_create`), as large as the host's memory but without any until it is written
to, and gone with the last process that has mapped it. It begins with a table of blocks, that is changed under a lock of
the file: who dies lets go of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

BLOCKS = 1 << 16
"""that there may be at most"""
WASTE = 2
"""A block is as large as what it holds, or up to so many times as large."""
COUNT, END = 0, 1
"""The table's first numbers: how many blocks there are, and where the last one ends."""
HEAD = 2
COLUMNS = 4
"""of the table, and one more for each rank: the last gather that this rank has given up"""


def pages(size_bytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Arena:
    """As one rank sees it. All ranks of a group ask for the same gathers in the same order."""

    def __init__(self, fd: int, rank: int, ranks: int):
        """Maps the file; the descriptor may be closed afterwards."""
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)
        self.memory = mmap.mmap(self.fd, 0)
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.ranks = ranks
        words = memoryview(self.memory)[: _table_bytes(ranks)].cast("q")
        columns = [words[HEAD + i * BLOCKS : HEAD + (i + 1) * BLOCKS] for i in range(COLUMNS + ranks)]
        self.head = words[:HEAD]
        self.holds, self.offsets, self.sizes, self.filled, *self.given_up = columns
        """of each block: the number of its gather, where it is, how large, whether it takes memory"""
        self.own = self.given_up[rank]
        self.gathers = 0
        """that this rank has asked room for"""
        self.lock, self.depth = threading.RLock(), 0

    @staticmethod
    def made(ranks: int) -> int:
        """The descriptor of a new one."""
        fd = os.memfd_create("shardc-arena")
        os.ftruncate(fd, _table_bytes(ranks) + pages(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
        return fd

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """For what the next gather brings, of at least one byte. Raises `RuntimeError` where all memory is used up."""
        size_bytes = prod(shape) * dtype.itemsize
        with self.lock:
            self.gathers = gather = self.gathers + 1
            block = self._found(gather)
            if block is None:
                block = self._decided(gather, size_bytes)
        memory = (ctypes.c_char * size_bytes).from_buffer(self.memory, self.offsets[block])
        weakref.finalize(memory, _give_up, self.own, block, gather, os.getpid()).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)

    def offset(self, x: torch.Tensor) -> int | None:
        """Where a tensor lies, the same on all ranks; None where it is elsewhere."""
        offset = x.data_ptr() - self.begin
        return offset if 0 <= offset < len(self.memory) else None

    def give_back(self) -> None:
        """The memory of blocks that nobody holds; they take some again when they are used again."""
        with self._locked():
            for block in range(self.head[COUNT]):
                if self.filled[block] and self._is_free(block):
                    self.memory.madvise(mmap.MADV_REMOVE, self.offsets[block], self.sizes[block])
                    self.filled[block] = 0

    @property
    def held_bytes(self) -> int:
        """In all blocks that take memory, which is there once for all ranks."""
        with self._locked():
            count = self.head[COUNT]
            return sum(size * filled for size, filled in zip(self.sizes[:count], self.filled[:count], strict=True))

    def _found(self, gather: int) -> int | None:
        """The block that another rank has decided on, which stays so until this one gives it up."""
        holds = self.holds[: self.head[COUNT]].tolist()
        return holds.index(gather) if gather in holds else None

    def _decided(self, gather: int, size_bytes: int) -> int:
        """By this rank, if it is the first."""
        with self._locked():
            block = self._found(gather)
            if block is None:
                count = self.head[COUNT]
                fitting = (i for i in range(count) if size_bytes <= self.sizes[i] <= WASTE * pages(size_bytes))
                block = next(filter(self._is_free, fitting), count)
                if block == count:
                    self._add(size_bytes)
                self.holds[block], self.filled[block] = gather, 1
        return block

    def _is_free(self, block: int) -> bool:
        return all(column[block] == self.holds[block] for column in self.given_up)

    def _add(self, size_bytes: int) -> None:
        count, begin = self.head[COUNT], self.head[END] or _table_bytes(self.ranks)
        end = begin + pages(size_bytes)
        if end > len(self.memory) or count == BLOCKS:
            raise RuntimeError(f"Ranks of this host gather {end >> 20:,} MiB, in {count:,} pieces: that is too much")
        self.offsets[count], self.sizes[count] = begin, end - begin
        self.head[COUNT], self.head[END] = count + 1, end

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Against other processes, and other threads. What this one does under the lock may itself free a model, and
        come here again."""
        with self.lock:
            if self.depth == 0:
                fcntl.lockf(self.fd, fcntl.LOCK_EX)
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                if self.depth == 0:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN)


def _give_up(own: Any, block: int, gather: int, pid: int) -> None:
    """A process that was forked off has tensors of its parent, but gives nothing up for it."""
    if os.getpid() == pid:
        own[block] = gather


def _table_bytes(ranks: int) -> int:
    return pages(8 * (HEAD + (COLUMNS + ranks) * BLOCKS))
