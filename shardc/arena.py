"""Arena: memory in which what ranks of one host gather lies once, for all of them.

Each rank writes its part where the result is to be, and reads those of others there: nothing is sent, and nothing is
copied a second time. Where in the arena the n-th gather of a group is, the first rank that comes to it decides, and
writes down for the others. A rank gives its block up when its last tensor there is gone; when all have, it is free:
blocks that are free beside each other are joined, and the smallest that is large enough is cut. Nobody waits for one,
for at the end of the arena there is always more.

The arena is one file without a name (`memfd_create`), as large as the host's memory but without any until it is written
to, and gone with the last process that has mapped it. It begins with a table of blocks, that is changed under a lock of
the file: who dies lets go of it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

BLOCKS = 1 << 16
"""that there may be at most"""
HEAD = 1
"""The table's first number: how many rows there are of what follows."""
COLUMNS = 3
"""and one more for each rank: the last gather that this rank has given up"""


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
        self.holds, self.offsets, self.sizes, *self.given_up = columns
        """of each block: the number of its gather, where it is, how large; or 0, where the row is not used"""
        self.own = self.given_up[rank]
        self.gathers = 0
        """that this rank has asked room for"""
        self.lock, self.depth = threading.RLock(), 0

    @staticmethod
    def made(ranks: int) -> int:
        """The descriptor of a new one: all of it one block that is free."""
        fd, begin = os.memfd_create("shardc-arena"), _table_bytes(ranks)
        size = pages(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        os.ftruncate(fd, begin + size)
        for place, number in ((0, 1), (HEAD + BLOCKS, begin), (HEAD + 2 * BLOCKS, size)):
            os.pwrite(fd, number.to_bytes(8, sys.byteorder), 8 * place)
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
            for run in self._free_runs():
                self.memory.madvise(mmap.MADV_REMOVE, self.offsets[run[0]], self._bytes(run))

    @property
    def held_bytes(self) -> int:
        """What it takes of the host's memory, which is there once for all ranks; its table takes a few pages."""
        return os.fstat(self.fd).st_blocks * 512

    def _found(self, gather: int) -> int | None:
        """The block that another rank has decided on, which stays so until this one gives it up."""
        holds = self.holds[: self.head[0]].tolist()
        return holds.index(gather) if gather in holds else None

    def _decided(self, gather: int, size_bytes: int) -> int:
        """By this rank, if it is the first."""
        with self._locked():
            block = self._found(gather)
            if block is None:
                block = self._cut(pages(size_bytes))
                self.holds[block] = gather  # last: others look for it without the lock
        return block

    def _cut(self, size: int) -> int:
        """A block of that size, of the smallest run that has so much."""
        run = min((run for run in self._free_runs() if self._bytes(run) >= size), key=self._bytes, default=None)
        count = self.head[0]
        if run is None or count == BLOCKS:
            raise RuntimeError(f"Ranks of this host gather {size >> 20:,} MiB, beside {count:,} blocks: too much")
        block, rest = run[0], self._bytes(run) - size
        for joined in run[1:]:
            self.sizes[joined] = 0
        if rest:
            self._add(self.offsets[block] + size, rest)
        self.sizes[block] = size
        return block

    def _free_runs(self) -> list[list[int]]:
        """Blocks that nobody holds, those together that lie beside each other."""
        count = self.head[0]
        offsets, sizes = self.offsets[:count].tolist(), self.sizes[:count].tolist()
        holds, *given_up = (column[:count].tolist() for column in (self.holds, *self.given_up))
        free = [i for i in range(count) if sizes[i] and all(column[i] == holds[i] for column in given_up)]
        runs: list[list[int]] = []
        for block in sorted(free, key=offsets.__getitem__):
            if runs and offsets[runs[-1][-1]] + sizes[runs[-1][-1]] == offsets[block]:
                runs[-1].append(block)
            else:
                runs.append([block])
        return runs

    def _bytes(self, run: Sequence[int]) -> int:
        return sum(self.sizes[block] for block in run)

    def _add(self, offset: int, size: int) -> None:
        """A free block, in a row that is not used."""
        count = self.head[0]
        row = next((i for i, size in enumerate(self.sizes[:count]) if not size), count)
        self.offsets[row], self.sizes[row] = offset, size
        self.head[0] = max(count, row + 1)

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
