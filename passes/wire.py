"""Wire: how a value travels on a hop in fewer bits than it has.

    bf16     half the bits of an f32: a cast, and back
    fp8      float8 e4m3
    int8     -127 to 127
    int4     -7 to 7, one of a block's first half and one of its second in a byte

The last three are scaled by block (ZeRO++, arXiv 2306.10209: symmetric, one scale a block): so many elements are
divided by what makes the largest of them the largest number of the format. `quantize` makes a message of each piece of
a value, numbers first, then a float32 scale for each block; `dequantize` undoes it. Blocks are of one piece, so that
none straddles a shard, and scales travel in the same message:

    m: u8[2, 136] = quantize(x, 'int8', 64, 2)                                x: f32[32, 8], 128 elements a piece
    a: u8[2, 136] = all_to_all(m, 'node', 2, purpose='reduce', params=['w'], wire='int8')
    b: u8[2, 136] = wait(a)
    y: f32[32, 8] = shardc.dequantize(b, 'int8', 64, [32, 8], f32)
    z: f32[16, 8] = fold(y, 2)                                                the sum of the two pieces

What is not finite stays so, for its block: a scale that is inf or nan is what a loss scaler looks for. `lost` is what
a message lacks of its value, and 0 where that is not finite: it is kept for the next step (`passes.feedback`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

CASTS = {"bf16": torch.bfloat16}
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}
"""What a block is scaled to, of formats that need scales."""
MIDDLE = {"int8": 128.0, "int4": 8.0}
"""What 0 is written as. Without signs, and without neighbours in one byte, compilers take many numbers at a time."""
FORMATS = (*CASTS, *LARGEST)
BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
SCALE_BYTES = 4


@dataclass(frozen=True)
class Wires:
    """The formats in which one parameter travels, by axis, up and down the ladder."""

    gather: tuple[tuple[str, str], ...] = ()
    """of gathers and refreshes"""
    reduce: tuple[tuple[str, str], ...] = ()
    """of reduces and syncs"""
    block: int = 256
    """elements that share a scale"""

    def up(self, axis: str) -> str:
        """'' for a value that travels as it is."""
        return dict(self.gather).get(axis, "")

    def down(self, axis: str) -> str:
        return dict(self.reduce).get(axis, "")


NONE = Wires()


def narrower(wire: str, dtype: torch.dtype) -> bool:
    """Whether a format takes fewer bits than a dtype."""
    return BITS[wire] < 8 * dtype.itemsize


def message_bytes(elements: int, wire: str, block: int) -> int:
    """Of so many elements of one piece; the last block is filled up."""
    blocks = -(-elements // block)
    return blocks * (block * BITS[wire] // 8 + SCALE_BYTES)


def saves(wire: str, elements: int, dtype: torch.dtype, block: int) -> bool:
    """Whether a message of so many elements is smaller than they are. Few do not fill a block."""
    if wire in CASTS:
        return narrower(wire, dtype)
    return message_bytes(elements, wire, block) < elements * dtype.itemsize


# Ops


_library = torch.library.Library("shardc", "FRAGMENT")
_library.define("quantize(Tensor x, str wire, int block, int pieces) -> Tensor")
_library.define("lost(Tensor x, str wire, int block, int pieces) -> Tensor")
_library.define("dequantize(Tensor x, str wire, int block, int[] shape, ScalarType dtype) -> Tensor")


@torch.library.register_fake("shardc::quantize", lib=_library)
def _(x: torch.Tensor, wire: str, block: int, pieces: int) -> torch.Tensor:
    torch._check(x.numel() % pieces == 0, lambda: f"{x.numel()} elements are not {pieces} pieces")
    return x.new_empty((pieces, message_bytes(x.numel() // pieces, wire, block)), dtype=torch.uint8)


@torch.library.register_fake("shardc::dequantize", lib=_library)
def _(x: torch.Tensor, wire: str, block: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    expected = (x.shape[0], message_bytes(prod(shape) // x.shape[0], wire, block))
    torch._check(x.shape == expected, lambda: f"{list(x.shape)} bytes are no {wire} of {list(shape)}")
    return x.new_empty(shape, dtype=dtype)


@torch.library.register_fake("shardc::lost", lib=_library)
def _(x: torch.Tensor, wire: str, block: int, pieces: int) -> torch.Tensor:
    return torch.empty_like(x)


quantize = torch.ops.shardc.quantize.default
dequantize = torch.ops.shardc.dequantize.default
lost = torch.ops.shardc.lost.default


def quantized(x: torch.Tensor, wire: str, block: int, pieces: int) -> torch.Tensor:
    """The messages of a value, u8[pieces, bytes]: the numbers of all blocks, then their scales."""
    elements = x.numel() // pieces
    blocks = -(-elements // block)
    filled = _filled_up(x.reshape(pieces, elements).float(), blocks * block).view(pieces, blocks, block)
    scale = filled.abs().amax(2) / LARGEST[wire]
    numbers = filled / torch.where(scale == 0, 1.0, scale).unsqueeze(2)
    return torch.cat([_to_bytes(numbers, wire).flatten(1), scale.view(torch.uint8)], 1)


def _filled_up(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Not padded: Inductor would have the condition in each kernel that reads a value, and compile for five times as
    long."""
    missing = length - rows.shape[1]
    return torch.cat([rows, rows.new_zeros((rows.shape[0], missing))], 1) if missing else rows


def restored(x: torch.Tensor, wire: str, block: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The value that messages are of."""
    return _shaped(_blocks(x, wire, block, prod(shape) // x.shape[0]), shape, dtype)


def summed(x: torch.Tensor, wire: str, block: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The sum of the pieces of that value."""
    pieces = x.shape[0]
    total = _blocks(x, wire, block, prod(shape) // pieces).sum(0, keepdim=True)
    return _shaped(total, [shape[0] // pieces, *shape[1:]], dtype)


def _blocks(x: torch.Tensor, wire: str, block: int, elements: int) -> torch.Tensor:
    """f32[pieces, blocks, block]: the numbers of messages of so many elements each, and what fills the last block."""
    pieces, blocks = x.shape[0], -(-elements // block)
    payload, scale = x.split_with_sizes([blocks * block * BITS[wire] // 8, blocks * SCALE_BYTES], 1)
    numbers = _from_bytes(payload.reshape(pieces, blocks, -1), wire)
    return numbers * scale.contiguous().view(torch.float32).unsqueeze(2)


def _shaped(filled: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Blocks as a value. Inductor is to write them block by block, and only then see them in that shape, which it does
    not with a view: to look up each number by its place in the shape takes five times as long."""
    pieces, elements = filled.shape[0], prod(shape) // filled.shape[0]
    filled = filled.to(dtype)
    if elements == prod(filled.shape[1:]):
        return filled.as_strided(shape, [prod(shape[i + 1 :]) for i in range(len(shape))])
    return filled.view(pieces, -1)[:, :elements].reshape(shape).contiguous()


def left_behind(x: torch.Tensor, wire: str, block: int, pieces: int) -> torch.Tensor:
    """What the messages of a value lack of it."""
    arrived = restored(quantized(x, wire, block, pieces), wire, block, x.shape, x.dtype)
    return torch.nan_to_num(x - arrived, 0.0, 0.0, 0.0)


def _to_bytes(numbers: torch.Tensor, wire: str) -> torch.Tensor:
    if wire == "fp8":
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    whole = numbers.round() + MIDDLE[wire]
    if wire == "int4":
        low, high = whole.chunk(2, -1)
        whole = low + 16 * high
    return whole.to(torch.uint8)


def _from_bytes(payload: torch.Tensor, wire: str) -> torch.Tensor:
    if wire == "fp8":
        return payload.contiguous().view(torch.float8_e4m3fn).float()
    whole = torch.cat([payload & 15, payload >> 4], -1) if wire == "int4" else payload
    return whole.float() - MIDDLE[wire]


_library.impl("quantize", quantized, "CompositeExplicitAutograd")
_library.impl("dequantize", restored, "CompositeExplicitAutograd")
_library.impl("lost", left_behind, "CompositeExplicitAutograd")
