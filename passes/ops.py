"""The vocabulary of the graph: what a hop is, how it prints, how many bytes it moves.

A hop is a collective over one mesh axis (or over several neighbouring axes at once, 'gpu+node'). It is a pair
of nodes, a start and its `wait`; between the two runs whatever hides it:

    a: bf16[512, 512] = all_gather(w, 'node', 8, purpose='gather', params=['blocks.0.w1'])
    f: bf16[512, 512] = wait(a)

Everything that anybody downstream wants to know of a hop is an argument of its node: the axis and its size, the purpose
(which move of the ladder), the parameters it carries. Nothing recognises a collective by pattern.
`again=True` marks the part of a gather chain above the after_forward rung: the backward repeats it. `piece=[0, 4]` is
the first of four that a parameter is cut into (`passes.chunk`).

`wire='int8'` says in which format a value travels (`passes.wire`). A reduce-scatter can be an `all_to_all`, which
brings each rank the pieces that all have for it, and a `fold`, which sums them: where they are no numbers that a
network could add, or are better added in float32.

Where rows do not divide, `compact` drops the interior padding of a gathered value and `expand` puts it back before a
reduce (see passes/layout.py); `split` is the sizes of the axes of the optim rung, inner axis first.

The hops have shapes but no implementation here; `shardc.lower` turns them into real collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from passes.layout import Layout

PURPOSES = ("gather", "refresh", "reduce", "sync")
"""The moves of the ladder."""

_library = torch.library.Library("shardc", "DEF")
_HOP, _MORE = "Tensor x, str axis, int size, *", "int[] piece=[0, 1], str wire=''"
for _signature in (
    f"all_gather({_HOP}, str purpose='gather', str[] params, bool again=False, {_MORE}) -> Tensor",
    f"reduce_scatter({_HOP}, str purpose='reduce', str[] params, {_MORE}) -> Tensor",
    f"all_to_all({_HOP}, str purpose='reduce', str[] params, {_MORE}) -> Tensor",
    f"all_reduce({_HOP}, str purpose='sync', str[] params, {_MORE}) -> Tensor",
    "wait(Tensor x) -> Tensor",
    "fold(Tensor x, int size) -> Tensor",
    "interleave(Tensor x, int[] sizes) -> Tensor",
    "compact(Tensor x, int rows, int[] split) -> Tensor",
    "expand(Tensor x, int rows, int[] split) -> Tensor",
):
    _library.define(_signature)


@torch.library.register_fake("shardc::all_gather", lib=_library)
def _(x: torch.Tensor, axis: str, size: int, **of_hop: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0] * size, *x.shape[1:]))


@torch.library.register_fake("shardc::reduce_scatter", lib=_library)
def _(x: torch.Tensor, axis: str, size: int, **of_hop: Any) -> torch.Tensor:
    torch._check(x.shape[0] % size == 0, lambda: f"reduce_scatter: {x.shape[0]} rows do not divide by {size}")
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


@torch.library.register_fake("shardc::all_reduce", lib=_library)
def _(x: torch.Tensor, axis: str, size: int, **of_hop: Any) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("shardc::all_to_all", lib=_library)
def _(x: torch.Tensor, axis: str, size: int, **of_hop: Any) -> torch.Tensor:
    torch._check(x.shape[0] % size == 0, lambda: f"all_to_all: {x.shape[0]} rows do not divide by {size}")
    return torch.empty_like(x)


@torch.library.register_fake("shardc::wait", lib=_library)
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("shardc::fold", lib=_library)
def _(x: torch.Tensor, size: int) -> torch.Tensor:
    torch._check(x.shape[0] % size == 0, lambda: f"fold: {x.shape[0]} rows do not divide by {size}")
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


def folded(x: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of `size` pieces that are rows of a value, in float32 at least."""
    return x.view(size, x.shape[0] // size, *x.shape[1:]).sum(0)


_library.impl("fold", folded, "CompositeExplicitAutograd")


@torch.library.register_fake("shardc::interleave", lib=_library)
def _(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    torch._check(x.shape[0] % prod(sizes) == 0, lambda: f"interleave: {x.shape[0]} rows are no pieces of {sizes}")
    return x.new_empty(x.shape)


def interleaved(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Pieces counted along the first of axes of these sizes the fastest, then counted along the last the fastest."""
    count = len(sizes)
    pieces = x.view(*reversed(sizes), x.shape[0] // prod(sizes), *x.shape[1:])
    return pieces.permute(*reversed(range(count)), *range(count, pieces.dim())).reshape(x.shape).contiguous()


_library.impl("interleave", interleaved, "CompositeExplicitAutograd")


@cache
def _padded(rows: int, split: tuple[int, ...]) -> Layout:
    return Layout("", (rows,), tuple((str(i), size) for i, size in enumerate(split)), 0, 0, 0, len(split))


def row_index(rows: int, split: list[int], device: torch.device | None = None) -> torch.Tensor | slice:
    """Where the real rows lie in the padded value: a slice where the padding is all at the end, else positions."""
    table = _padded(rows, tuple(split)).row_table
    if table is None or table[-1] == rows - 1:
        return slice(0, rows)
    return torch.tensor(table, device=device)


@torch.library.impl("shardc::compact", "CompositeExplicitAutograd", lib=_library)
def _compact(x: torch.Tensor, rows: int, split: list[int]) -> torch.Tensor:
    return x[row_index(rows, split, x.device)].clone()


@torch.library.impl("shardc::expand", "CompositeExplicitAutograd", lib=_library)
def _expand(x: torch.Tensor, rows: int, split: list[int]) -> torch.Tensor:
    out = x.new_zeros((_padded(rows, tuple(split)).padded_rows, *x.shape[1:]))
    out[row_index(rows, split, x.device)] = x
    return out


@torch.library.register_fake("shardc::compact", lib=_library)
def _(x: torch.Tensor, rows: int, split: list[int]) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@torch.library.register_fake("shardc::expand", lib=_library)
def _(x: torch.Tensor, rows: int, split: list[int]) -> torch.Tensor:
    return x.new_empty((_padded(rows, tuple(split)).padded_rows, *x.shape[1:]))


all_gather = torch.ops.shardc.all_gather.default
reduce_scatter = torch.ops.shardc.reduce_scatter.default
all_to_all = torch.ops.shardc.all_to_all.default
all_reduce = torch.ops.shardc.all_reduce.default
wait = torch.ops.shardc.wait.default
compact = torch.ops.shardc.compact.default
expand = torch.ops.shardc.expand.default
fold = torch.ops.shardc.fold.default
interleave = torch.ops.shardc.interleave.default

STARTS = (all_gather, reduce_scatter, all_to_all, all_reduce)
WHOLE = (0, 1)
"""The first of one piece."""


@dataclass(frozen=True)
class Hop:
    """A start node, read: what must be equal on all ranks for their starts to meet."""

    kind: str
    """all_gather, reduce_scatter, all_to_all or all_reduce"""
    axis: str
    size: int
    purpose: str
    params: tuple[str, ...]
    again: bool
    piece: tuple[int, int] = WHOLE
    """Which, of how many."""
    wire: str = ""
    """the format in which it travels; '' for its own dtype"""

    def __str__(self) -> str:
        piece = f", {spelled(self.piece)}" * (self.piece != WHOLE)
        wire = f" in {self.wire}" if self.wire else ""
        return f"{self.purpose} {self.kind}{wire} over {self.axis} of {', '.join(self.params)}{piece}"


def spelled(piece: tuple[int, int]) -> str:
    """'piece 2 of 4'."""
    return f"piece {piece[0] + 1} of {piece[1]}" if piece != WHOLE else "the whole"


def is_random(node: fx.Node) -> bool:
    """True for what draws from a generator: computed again, it has another value."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_start(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in STARTS


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is wait


def is_hop(node: fx.Node) -> bool:
    """True for a start and for a wait."""
    return is_start(node) or is_wait(node)


def wait_of(start: fx.Node) -> fx.Node | None:
    """None where only other hops take what a hop brings."""
    return next((user for user in start.users if is_wait(user)), None)


def relayed(start: fx.Node) -> fx.Node | None:
    """The start of the hop whose result a hop takes directly (see `passes.relay`)."""
    value = start.args[0]
    return value if is_start(value) else None


def hop(node: fx.Node) -> Hop:
    """Read a start node (or a wait: the hop that it waits for)."""
    start = node.args[0] if is_wait(node) else node
    _, axis, size = start.args
    kwargs = _defaults(start.target) | start.kwargs
    params, piece = tuple(kwargs["params"]), tuple(kwargs["piece"])
    return Hop(start.target._opname, axis, size, kwargs["purpose"], params, kwargs["again"], piece, kwargs["wire"])


@cache
def _defaults(op: torch._ops.OpOverload) -> dict[str, Any]:
    """What the arguments are that a start may leave out."""
    return {"again": False} | {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}


def hops(graph: fx.Graph, purpose: str | None = None) -> list[fx.Node]:
    """Start nodes in order, of one purpose or of all."""
    return [n for n in graph.nodes if is_start(n) and purpose in (None, hop(n).purpose)]


def moved_bytes(node: fx.Node) -> int:
    """Bytes that one rank sends (as many as it receives) in a hop, on a ring or any other optimal algorithm:
    (n-1)/n of the full value for an all-gather, a reduce-scatter and an all-to-all, twice that for an all-reduce."""
    it = hop(node)
    value = node.meta["val"] if it.kind == "all_gather" else node.args[0].meta["val"]
    share = prod(value.shape) * value.element_size() * (it.size - 1)
    return share * (2 if it.kind == "all_reduce" else 1) // it.size
