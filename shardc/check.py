"""What a model has to be, before it is sharded and when it is called; each thing that cannot be is one error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from passes.errors import Error

_WRAPPERS = {
    "DataParallel": "model.module",
    "DistributedDataParallel": "model.module",
    "FullyShardedDataParallel": "model.module",
    "OptimizedModule": "model._orig_mod",
}


def check_model(model: Any) -> None:
    """Raises `shardc.Error` for what cannot be sharded, naming the parameter or module."""
    if not isinstance(model, nn.Module):
        raise Error(f"shardc compiles an nn.Module, not a {type(model).__name__}.")
    if hasattr(model, "_shardc"):
        raise Error("This model is compiled already.", fix="Build it anew to compile it under another plan.")
    if type(model).__name__ in _WRAPPERS:
        raise Error(
            f"The model is wrapped in {type(model).__name__}, which shardc takes the place of.",
            fix=f"Pass the plain model ({_WRAPPERS[type(model).__name__]}).",
        )
    if "forward" in vars(model):
        raise Error(
            "`forward` was assigned to this model object, past its class.", fix="Define it in a subclass of the model."
        )
    if next(model.parameters(), None) is None:
        raise Error(f"{type(model).__name__} has no parameters: there is nothing to shard.")
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise Error(
                f"{name or type(module).__name__!r} makes sparse gradients, which collectives of tensors cannot carry.",
                fix="Leave `sparse` False; the plan shards the dense gradient.",
            )


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        raise Error(
            f"Parameter {name!r} is a DTensor: something has sharded the model before.",
            fix="Pass the plain model; shardc shards each parameter once, over the whole mesh.",
        )
    if is_lazy(parameter):
        raise Error(f"Parameter {name!r} has no shape yet.", fix="Call the model once on a small batch first.")
    if parameter.is_complex():
        raise Error(
            f"Parameter {name!r} is {parameter.dtype}: collectives and Inductor do not take complex numbers.",
            fix="Make its real view the parameter (torch.view_as_real), and use torch.view_as_complex in the forward.",
        )
    if parameter.layout != torch.strided:
        raise Error(f"Parameter {name!r} is {parameter.layout}, not dense.", fix="Use a dense parameter.")


def check_inputs(model: nn.Module, inputs: Sequence[Any], hollows: Mapping[int, str]) -> None:
    """Among the inputs of a graph there may be no parameter that the model has got since it was sharded. `hollows`: the
    names of stand-ins by id."""
    names = {id(p): name for name, p in model.named_parameters()}
    for value in inputs:
        if isinstance(value, nn.Parameter) and id(value) in names.keys() - hollows.keys():
            raise Error(
                f"Parameter {names[id(value)]!r} was added after shardc.compile.",
                fix="Build the whole model first, adapters included, then compile it.",
            )


def check_result(result: Any, hollows: Mapping[int, str]) -> None:
    """A parameter that the forward returns as it is does not pass through the graph, and its stand-in is empty."""
    for value in values_in(result):
        if id(value) in hollows:
            raise Error(
                f"The forward returns the parameter {hollows[id(value)]!r} itself, of which a rank has only a piece.",
                fix="Return what was computed from it (such as its .clone()), or read it from the model outside.",
            )


def values_in(nested: Any) -> list[Any]:
    """All that is in nested outputs, dataclasses among them."""
    return [value for leaf in tree_leaves(nested) for value in (_fields(leaf) if _is_record(leaf) else [leaf])]


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(record: Any) -> list[Any]:
    return values_in([getattr(record, field.name, None) for field in dataclasses.fields(record)])
