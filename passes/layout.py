"""Where the rows of one parameter lie on every rung of the ladder.

A rung is counted, not named: rung k shards dim 0 over the k innermost axes of the mesh, rung 0 is replicated.
Inner axes split first, as DTensor does on an inner-first mesh, so the shard on an outer rung is a contiguous
part of the shard on the inner one, and a gather over one more axis is a plain concatenation.

DTensor chunks the real rows axis by axis, so pieces of one rung can differ in length: 5 rows on 2 x 2 lie as

    rank (gpu, node)     0,0    0,1    1,0    1,1
    rows                 0 1    2      3      4

Therefore every piece travels as `piece_rows` rows, the longest of all, and the rungs between keep that
interior padding:

    full, padded         0 1    2 -    3 -    4 -

Only rung 0 is compact. `row_table` is where each real row lies in the padded full value ([0, 1, 2, 4, 6]
here), the same on every rank; where rows divide evenly it is the identity and `row_table` is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class Layout:
    """One parameter on the ladder: `shape` is the full shape, `axes` the mesh as (name, size) pairs, inner axis
    first; `params`, `after_forward`, `grads`, `optim` are rungs (numbers of inner axes)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    params: int
    after_forward: int
    grads: int
    optim: int
    trainable: bool = True

    def size(self, rung: int) -> int:
        """Number of pieces on a rung."""
        return prod(size for _, size in self.axes[:rung])

    @cached_property
    def piece_rows(self) -> int:
        """Rows of the longest piece on the optim rung; every piece travels at this length."""
        return max(self._piece_lengths) if self.optim else self.shape[0] if self.shape else 1

    @cached_property
    def _piece_lengths(self) -> list[int]:
        """Real rows of each optim piece, innermost axis most significant (the order in `full, padded`)."""
        lengths = [self.shape[0]]
        for _, size in self.axes[: self.optim]:
            lengths = [part for rows in lengths for part in _chunk(rows, size)]
        return lengths

    @cached_property
    def row_table(self) -> tuple[int, ...] | None:
        """Position of each real row in the padded full value; None where it is the identity."""
        if not self.optim or self.padded_rows == self.shape[0]:
            return None
        starts = range(0, self.padded_rows, self.piece_rows)
        return tuple(s + i for s, rows in zip(starts, self._piece_lengths, strict=True) for i in range(rows))

    @cached_property
    def padded_rows(self) -> int:
        """Rows of the padded full value."""
        return self.piece_rows * self.size(self.optim)

    def rung_shape(self, rung: int) -> tuple[int, ...]:
        """Shape of the value that one rank holds on a rung: compact on rung 0, padded pieces above."""
        return self.padded_shape(rung) if rung else self.shape

    def padded_shape(self, rung: int) -> tuple[int, ...]:
        """The same, with the padding of pieces on rung 0 too."""
        return (self.padded_rows // self.size(rung), *self.shape[1:])

    def local_rows(self, coordinate: tuple[int, ...]) -> int:
        """Real rows of the optim piece of the rank at `coordinate` (index on each axis, inner axis first)."""
        rows = self.shape[0] if self.shape else 1
        for index, (_, size) in zip(coordinate, self.axes[: self.optim], strict=False):
            rows = _chunk(rows, size)[index]
        return rows

    def local_start(self, coordinate: tuple[int, ...]) -> int:
        """First real row of the optim piece of the rank at `coordinate`."""
        rows, start = self.shape[0] if self.shape else 1, 0
        for index, (_, size) in zip(coordinate, self.axes[: self.optim], strict=False):
            parts = _chunk(rows, size)
            start += sum(parts[:index])
            rows = parts[index]
        return start


def _chunk(rows: int, size: int) -> list[int]:
    """Lengths of `torch.chunk(rows, size)`, filled up with empty pieces as DTensor does."""
    step = -(-rows // size)
    return [max(0, min(step, rows - i * step)) for i in range(size)]
