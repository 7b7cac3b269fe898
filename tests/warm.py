"""Warm: imported by the process that ranks are forked from, so that each finds a first trace done.

A first trace imports and caches for a second or more, which every rank of every test would spend anew.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

import shardc


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


# What is broken shows in a test that uses it; here it would take the server down.
with contextlib.suppress(Exception):
    _program = shardc.trace(_Model(), shardc.Plan.hpz(shardc.Topology(node=2, gpu=2)), torch.ones(2, 2))
    _program.refreshed()
    _program.variation(synced=True)
torch._dynamo.reset()
