"""Heap: memory of the host that a step has freed stays with the process, for the next step to take.

glibc gives large values back to the system as they are freed, and the system clears each page again when the next step
touches it: thousands of faults a step, for a tenth of its time where ranks gather and reduce on CPUs. Memory of GPUs
stays with torch's allocator in the same way. The price is that memory stays resident that was needed for a moment, and
gaps between what lives: a full state dict of 192 MiB on rank 0, of parameters of 4 MiB, took 267 MiB, where it takes
less than 227 if freed pages return.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""mallopt(3): what is as large is mapped and unmapped by itself; free memory at the end that is given back"""
SIZES = 2**31 - 1, 2**25
"""the largest that mallopt's argument can be, and that older versions of glibc take"""
OWN_WORD = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
"""Variables of the environment by which a user says it otherwise."""


@cache
def keep_freed() -> bool:
    """From here on this process keeps what it frees. Returns whether it does: another C library, and a user who has
    set glibc's own variables, are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in OWN_WORD):
        return False
    # In this order: a threshold that is set keeps glibc from raising the other one by itself.
    return any(mallopt(MMAP_THRESHOLD, size) for size in SIZES) and bool(mallopt(TRIM_THRESHOLD, SIZES[0]))
