"""Graph breaks: what full-graph capture cannot take of a model's forward, all of it in one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map

from passes.errors import Error
from shardc import _torch
from shardc.capture import own_code
from shardc.model import swapped

Break: TypeAlias = Exception
"""`Unsupported` or `UserError` of Dynamo"""
FIX = "Move this out of the forward, or make it an operator (torch.library.custom_op)."


def captured_call(
    compiled: Callable[..., Any],
    forward: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """`compiled(model, *args, **kwargs)`, a full-graph capture of `forward`. Our own errors come out as they are, not
    wrapped by Dynamo; a graph break as one of ours that names every other break as well."""
    try:
        return compiled(model, *args, **kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, Error):
            raise error.inner_exception from None
        raise
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        first = error
    others, end = rehearse(forward, model, args, kwargs)
    if end is not None and f"raised exception {type(end).__name__}(" in str(first):
        raise end  # not a matter of capture: the forward raises for these arguments
    raise report(first, others, end) from end


def rehearse(
    forward: Callable[..., Any], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Break], Exception | None]:
    """Runs the forward once more, with graph breaks allowed: what Dynamo captures gives zeros, what lies between is run
    by Python on zeros. Returns the breaks on the way and what ended it early, if anything did."""
    broken = torch.compile(own_code(forward), backend=_pretend, dynamic=False)
    parameters = {name: nn.Parameter(_zeros(p), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: _stand_in(buffer) for name, buffer in model.named_buffers()}
    with swapped(model, parameters, buffers), redirect_stdout(StringIO()), _torch.graph_breaks() as breaks:
        try:
            broken(model, *tree_map(_stand_in, args), **tree_map(_stand_in, kwargs))
        except Exception as error:  # whatever the user's code makes of zeros belongs in the report
            return breaks, error
    return breaks, None


def _pretend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that computes nothing."""
    values = [_torch.example_value(node) for node in module.graph.output_node().args[0]]
    return lambda *args: tree_map(lambda v: _zeros(v) if isinstance(v, torch.Tensor) else v, values)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """One zero, seen as many: it can be read and takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


def _stand_in(value: Any) -> Any:
    """A tensor that may be changed in place; zeros for one without storage."""
    if not isinstance(value, torch.Tensor):
        return value
    empty = value.numel() > 0 and value.untyped_storage().nbytes() == 0
    return _zeros(value) if empty else value.detach().clone()


def report(first: Break, others: Sequence[Break], end: Exception | None) -> Error:
    """One break in the three parts of an `Error`, several as a list."""
    breaks = {_line(error): error for error in (first, *others)}
    what = "The model's forward cannot be captured as one graph"
    then = f"Then {type(end).__name__} was raised: {end}" if end is not None else ""
    if len(breaks) == 1:
        return Error(f"{what}: {_reason(first)}. {then}".rstrip(), where=_line(first), fix=_remedy(first))
    listed = (
        f"\n  {i}. {line}\n     {_reason(error)}.\n     fix: {_remedy(error)}"
        for i, (line, error) in enumerate(breaks.items(), 1)
    )
    return Error(f"{what}; {len(breaks)} places break it:{''.join(listed)}\n{then}".rstrip())


def _reason(error: Break) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _line(error: Break) -> str | None:
    stack = list(getattr(error, "real_stack", None) or [])
    return f"{stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else None


def _remedy(error: Break) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    hints = [line[6:] for line in lines if line.startswith("Hint: ")]
    return " ".join(hint for hint in hints if hint not in _torch.vague_hints()) or FIX
