"""The most bytes that are given out while something runs: by the GPU's allocator, or by the C library's."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

import torch

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def grown(run: Callable[[], object]) -> int:
    """Bytes above those that were given out before. Of the C library's they are looked at every 0.3 ms."""
    gc.collect()
    return _grown_on_gpu(run) if torch.cuda.is_available() else _grown_on_cpu(run)


def _grown_on_gpu(run: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _grown_on_cpu(run: Callable[[], object]) -> int:
    before, most, over = given_out(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            most[0] = max(most[0], given_out() - before)
            time.sleep(0.0003)

    thread = threading.Thread(target=watch)
    thread.start()
    run()
    over.set()
    thread.join()
    return most[0]


LIBC = ctypes.CDLL("libc.so.6")
LIBC.mallinfo2.restype = _Info


def given_out() -> int:
    """Bytes that the C library's allocator has given out."""
    info = LIBC.mallinfo2()
    return int(info.uordblks + info.hblkhd)
