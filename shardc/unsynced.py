"""What `.grad` is while gradients wait, unsynced, in an accumulator on another rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from passes.errors import Error


class UnsyncedGradient(torch.Tensor):
    """A gradient without storage that says no to every use but `zero_grad`, in either form.

    An optimizer or `clip_grad_norm_` that meets one would work on gradients that are not there yet; an error is
    better than a step that silently leaves them out.
    """

    parameter: str
    zeroed: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str) -> UnsyncedGradient:
        self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        self.parameter, self.zeroed = name, False
        return self

    @staticmethod
    def cleared(grad: torch.Tensor | None) -> bool:
        """True when the marker is gone or was zeroed: what it stood for is to be dropped."""
        return not isinstance(grad, UnsyncedGradient) or grad.zeroed

    def __repr__(self, **kwargs: Any) -> str:
        return f"UnsyncedGradient({self.parameter!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ZEROS:
            return _zero(func, args[0])
        if getattr(func, "__name__", "") in _HARMLESS and func != _READ_FIRST:
            return super().__torch_function__(func, types, tuple(args), kwargs)
        marker = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UnsyncedGradient))
        raise Error(
            f"The gradient of {marker.parameter!r} is not synced yet: "
            "its micro-batches are accumulating on another rung.",
            where=getattr(func, "__name__", str(func)),
            fix="Run the last micro-batch's backward outside of no_sync() (set_requires_gradient_sync(True)) first.",
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} reached an UnsyncedGradient")


_ZEROS = (torch.Tensor.zero_, torch._foreach_zero_)
# Optimizers read it of every gradient before they change the first parameter: a step that raises has changed nothing.
_READ_FIRST = torch.Tensor.is_sparse.__get__
_HARMLESS = {
    "__get__",
    "detach_",
    "requires_grad_",
    "size",
    "stride",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
}


def _zero(func: Callable[..., Any], target: Any) -> Any:
    grads = [target] if isinstance(target, torch.Tensor) else list(target)
    for grad in grads:
        if isinstance(grad, UnsyncedGradient):
            grad.zeroed = True
    rest = [grad for grad in grads if not isinstance(grad, UnsyncedGradient)]
    return func(rest) if rest else target
