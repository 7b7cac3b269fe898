"""Training text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@cache
def text() -> Tensor:
    """All modules in the order of their names, as one uint8 tensor of about 11 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    source = b"\n".join((root / path).read_bytes() for path in files if not SKIP & set(path.parts))
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)


def batch(step: int, micro: int, rank: int, *, rows: int, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both int64 [rows, context]: a function of its arguments alone, so that any process
    can make the micro-batch of any rank."""
    generator = torch.Generator().manual_seed((step * 64 + micro) * 65536 + rank)
    starts = torch.randint(len(text()) - context, (rows, 1), generator=generator)
    lines = text()[starts + torch.arange(context + 1)].long()
    return lines[:, :-1], lines[:, 1:]
