"""Ahead: a forward that has begun before its batch is there.

Behind an optimizer's step, refreshes and the first gathers of the next forward need nothing but parameters. So a
forward can be begun and left at the first value that it would have to wait for, while the loop loads its next batch;
when it is called, it goes on from there. It counts only as long as no parameter is written to.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getgeneratorlocals
from typing import TYPE_CHECKING, Any

import torch

from shardc.lanes import Flying

if TYPE_CHECKING:
    from shardc.step import Sharded, Step


@dataclass(eq=False)
class Begun:
    """Of one step's forward."""

    step: Step
    params: Mapping[str, Sharded]
    versions: Sequence[int]
    running: Generator[None, list[Any], Any]

    @classmethod
    def of(cls, step: Step) -> Begun:
        """Raises `Error` for a backend whose forwards have no parts."""
        for p in step.params.values():
            p.seen_version = p.tensor._version
        with torch.inference_mode(False), torch.no_grad():
            running = step.begin()
            next(running)
        return cls(step, step.params, _versions(step.params), running)

    def holds(self, step: Step) -> bool:
        """It is that step's, and parameters are as they were."""
        return step is self.step and _versions(self.params) == self.versions and -1 not in _seen(self.params)

    def finish(self, later: list[Any]) -> Any:
        """With the inputs that it lacks: what the forward returns."""
        try:
            self.running.send(later)
        except StopIteration as done:
            return done.value
        raise AssertionError("a forward has two parts")

    def drop(self) -> None:
        """When nothing that it sent for is under way any more."""
        for value in getgeneratorlocals(self.running).values():
            if isinstance(value, Flying):
                value.come()
        self.running.close()


def _versions(params: Mapping[str, Sharded]) -> list[int]:
    return [p.tensor._version for p in params.values()]


def _seen(params: Mapping[str, Sharded]) -> list[int]:
    return [p.seen_version for p in params.values()]
