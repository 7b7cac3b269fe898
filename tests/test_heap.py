"""Heap: what is freed stays with the process, unless its user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardc.heap import OWN_WORD

FAULTS = """
import resource
import torch
from shardc.heap import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.zeros(1 << 26, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before, keeps = faults(), keep_freed()
faults()
print(before, keeps, faults())
"""


def faults(**own: str) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name not in OWN_WORD} | own
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_memory_that_is_kept_is_cleared_by_the_system_once() -> None:
    before, keeps, after = faults()
    assert keeps == "True" and int(after) < int(before) / 10


@pytest.mark.parametrize("name", OWN_WORD[:2])
def test_who_has_set_the_allocator_up_keeps_it_as_it_is(name: str) -> None:
    before, keeps, after = faults(**{name: str(1 << 20)})
    assert keeps == "False" and int(after) > int(before) / 2
