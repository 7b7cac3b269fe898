"""Weights: values from safetensors files into a sharded model. Each rank reads its own rows and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from passes.errors import Error
from shardc import _torch
from shardc.model import runtime_of
from shardc.step import Sharded

Source = str | Path | Sequence[str | Path]
"""A safetensors file, several, or a directory with one or with an index of several."""


@dataclass
class Target:
    """Where values go: this rank's rows of a parameter, or a buffer."""

    names: list[str]
    """of a tied parameter more than one"""
    shape: tuple[int, ...]
    tensor: torch.Tensor
    is_parameter: bool
    rows: slice | EllipsisType
    """of the whole, those that `tensor` is for"""


def load(model: nn.Module, source: Source, *, strict: bool = True, progress: bool = True) -> list[str]:
    """Reads parameters and buffers of a compiled model from safetensors files, by name, cast to the model's dtypes.
    Returns the names in the files that the model does not have.

    strict: a parameter that no file holds is an error; a buffer may be missing. progress: a bar on rank 0's stderr.
    Raises `shardc.Error` for what is missing or has another shape, before anything is changed.
    """
    runtime = runtime_of(model)
    with ExitStack() as stack:
        stored = _open(source, stack)
        targets = [*_parameters(model, runtime.params.values()), *_buffers(model)]
        found = _match(stored, targets, strict)
        total = sum(target.tensor.nbytes for _, target in found)
        shown = progress and dist.get_rank() == 0
        with tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=not shown) as bar:
            for name, target in found:
                _read(stored[name], name, target)
                bar.update(target.tensor.nbytes)
        runtime.mark_stale()
        return sorted(set(stored) - {name for target in targets for name in target.names})


def _open(source: Source, stack: ExitStack) -> dict[str, Any]:
    """The open file that holds each name."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise Error("Reading weights needs the package safetensors.", fix="pip install safetensors") from error
    stored = {}
    for path in _files(source):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise Error(f"{path} is not a whole safetensors file: {error}", fix="Copy it again.") from error
        stored.update(dict.fromkeys(file.keys(), file))
    return stored


def _files(source: Source) -> list[Path]:
    paths = [Path(p) for p in ([source] if isinstance(source, (str, Path)) else source)]
    files = [file for path in paths for file in (_in_directory(path) if path.is_dir() else [path])]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise Error(
            f"There are no weights at {', '.join(missing or map(str, paths))}.",
            fix="Name safetensors files, or a directory that has some.",
        )
    return files


def _in_directory(directory: Path) -> list[Path]:
    """What the index lists, where there is one: the directory may hold other formats and versions too."""
    indices = sorted(directory.glob("*.safetensors.index.json"))
    if not indices:
        return sorted(directory.glob("*.safetensors"))
    return sorted({directory / name for i in indices for name in json.loads(i.read_text())["weight_map"].values()})


def _parameters(model: nn.Module, sharded: Iterable[Sharded]) -> Iterator[Target]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for p in sharded:
        yield Target(names[id(p.tensor)], p.param.layout.shape, _torch.local_of(p.tensor), True, p.rows)


def _buffers(model: nn.Module) -> Iterator[Target]:
    for name, buffer in model.named_buffers():
        yield Target([name], tuple(buffer.shape), buffer, False, ...)


def _match(stored: dict[str, Any], targets: list[Target], strict: bool) -> list[tuple[str, Target]]:
    """(name in the files, target)"""
    found, wrong = [], []
    for target in targets:
        name = next((name for name in target.names if name in stored), None)
        if name is None:
            wrong += [_missing(target, stored)] if strict and target.is_parameter else []
            continue
        shape = tuple(stored[name].get_slice(name).get_shape())
        if shape != target.shape:
            wrong.append(f"{name} is {list(shape)}, the model's is {list(target.shape)}")
        found.append((name, target))
    if wrong:
        raise Error(
            f"{len(wrong)} of the model's parameters and buffers do not fit the files:\n    " + "\n    ".join(wrong),
            fix="Build the model from the configuration that the files belong to; with strict=False, "
            "parameters that no file holds stay as they are.",
        )
    return found


def _missing(target: Target, stored: dict[str, Any]) -> str:
    close = get_close_matches(target.names[0], stored, n=1)
    return f"{target.names[0]} is not there" + (f" (the closest name is {close[0]})" if close else "")


def _read(file: Any, name: str, target: Target) -> None:
    if target.tensor.numel():
        with torch.no_grad():
            target.tensor.copy_(file.get_slice(name)[target.rows])
