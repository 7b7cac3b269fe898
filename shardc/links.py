"""Links and devices: how fast an axis of the mesh is, and a rank's device. Presets with their sources.

A link is an axis as one rank sees it while all the others use theirs. The eight GPUs of a host that share 400 GB/s of
network have 50 GB/s each on the axis `node`, for each of them takes part in a group of its own.

The rates of the presets are those of their sources; latencies, efficiency and how much slower 32-bit products are, are
estimates. Measured tables take their place where there are any. Collectives are rings, but for all-reduces of NCCL and
RCCL between hosts: these go along two trees, at full bandwidth and in a number of steps that grows with the logarithm
of the hosts (Sanders, Speck and Traeff, 2009).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from math import exp, log
from typing import Any

from passes.errors import Error

Table = tuple[tuple[int, float], ...]
"""Measured: (amount, microseconds), rising: of bytes that one rank sends, of operations, of bytes in memory."""


@dataclass(frozen=True)
class Link:
    """One axis."""

    gb_per_s: float
    """1e9 bytes a second that one rank sends, in one direction"""
    latency_us: float
    """of one step of a ring or a tree"""
    tables: Mapping[str, Table] = field(default_factory=dict, hash=False)
    """by kind of collective; where there is one, it counts and the two numbers do not"""
    lane: str = ""
    """what links with the same lane share, one collective at a time: the parts of an axis that was split have one"""
    trees: bool = False
    """all-reduces go up a tree and down again, where these are fewer steps than twice around a ring"""
    launch_us: float = 0.0
    """for which compute stands still while a collective is issued and, when it is over, waited for (LogP's overhead,
    Culler et al., 1993); 0 where compute does not wait for the thread that does so, as on a GPU"""
    gather_us_per_mb: float = 0.0
    """the same for each 1e6 bytes that a rank sends in a gather, as they are copied and sent on cores that compute"""
    reduce_us_per_mb: float = 0.0
    """and in other collectives, whose bytes are summed there, too"""
    near: bool = False
    """ranks share memory, and what they gather is there once for all of them (`shardc.arena`)"""

    def __post_init__(self) -> None:
        overheads = (self.latency_us, self.launch_us, self.gather_us_per_mb, self.reduce_us_per_mb)
        if not self.gb_per_s > 0 or min(overheads) < 0:
            raise Error(f"a link of {self.gb_per_s} GB/s with {self.latency_us} us cannot be", fix="Link(50.0, 10.0)")
        _check(self.tables)

    def us(self, kind: str, sent_bytes: float, size: int) -> float:
        """Of one collective of a group of `size` ranks in which each sends `sent_bytes`."""
        if kind in self.tables:
            return _interpolated(self.tables[kind], sent_bytes)
        return self.steps_us(kind, size) + self.sent_us(kind, sent_bytes)

    def steps_us(self, kind: str, size: int) -> float:
        """Of one collective, what does not depend on bytes."""
        steps = ring_steps(kind, size)
        if self.trees and kind == "all_reduce":
            steps = min(steps, 2 * (size - 1).bit_length())
        return steps * self.latency_us

    def sent_us(self, kind: str, sent_bytes: float) -> float:
        """Of bytes that are a part of as large a collective as one likes. (A smaller one may be faster than its part: a
        shaped link lets some bytes through at once, and what fits a cache is copied faster.)"""
        if kind in self.tables:
            size, us = self.tables[kind][-1]
            return min(us / size * sent_bytes, _interpolated(self.tables[kind], sent_bytes))
        return sent_bytes / self.gb_per_s / 1e3

    def overhead_us(self, kind: str, sent_bytes: float) -> float:
        """What a collective in which each rank sends so many bytes takes of compute."""
        us_per_mb = self.gather_us_per_mb if kind == "all_gather" else self.reduce_us_per_mb
        return self.launch_us + us_per_mb * sent_bytes / 1e6

    def to_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"gb_per_s": self.gb_per_s, "latency_us": self.latency_us}
        return saved | _saved(self.tables) | {name: getattr(self, name) for name in _MORE if getattr(self, name)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Link:
        _check_known("a link", saved, {"gb_per_s", "latency_us", "tables", *_MORE})
        more = {name: saved[name] for name in _MORE if name in saved}
        return cls(float(saved["gb_per_s"]), float(saved["latency_us"]), _read(saved), **more)


_MORE = ("lane", "trees", "launch_us", "gather_us_per_mb", "reduce_us_per_mb", "near")
"""Of a link, what most have none of."""


@dataclass(frozen=True)
class Device:
    """What computes on one rank."""

    name: str
    tflops: float
    """1e12 operations a second in dense matrix products of 16-bit numbers, as the vendor gives it"""
    memory_gb_per_s: float
    memory_gb: float
    efficiency: float = 0.7
    """of both rates, what large kernels reach"""
    slower_fp32: float = 1.0
    """how many times slower products of 32-bit numbers are"""
    library: str = ""
    """what moves bytes between such devices, where that matters ("gloo")"""
    tables: Mapping[str, Table] = field(default_factory=dict, hash=False)
    """of "products16" and "products32" by operations, of "attention16" and the like, "attention backward16" and the
    like, by operations of a head, of "quantize int8" and the like, "dequantize int8" and the like, by elements, and of
    "memory", by bytes read and written; where there is one, it counts and the rates do not"""
    launch_us: float = 0.0
    """for which a host that computes is busy with calling a product and what is fused around it, or an optimizer's step
    of a parameter; 0 where the host runs ahead, as of a GPU"""
    value_ns: float = 0.0
    """for which each number that a product reads or writes takes longer than its operations and its bytes do; 0 where
    that was not measured, as on a GPU, which has all three at once"""
    copied_gb_per_s: float = 0.0
    """read and written, where values that no cache holds are copied into one; 0 where that was not measured, as on a
    GPU, which is taken to copy as fast as its table of memory says"""

    def __post_init__(self) -> None:
        _check(self.tables)

    def product_us(self, operations: float, itemsize: int, kind: str = "products", heads: int = 1) -> float:
        """Of matrix products of numbers of so many bytes. Those of attention ("attention", "attention backward") may
        take longer, where that was measured, each head as long as another."""
        short = itemsize <= 2
        bits = "16" if short else "32"
        for name, parts in ((kind, heads), ("products", 1)):
            if table := self.tables.get(name + bits):
                return parts * _interpolated(table, operations / parts)
        return operations * (1.0 if short else self.slower_fp32) / self.tflops / self.efficiency / 1e6

    def quantized_us(self, elements: float, kind: str) -> float:
        """Of making messages of so many numbers ("quantize int8"), or numbers of messages ("dequantize int4"), beside
        what reading and writing takes; none where that was not measured."""
        table = self.tables.get(kind)
        return _interpolated(table, elements) if table else 0.0

    def memory_us(self, moved_bytes: float) -> float:
        """Of reading and writing so many bytes in all."""
        if table := self.tables.get("memory"):
            return _interpolated(table, moved_bytes)
        return moved_bytes / self.memory_gb_per_s / self.efficiency / 1e3

    def values_us(self, numbers: float) -> float:
        """Of so many that a product reads and writes, beside its operations and bytes."""
        return self.value_ns * numbers / 1e3

    def copied_us(self, moved_bytes: float) -> float:
        """Of copies, such as those into buckets and out of them, that read and write so many bytes in all."""
        cold_us = moved_bytes / self.copied_gb_per_s / 1e3 if self.copied_gb_per_s else 0.0
        return max(cold_us, self.memory_us(moved_bytes))

    def updated_us(self, own_bytes: float, optimizer_states: int) -> float:
        """Of an optimizer's step of a parameter, of which this rank has so many bytes: its gradient is read, the
        parameter and its states are read and written."""
        return self.launch_us + self.memory_us(own_bytes * (1 + 2 * (1 + optimizer_states)))

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tables"} | _saved(self.tables)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Device:
        _check_known("a device", saved, {it.name for it in fields(cls)})
        return cls(**{**saved, "tables": _read(saved)})


def ring_steps(kind: str, size: int) -> int:
    """Steps one after another of a ring; an all-reduce goes around twice."""
    return (size - 1) * (2 if kind == "all_reduce" else 1)


def _interpolated(table: Table, amount: float) -> float:
    """A power law between two points, the smallest time below them, a constant rate above; of nothing, none."""
    if not amount:
        return 0.0
    if amount <= table[0][0]:
        return table[0][1]
    if amount >= table[-1][0]:
        return table[-1][1] * amount / table[-1][0]
    i = bisect_left(table, (amount, 0.0))
    (low, low_us), (high, high_us) = table[i - 1], table[i]
    share = log(amount / low) / log(high / low)
    return low_us * exp(share * log(high_us / low_us))


def _check_known(what: str, saved: Mapping[str, Any], known: Set[str]) -> None:
    if unknown := saved.keys() - known:
        raise Error(f"{what} has no {', '.join(sorted(unknown))}", fix="measure it again: python -m shardc calibrate")


def _check(tables: Mapping[str, Table]) -> None:
    for kind, table in tables.items():
        rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(table))
        if not (table and rises and table[0][0] > 0 and table[0][1] > 0):
            raise Error(f"the table of {kind} does not rise", fix="(amount, microseconds) by amount, from above 0")


def _saved(tables: Mapping[str, Table]) -> dict[str, Any]:
    return {"tables": {kind: [list(point) for point in table] for kind, table in tables.items()}} if tables else {}


def _read(saved: Mapping[str, Any]) -> dict[str, Table]:
    return {kind: tuple((int(n), float(us)) for n, us in table) for kind, table in saved.get("tables", {}).items()}


@dataclass(frozen=True)
class Machine:
    """A kind of cluster: axes inside a host, links of all axes, what computes."""

    inner: tuple[tuple[str, int], ...]
    """(axis, size), outer first"""
    links: tuple[tuple[str, Link], ...]
    device: Device
    source: str


A100 = Device("A100-SXM 80GB", 312, 2039, 80, slower_fp32=2.0)
H100 = Device("H100-SXM", 989, 3350, 80, slower_fp32=2.0)
V100 = Device("V100-SXM3 32GB", 125, 900, 32, slower_fp32=8.0)

MACHINES: dict[str, Machine] = {
    "dgx-a100": Machine(
        (("gpu", 8),), (("node", Link(25.0, 12.0, trees=True)), ("gpu", Link(300.0, 4.0))), A100,
        "NVIDIA DGX A100 datasheet: NVLink 600 GB/s both ways, 8 x HDR 200 Gb/s InfiniBand a host; A100 datasheet",
    ),
    "dgx-h100": Machine(
        (("gpu", 8),), (("node", Link(50.0, 12.0, trees=True)), ("gpu", Link(450.0, 4.0))), H100,
        "NVIDIA DGX H100 datasheet: NVLink 900 GB/s both ways, 8 x NDR 400 Gb/s InfiniBand a host; H100 datasheet",
    ),
    "dgx-h200": Machine(
        (("gpu", 8),), (("node", Link(50.0, 12.0, trees=True)), ("gpu", Link(450.0, 4.0))),
        Device("H200-SXM", 989, 4800, 141, slower_fp32=2.0),
        "NVIDIA DGX H200 datasheet: as DGX H100; H200 datasheet: 141 GB at 4.8 TB/s",
    ),
    "a800": Machine(
        (("gpu", 8),), (("node", Link(12.5, 12.0, trees=True)), ("gpu", Link(200.0, 4.0))), A100,
        "AMSP (arXiv 2311.00257): NVLink 400 GB/s both ways, 4 x HDR InfiniBand = 800 Gb/s a host",
    ),
    "dgx2-100g": Machine(
        (("gpu", 16),), (("node", Link(0.78, 15.0, trees=True)), ("gpu", Link(150.0, 5.0))), V100,
        "NVIDIA DGX-2 datasheet: NVSwitch 300 GB/s both ways; 100 Gb/s a host",
    ),
    "dgx2-400g": Machine(
        (("gpu", 16),), (("node", Link(3.125, 15.0, trees=True)), ("gpu", Link(150.0, 5.0))), V100,
        "ZeRO++ (arXiv 2306.10209): hosts of 16 V100, 400 Gb/s InfiniBand a host",
    ),
    "frontier": Machine(
        (("gpu", 4), ("gcd", 2)),
        (("node", Link(12.5, 15.0, trees=True)), ("gpu", Link(50.0, 8.0)), ("gcd", Link(200.0, 6.0))),
        Device("MI250X GCD", 191.5, 1638, 64, slower_fp32=4.0),
        "Frontier (arXiv 2501.04266): 200 GB/s in a package, 50 to 100 GB/s between packages, 4 x 25 GB/s a host",
    ),
    "ethernet": Machine(
        (("gpu", 8),), (("node", Link(1.25 / 8, 50.0, trees=True)), ("gpu", Link(20.0, 8.0))), A100,
        "a host with 10 Gb/s Ethernet and GPUs on PCIe 4.0 x16",
    ),
}  # fmt: skip


def machine(name: str) -> Machine:
    """A preset. Raises `Error` with the known ones for any other name."""
    if name not in MACHINES:
        close = get_close_matches(name, MACHINES, n=1)
        raise Error(
            f"there is no preset {name!r}; there are {', '.join(MACHINES)}",
            fix=f"did you mean {close[0]!r}?" if close else "one of these, or Topology(...).with_links(...)",
        )
    return MACHINES[name]
