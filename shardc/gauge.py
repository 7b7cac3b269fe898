"""Gauge: how fast a rank's device computes, measured while all ranks do the same.

Matrix products, attention, copies and messages of quantized numbers, of a few sizes, go into tables. In a model they
take longer than one after another in a loop: caches are cold, and compiled code has more to do between them. So a block
of a transformer is compiled and run, and what it takes beyond what the tables say of it goes into those of products.
(Attention, on CPUs, takes no longer than in a loop.) On CPUs copies, as of buckets, have a rate: in a loop over others
each time, so that no cache holds them. One over the same says little of it: it is six times as fast where they fit a
cache, and as fast where they do not.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from passes.wire import LARGEST, quantized, restored
from shardc import _torch
from shardc.links import Device, Link, Table
from shardc.plan import WIRE_BLOCK, Plan
from shardc.times import times_us
from shardc.topology import Topology
from shardc.trace import trace

Say = Callable[[str], None]
DTYPES = {"16": torch.bfloat16, "32": torch.float32}
PRODUCTS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (64, 128, 256, 512, 1024)}
"""Rows and columns of the matrices that are multiplied."""
ATTENDED = {"cuda": ((128, 128), (512, 1024, 2048, 4096, 8192)), "cpu": ((8, 64), (64, 128, 256, 512))}
"""Heads and their dim, and the lengths of sequences that attend to themselves, each token to those before."""
COPIED_BYTES = {"cuda": range(16, 31, 2), "cpu": range(13, 28, 2)}
"""powers of 2"""
PUT_TOGETHER = (17, 21)
"""powers of 2, of the bytes of each of `PARTS` values; on a CPU (a GPU is taken to copy as fast as its table says)"""
PARTS = 8
QUANTIZED = (18, 22)
"""powers of 2, of elements; on a CPU (a GPU is taken to quantize as fast as it reads and writes)"""
SHORTEST_NS = 0.01
"""that any of it takes of a number"""
BLOCKS = {"cuda": (4096, 32, 4096), "cpu": (512, 8, 128)}
"""Dim and heads of a block, and the tokens that go through it."""
LEAST = 0.5
"""that a factor may be"""
TURN = 0.2
"""seconds: of ranks that share a core, each has had its turns in that time"""
MORE = {"cuda": 2, "cpu": 1}
"""times as many calls at once, after each wait for the device"""
BATCHES = 3
"""of which the median counts: machines stand still now and then"""
ROUNDS = 5
"""the same, of batches of several in turns"""


def gauged(device: torch.device, progress: Say = lambda text: None) -> Device:
    """Tables and rates of a device, with what a compiled block takes. All ranks call it together."""
    found = _measured(device, progress)
    found = replace(found, tables={**found.tables, **_wires(found, device, progress)})
    if device.type == "cpu":
        progress(f"measuring copies of what no cache holds on {device}")
        found = replace(found, copied_gb_per_s=_copied_gb_per_s(device))
    factors = {}
    for bits, dtype in DTYPES.items():
        progress(f"compiling a block of {bits}-bit numbers, and running it")
        factors[f"products{bits}"] = _slower(found, bits, dtype, device)
    return slowed(found, factors)


def faster(device: Device, again: Device) -> Device:
    """As fast as what was measured twice was once: in one of six calibrations of a machine, products of one size took a
    fifth longer beside the others than they do, and no factor of all of them sets that right."""
    tables = {
        name: tuple((amount, min(us, again_us)) for (amount, us), (_, again_us) in zip(table, other, strict=True))
        for (name, table), other in zip(device.tables.items(), again.tables.values(), strict=True)
    }
    tflops = max(device.tflops, again.tflops)
    return replace(
        device,
        tflops=tflops,
        slower_fp32=tflops / max(it.tflops / it.slower_fp32 for it in (device, again)),
        memory_gb_per_s=max(device.memory_gb_per_s, again.memory_gb_per_s),
        copied_gb_per_s=max(device.copied_gb_per_s, again.copied_gb_per_s),
        tables=tables,
    )


def slowed(device: Device, factors: Mapping[str, float]) -> Device:
    """With what its tables are of that takes so many times as long."""
    short, long = (factors.get(of, 1.0) for of in ("products16", "products32"))
    tables = {
        name: tuple((amount, us * factors.get(name, 1.0)) for amount, us in table)
        for name, table in device.tables.items()
    }
    return replace(
        device,
        tflops=device.tflops / short,
        slower_fp32=device.slower_fp32 * long / short,
        tables=tables,
    )


def _measured(device: torch.device, progress: Say = lambda text: None) -> Device:
    """How long a rank's device takes to multiply matrices, to attend and to copy memory. The rates are those of the
    largest, as they are reached (`efficiency` 1)."""
    progress(f"measuring compute on {device}")
    tables = {f"products{bits}": _products(dtype, device) for bits, dtype in DTYPES.items()}
    tables["memory"] = _copies(device)
    tflops, fp32_tflops, gb_per_s = (table[-1][0] / table[-1][1] / 1e6 for table in tables.values())
    for bits, dtype in DTYPES.items():
        tables[f"attention{bits}"], tables[f"attention backward{bits}"] = _attention(dtype, device)
    library = "gloo" if dist.is_initialized() and dist.get_backend() == "gloo" else ""
    return Device(_name(device), tflops, 1e3 * gb_per_s, _memory_gb(device), 1.0, tflops / fp32_tflops, library, tables)


def _products(dtype: torch.dtype, device: torch.device) -> Table:
    sizes = PRODUCTS[device.type]
    squares = (torch.randn(n, n, device=device).to(dtype) for n in sizes)
    taken_us = in_turns_us([partial(torch.matmul, a, a) for a in squares], device)
    return rising(zip((2 * n**3 for n in sizes), taken_us, strict=True))


def _attention(dtype: torch.dtype, device: torch.device) -> tuple[Table, Table]:
    """Forward and backward of a head beside others, by the operations that torch counts, of which a causal one may do
    half. (More heads do not get faster, as longer sequences do.)"""
    forward, backward = [], []
    (heads, dim), lengths = ATTENDED[device.type]
    for n in lengths:
        q, k, v, grad = (torch.randn(1, heads, n, dim, device=device).to(dtype) for _ in range(4))
        inputs = tuple(x.requires_grad_() for x in (q, k, v))
        forward.append(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        backward.append(partial(torch.autograd.grad, forward[-1](), inputs, grad, retain_graph=True))
    products = [2 * n * n * dim for n in lengths]
    taken_us = [us / heads for us in in_turns_us([*forward, *backward], device)]
    return (
        rising(zip((2 * it for it in products), taken_us[: len(lengths)], strict=True)),
        rising(zip((5 * it for it in products), taken_us[len(lengths) :], strict=True)),
    )


def _copies(device: torch.device) -> Table:
    powers = COPIED_BYTES[device.type]
    sources = [torch.zeros(1 << power, dtype=torch.uint8, device=device) for power in powers]
    taken_us = in_turns_us([partial(torch.empty_like(x).copy_, x) for x in sources], device)
    return rising(zip((2 << power for power in powers), taken_us, strict=True))


def _copied_gb_per_s(device: torch.device) -> float:
    """Read and written, where many bytes are put together, beyond what few take, so that calls do not count."""
    (few, few_us), (many, many_us) = (_put_together(1 << power, device) for power in PUT_TOGETHER)
    return (many - few) / (many_us - few_us) / 1e3


def _put_together(part_bytes: int, device: torch.device) -> tuple[int, float]:
    """Bytes that are read and written, and the microseconds of it, compiled, other values each time."""
    whole = torch.zeros(1 << COPIED_BYTES[device.type][-1] - 2, device=device)
    groups = cycle([group.unbind() for group in whole.view(-1, PARTS, part_bytes // 4)])
    together = torch.compile(lambda group: torch.cat(group), fullgraph=True, dynamic=False)
    with _torch.capturing():
        return 2 * PARTS * part_bytes, repeated_us(lambda: together(next(groups)), device)


def _wires(known: Device, device: torch.device, progress: Say) -> dict[str, Table]:
    """Of numbers to messages and back, compiled, what takes longer than reading and writing them."""
    found = {}
    for wire in LARGEST if device.type == "cpu" else ():
        progress(f"measuring how fast {wire} is made on {device}")
        found[f"quantize {wire}"], found[f"dequantize {wire}"] = _quantized(wire, known)
    return found


def _quantized(wire: str, known: Device) -> tuple[Table, Table]:
    """Of each number as long as of another: what more of them take. So calls do not count; a graph makes one for many,
    and they are most of what few take."""
    few, many = (1 << power for power in QUANTIZED)
    taken_us = zip(_there_and_back_us(wire, few, known), _there_and_back_us(wire, many, known), strict=True)
    of_each_us = (max(SHORTEST_NS / 1e3, (many_us - few_us) / (many - few)) for few_us, many_us in taken_us)
    there, back = (tuple((n, n * us) for n in (WIRE_BLOCK, many)) for us in of_each_us)
    return there, back


def _there_and_back_us(wire: str, count: int, known: Device) -> tuple[float, float]:
    """Of so many numbers, without what it takes to read and write them."""
    compiled, x = partial(torch.compile, fullgraph=True, dynamic=False), torch.randn(count).to(torch.bfloat16)
    message = quantized(x, wire, WIRE_BLOCK, 1)
    to = compiled(partial(quantized, wire=wire, block=WIRE_BLOCK, pieces=1))
    of = compiled(partial(restored, wire=wire, block=WIRE_BLOCK, shape=x.shape, dtype=x.dtype))
    moved_us = known.memory_us(x.nbytes + message.nbytes)
    with _torch.capturing():
        there_us, back_us = repeated_us(partial(to, x), x.device), repeated_us(partial(of, message), x.device)
    return there_us - moved_us, back_us - moved_us


def rising(points: Iterable[tuple[int, float]]) -> Table:
    """A table of what was measured, where noise may have made more take less."""
    amounts, us = zip(*points, strict=True)
    return tuple(zip(amounts, accumulate(us, max), strict=True))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _memory_gb(device: torch.device) -> float:
    """Of a CPU, this rank's part of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return host / int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class Block(nn.Module):
    """Of a transformer: attention and a gated MLP, before each of which values are normalised."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, hidden = heads, dim * 11 // 4
        self.first_norm, self.second_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, dim = x.shape
        q, k, v = self.qkv(self.first_norm(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, tokens, dim))
        gate, value = self.up(self.second_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def _slower(known: Device, bits: str, dtype: torch.dtype, device: torch.device) -> float:
    """How many times as long products take, if they are what makes a compiled block, forward and backward, take another
    time than is foretold."""
    dim, heads, tokens = BLOCKS[device.type]
    with device:
        block, x = Block(dim, heads).to(dtype), torch.randn(1, tokens, dim).to(dtype).requires_grad_()
    compiled = torch.compile(block, fullgraph=True, dynamic=False)

    def call() -> None:
        compiled(x).square().mean().backward()
        block.zero_grad()

    once_us, twice_us = (_foretold_us(it, block, x) for it in (known, slowed(known, {f"products{bits}": 2.0})))
    return max(LEAST, 1.0 + (repeated_us(call, device) - once_us) / (twice_us - once_us))


def _foretold_us(known: Device, block: Block, x: Tensor) -> float:
    link = Link(1.0, 0.0)
    plan = Plan.ddp(Topology(node=1, gpu=1).with_links(known, node=link, gpu=link))
    program = trace(block, plan, x, keep=False)
    return sum(sum(times_us(program.graph(variant), plan.topology).values()) for variant in program.step())


def own_tflops(device: torch.device) -> float:
    """Of this rank alone, in the largest products of 16-bit numbers, while all ranks make them."""
    n = PRODUCTS[device.type][-1]
    a = torch.randn(n, n, device=device).to(torch.bfloat16)
    taken = [_taken(partial(torch.matmul, a, a), device) for _ in range(1 + BATCHES)][1:]
    return 2 * n**3 / median(took_s / calls for took_s, calls in taken) / 1e12


def repeated_us(call: Callable[[], object], device: torch.device) -> float:
    """Of one call of many, on the average of all ranks, while they do the same: of ranks that share a core, most single
    calls have it to themselves, and some ranks have more of it than others for a while."""
    return in_turns_us([call], device)[0]


def in_turns_us(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Of one of each, as `repeated_us` has it, all in turns: what makes a machine slow for a second is not all that one
    of them has, as a product of 256 rows that then took twice as long as others for its operations."""
    for call in calls:
        call()
    batches = [[_average_us(call, device) for call in calls] for _ in range(ROUNDS)]
    return [median(taken_us) for taken_us in zip(*batches, strict=True)]


def _average_us(call: Callable[[], object], device: torch.device) -> float:
    taken = torch.tensor(_taken(call, device), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(taken)
    took_s, calls = taken.tolist()
    return took_s / calls * 1e6


def _taken(call: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds, and calls. A GPU is waited for less and less often: what launching takes hides behind what runs."""
    if dist.is_initialized():
        dist.barrier()
    end(device)
    calls, at_once, began = 0, 1, time.perf_counter()
    while calls < 1 or time.perf_counter() < began + TURN:
        for _ in range(at_once):
            call()
        end(device)
        calls += at_once
        at_once *= MORE[device.type]
    return time.perf_counter() - began, calls


def end(device: torch.device) -> None:
    """Of what was launched there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
