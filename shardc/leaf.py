"""Leaf: the DTensor that stands for a parameter, and says when its values are changed by hand.

Copies of parameters (where the params rung is below optim) have to be made again after a change. An ordinary in-place
op bumps the version of a tensor; but a foreach or fused op bumps nothing on a DTensor, and nor does a change through
`.data`. So a leaf sees every torch function that it is given to, and so do its aliases (`detach()`, `.data`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from passes.errors import Error
from passes.layout import Layout
from shardc import _torch

_ALIASES = (torch.Tensor.detach, torch.Tensor.data.__get__)
_SET_DATA = torch.Tensor.data.__set__


class Leaf(DTensor):
    """A DTensor whose `changed()` is called when a torch function has written to it. It is pickled as a DTensor."""

    __slots__ = ()
    changed: Changed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA:
            raise Error(
                "Assigning to `.data` of a sharded parameter would change nothing: a DTensor's values lie elsewhere.",
                fix="Write into it: `with torch.no_grad(): parameter.copy_(values)`.",
            )
        try:
            result = super().__torch_function__(func, types, tuple(args), kwargs or {})
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise Error(
                "A sharded parameter met a plain tensor outside of the model's forward.",
                where=getattr(func, "__name__", None),
                fix="Call the compiled model, not a part of it; or take the whole value (`parameter.full_tensor()`).",
            ) from error
        if func in _ALIASES:
            return watched(result, args[0].changed)
        if args and _writes(func):
            for target in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(target, Leaf):
                    target.changed()
        return result

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Leaf:
        """For torch.compile around an optimizer's step, which wants of its stand-ins the class of what it is given."""
        return watched(DTensor.__tensor_unflatten__(inner, spec, size, stride), Changed())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """Values of its own, which nobody watches."""
        new = _plain(self).clone()
        copied = nn.Parameter(new, self.requires_grad) if isinstance(self, nn.Parameter) else new
        return memo.setdefault(id(self), copied)


# torch's staging of asynchronous checkpoints copies what the class of a tensor lists here.
Leaf.__slots__ = DTensor.__slots__


class Changed:
    """Calls a method of an object for as long as that is alive. A pickled or copied one calls nothing."""

    def __init__(self, method: Callable[[], None] | None = None):
        self.method = None if method is None else weakref.WeakMethod(method)

    def __call__(self) -> None:
        method = self.method and self.method()
        if method is not None:
            method()

    def __reduce__(self) -> tuple[type[Changed], tuple[()]]:
        return Changed, ()


def watched(tensor: DTensor, changed: Changed) -> Leaf:
    """The same object as a leaf."""
    tensor.__class__ = Leaf
    assert isinstance(tensor, Leaf)
    tensor.__dict__["changed"] = changed
    return tensor


def _plain(leaf: Leaf) -> DTensor:
    return _torch.without_torch_function(leaf.detach)


@cache
def _writes(func: Callable[..., Any]) -> bool:
    """To its first argument? Torch's naming tells: `mul_`, `_foreach_lerp_`, `_fused_adamw_`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def leaf(local: torch.Tensor, layout: Layout, mesh: DeviceMesh, requires_grad: bool) -> nn.Parameter:
    """The parameter of which this rank holds the rows `local`: a DTensor, not watched yet."""
    shape = torch.Size(layout.shape)
    placements = [Shard(0) if i < layout.optim else Replicate() for i in range(mesh.ndim)]
    stride = torch.empty(shape, device="meta").stride()
    value = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(value, requires_grad=requires_grad)
