"""Stacks: the equal layers of a model, and the same model with fewer of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

MIXED = 4
"""Layers of at most so many kinds may take turns; as many at the front may be like none of the others."""


class Stack(NamedTuple):
    """A list of layers that repeats."""

    name: str
    layers: nn.ModuleList | nn.Sequential
    period: int
    """after how many layers one of the same kind comes"""
    front: int
    """layers before the first that repeats"""


def stacks(model: nn.Module) -> list[Stack]:
    """The longest lists of equal layers, all of one length and one period: what can be made shorter together."""
    found = [s for name, layers in model.named_modules() if (s := _stack(name, layers))]
    if not found:
        return []
    longest = max(found, key=lambda s: len(s.layers))
    return [s for s in found if (len(s.layers), s.period) == (len(longest.layers), longest.period)]


def _stack(name: str, layers: nn.Module) -> Stack | None:
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        return None
    numbered = list(enumerate(layers))
    for period in range(1, MIXED + 1):
        pairs = list(zip(numbered, numbered[period:], strict=False))
        differ = [i + 1 for (i, a), (j, b) in pairs if not _same(i, a, j, b)]
        if len(pairs) > MIXED and max(differ, default=0) <= MIXED:
            return Stack(name, layers, period, max(differ, default=0))
    return None


def _same(i: int, a: nn.Module, j: int, b: nn.Module) -> bool:
    """Two layers with the same modules, parameters and plain attributes, but for their own number."""
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    return ours.keys() == theirs.keys() and all(_alike(i, ours[key], j, theirs[key]) for key in ours)


def _alike(i: int, a: nn.Module, j: int, b: nn.Module) -> bool:
    if type(a) is not type(b) or _shapes(a) != _shapes(b):
        return False
    ours, theirs = _plain(a), _plain(b)
    if ours.keys() != theirs.keys():
        return False
    return all(ours[key] == theirs[key] or (ours[key], theirs[key]) == (i, j) for key in ours)


def _shapes(module: nn.Module) -> list[tuple[Any, ...]]:
    return [(key, p.shape, p.dtype, p.requires_grad) for key, p in module._parameters.items() if p is not None]


def _plain(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}


@contextmanager
def shortened(found: Sequence[Stack], depth: int) -> Iterator[None]:
    """The model with only the first `depth` layers of each stack, for as long as this is open."""
    with ExitStack() as undo:
        for stack in found:
            modules = stack.layers._modules
            undo.callback(_restore, modules, dict(modules))
            for key in list(modules)[depth:]:
                del modules[key]
        yield


def _restore(modules: dict[str, Any], before: dict[str, Any]) -> None:
    modules.clear()
    modules.update(before)
