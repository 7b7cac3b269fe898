"""A plan: on which rung of the ladder each model state rests. Everything else is derived from it.

    Plan(Topology(node=2, gpu=4), params="gpu", grads="gpu", optim="all", param_dtype=torch.bfloat16)

is PaRO's IIG. Every published strategy is such a row (the presets below), and a parameter may have its own row by
an override on its name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch

from passes.errors import Error
from passes.layout import Layout
from passes.wire import FORMATS, LARGEST, NONE, Wires, narrower, saves
from shardc.rest import dtype_name, mib, rest_lines, state_bytes
from shardc.topology import RungSpec, Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack

STATES = ("params", "after_forward", "grads", "optim")
"""What a plan places, in the order in which tables and JSON list it."""

DTYPES = ("param_dtype", "reduce_dtype")
WIRES = ("gather_wire", "reduce_wire", "wire_block", "wire_except", "error_feedback")
PARO = ("NNN", "NNI", "NII", "INI", "III", "NNG", "NIG", "NGG", "ING", "IIG", "IGG", "GNG", "GIG", "GGG")
"""PaRO's strategies (arXiv 2310.06003): letters for params, grads, optim."""

WIRE_BLOCK = 256
"""Elements that share a scale, where nobody says how many."""
WIRE_EXCEPT = ("*norm*", "*bias", "*embed*", "*ln_*", "*wte*", "*wpe*")
"""Norms, biases and embeddings: small, or sensitive."""

Wire = Mapping[str, str] | Iterable[tuple[str, str]]
"""A format of `passes.wire` by axis."""
Overrides = Mapping[str, Mapping[str, RungSpec]]
Changes = tuple[tuple[str, int], ...]
"""One override, normalised and hashable: (state, rung) pairs in the order of `STATES`."""
Parameter = tuple[tuple[int, ...], torch.dtype, bool]
"""(full shape, master dtype, trainable)."""


class Row(NamedTuple):
    """The rungs of one parameter, as numbers of inner axes."""

    params: int
    after_forward: int
    grads: int
    optim: int


class Options(TypedDict, total=False):
    """The keywords that every preset passes on to `Plan`."""

    overrides: Overrides | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reduce: Literal["mean", "sum"]
    memory_limit: int | str | None
    gather_wire: Wire | None
    reduce_wire: Wire | None
    wire_block: int
    wire_except: Iterable[str]
    error_feedback: bool
    chain: Literal["hop", "flat", "auto"]


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Where each model state rests: a default row of rungs, and overrides by pattern on parameter names.

    Rungs are given as `Topology.rung` takes them and kept as numbers of inner axes; `after_forward` is `params`
    unless given. An override holds any of the four states; later matching patterns win, and an `after_forward`
    that it does not name is clamped to its `params`. What only a forward's end needs and its backward's beginning, such
    as a head, is in full between them in any case (`passes.turn`). `param_dtype` is what compute and the gathers use,
    `reduce_dtype` what gradients travel in (None: `param_dtype`, and without that the parameter's own dtype).
    `reduce` is what gradients are over all ranks. `memory_limit` is what one rank may hold at the peak of a step, in
    bytes or as "80GB" or "74.5GiB": less is gathered ahead where that is needed to stay below, and compiling raises
    `Error` where it is not enough (with two values of optimizer state for each element, as Adam has).

    `gather_wire` and `reduce_wire` say in which format (`passes.wire`: "bf16", "fp8", "int8", "int4") a value travels
    over an axis, up (gathers and refreshes) and down (reduces and syncs): `gather_wire={"node": "int8"}`. What a gather
    has quantized stays so on inner axes; a reduction quantizes once an axis and sums in float32. `wire_block` elements
    share a scale. Parameters that match a pattern of `wire_except` travel as they are. Formats other than the
    dtype lose precision: `shardc.quantization_error` says how much. With `error_feedback` what the block-scaled formats
    of `reduce_wire` lose is kept, in float32, and added to the next gradient, so that it is late and not lost
    (`passes.feedback`); it takes as much memory as the gradients that are quantized, and is in no checkpoint.

    `chain` is how a move goes over several axes: "hop" by hop, so that those inside a host run beside those between
    hosts; "flat", one collective over the ranks of all of them; or "auto", flat where the topology's links say that it
    is faster. What travels in a wire goes down hop by hop, for it is summed on each axis.

    Raises `Error` for an illegal row, naming the rule, and for a wire that cannot apply.
    """

    topology: Topology
    params: int
    after_forward: int
    grads: int
    optim: int
    overrides: tuple[tuple[str, Changes], ...]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reduce: Literal["mean", "sum"]
    memory_limit: int | None
    gather_wire: tuple[tuple[str, str], ...]
    reduce_wire: tuple[tuple[str, str], ...]
    wire_block: int
    wire_except: tuple[str, ...]
    error_feedback: bool
    chain: Literal["hop", "flat", "auto"]

    def __init__(
        self,
        topology: Topology,
        *,
        params: RungSpec = "replicated",
        after_forward: RungSpec | None = None,
        grads: RungSpec = "replicated",
        optim: RungSpec = "replicated",
        overrides: Overrides | Iterable[tuple[str, Changes]] | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reduce: Literal["mean", "sum"] = "mean",
        memory_limit: int | str | None = None,
        gather_wire: Wire | None = None,
        reduce_wire: Wire | None = None,
        wire_block: int = WIRE_BLOCK,
        wire_except: Iterable[str] = WIRE_EXCEPT,
        error_feedback: bool = False,
        chain: Literal["hop", "flat", "auto"] = "hop",
    ):
        after_forward = params if after_forward is None else after_forward
        specs = zip(STATES, (params, after_forward, grads, optim), strict=True)
        row = Row(*(_rung(topology, state, spec) for state, spec in specs))
        _check_row(topology, row)
        _check_options(param_dtype, reduce_dtype, reduce)
        changes = _normalised(topology, overrides)
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        limit = bytes_of(memory_limit)
        down = _wire(topology, "reduce_wire", reduce_wire)
        _check_summed(topology, row, down)
        _check_chain(topology, chain)
        wires = {
            "gather_wire": _wire(topology, "gather_wire", gather_wire),
            "reduce_wire": down,
            "wire_block": _wire_block(wire_block),
            "wire_except": _patterns(wire_except),
            "error_feedback": _feedback(error_feedback, down),
        }
        fields = dict(
            topology=topology, **row._asdict(), overrides=changes, **dtypes, reduce=reduce, memory_limit=limit, **wires
        ) | {"chain": chain}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        for pattern, change in changes:
            _merged(topology, row, change, pattern)

    @property
    def default(self) -> Row:
        """The row of a trainable parameter that no override matches."""
        return Row(self.params, self.after_forward, self.grads, self.optim)

    def row(self, name: str, trainable: bool = True) -> Row:
        """The rungs of the parameter `name`. A frozen parameter rests on its params rung alone, stored once.

        Raises `Error` where the overrides that match make an illegal row together.
        """
        row = self.default
        for pattern, changes in self.overrides:
            if fnmatchcase(name, pattern):
                row = _merged(self.topology, row, changes, pattern, name)
        return row if trainable else row._replace(grads=row.params, optim=row.params)

    def wires(self, layout: Layout, dtype: torch.dtype) -> Wires:
        """The formats in which a parameter of a master dtype travels. What would not be smaller (as narrow as its
        format already, or not enough to fill blocks) and what is no floating number travels as it is; so do gradients
        that an override has all-reduced over an axis."""
        if not dtype.is_floating_point or any(fnmatchcase(layout.name, pattern) for pattern in self.wire_except):
            return NONE
        compute, shard = self.compute_dtype(dtype), prod(layout.rung_shape(layout.optim))
        scattered = {axis for axis, _ in layout.axes[: layout.optim]}

        def smaller(formats: Iterable[tuple[str, str]], plain: torch.dtype) -> tuple[tuple[str, str], ...]:
            return tuple(it for it in formats if saves(it[1], shard, plain, self.wire_block))

        reduce = (it for it in self.reduce_wire if it[0] in scattered)
        return Wires(smaller(self.gather_wire, compute), smaller(reduce, self.reduce_dtype or compute), self.wire_block)

    def leaves_blocks_empty(self, layout: Layout, dtype: torch.dtype) -> bool:
        """Whether a parameter has so few elements a shard that a format of the plan would not make them less."""
        shard, compute = prod(layout.rung_shape(layout.optim)), self.compute_dtype(dtype)
        up = ((wire, compute) for _, wire in self.gather_wire)
        down = ((wire, self.reduce_dtype or compute) for _, wire in self.reduce_wire)
        return any(narrower(*it) and not saves(it[0], shard, it[1], self.wire_block) for it in (*up, *down))

    def compute_dtype(self, master: torch.dtype) -> torch.dtype:
        """What the model computes in: `param_dtype` for floating parameters."""
        return self.param_dtype if self.param_dtype and master.is_floating_point else master

    def layouts(self, parameters: Mapping[str, tuple[tuple[int, ...], bool]]) -> dict[str, Layout]:
        """The layout of each parameter, given as (full shape, trainable) by name.

        0-dim parameters and those without elements have nothing to split and are replicated. Raises `Error` for an
        override that matches no parameter.
        """
        self._check_patterns(list(parameters))
        return {name: self._layout(name, tuple(shape), train) for name, (shape, train) in parameters.items()}

    def _layout(self, name: str, shape: tuple[int, ...], trainable: bool) -> Layout:
        row = self.row(name, trainable) if shape and all(shape) else Row(0, 0, 0, 0)
        return Layout(name, shape, self.topology.inner, *row, trainable=trainable)

    def _check_patterns(self, names: list[str]) -> None:
        for pattern, _ in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.3) or names[:3]
                fix = "the closest names are " + ", ".join(map(repr, close)) if close else "the model has no parameters"
                raise Error(f"override {pattern!r} matches no parameter", fix=fix)

    def table(self, named: Mapping[str, Parameter], optimizer_states: int = 2) -> str:
        """The plan as text: for each state its rung, the ranks that share one copy, and MiB a rank.

        `named` gives (full shape, master dtype, trainable) by name; the bytes are those of `state_bytes`.
        """
        return "\n".join([str(self), "", *rest_lines(self, named, optimizer_states), *self._override_lines()])

    def _override_lines(self) -> list[str]:
        lines = [f"  {pattern}: {_spelled(self.topology, changes)}" for pattern, changes in self.overrides]
        return ["overrides (a later one wins)", *lines] if lines else []

    def to_json(self) -> str:
        """The plan with its topology as JSON; `from_json` gives an equal plan back."""
        named = self.topology.rung_name
        saved = {
            "topology": self.topology.to_dict(),
            **{state: named(rung) for state, rung in self.default._asdict().items()},
            # A list, because the order of overrides matters and JSON objects have none.
            "overrides": [[pattern, {state: named(rung) for state, rung in row}] for pattern, row in self.overrides],
            **{key: dtype_name(getattr(self, key)) for key in DTYPES},
            "reduce": self.reduce,
            "memory_limit": self.memory_limit,
            "gather_wire": dict(self.gather_wire),
            "reduce_wire": dict(self.reduce_wire),
            "wire_block": self.wire_block,
            "wire_except": list(self.wire_except),
            "error_feedback": self.error_feedback,
            "chain": self.chain,
        }
        return json.dumps(saved, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Raises `Error` for text that is no plan, saying what is wrong."""
        saved = _parsed(text)
        topology = Topology.from_dict(saved.pop("topology"))
        saved.update({key: _dtype(key, saved[key]) for key in DTYPES if key in saved})
        return cls(topology, **saved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises `Error` with the path and what is wrong where it is no plan."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise Error(f"{os.fspath(path)} is no plan: not UTF-8 text", fix=_SAVE) from error
        except Error as error:
            raise Error(f"{os.fspath(path)} is no plan: {error.what}", where=error.where, fix=error.fix) from error

    def __repr__(self) -> str:
        named = self.topology.rung_name
        given = [f"{state}={named(rung)!r}" for state, rung in self.default._asdict().items()]
        if self.overrides:
            rows = {pattern: {state: named(rung) for state, rung in changes} for pattern, changes in self.overrides}
            given.append(f"overrides={rows!r}")
        given += [f"{key}={getattr(self, key)}" for key in DTYPES if getattr(self, key)]
        given += [f"reduce={self.reduce!r}"] * (self.reduce != "mean")
        given += [f"memory_limit={self.memory_limit}"] * (self.memory_limit is not None)
        given += [f"{key}={dict(getattr(self, key))!r}" for key in WIRES[:2] if getattr(self, key)]
        given += [f"chain={self.chain!r}"] * (self.chain != "hop")
        given += [f"wire_block={self.wire_block}"] * (self.wire_block != WIRE_BLOCK)
        given += [f"wire_except={self.wire_except!r}"] * (self.wire_except != WIRE_EXCEPT)
        given += ["error_feedback=True"] * self.error_feedback
        return f"Plan({self.topology!r}, {', '.join(given)})"

    def __str__(self) -> str:
        row = zip(STATES, self.default, strict=True)
        text = f"{_spelled(self.topology, row)} on " + " x ".join(f"{n}={s}" for n, s in self.topology.inner[::-1])
        names = {key: dtype_name(getattr(self, key)) for key in DTYPES}
        text += "".join(f", {key} {name}" for key, name in names.items() if name)
        text += ", gradients summed" * (self.reduce == "sum")
        text += f", at most {mib(self.memory_limit)} MiB a rank" if self.memory_limit is not None else ""
        text += {"hop": "", "flat": ", flat", "auto": ", flat where that is faster"}[self.chain]
        for what, wire in (("gathers", self.gather_wire), ("reduces", self.reduce_wire)):
            text += "".join(f", {what} over {axis} in {form}" for axis, form in wire)
        text += ", with error feedback" * self.error_feedback
        return text + (f", {_counted(len(self.overrides), 'override')}" if self.overrides else "")

    @staticmethod
    def diff(a: Plan, b: Plan, named: Mapping[str, Parameter] | None = None, micro_batches: int = 1) -> str:
        """What differs between two plans, a line each; nothing where they are equal.

        With parameters (full shape, master dtype, trainable) by name also MiB a rank at rest, and what a rank sends
        over each axis in a step of some micro-batches.
        """
        ours, theirs = _as_lines(a, named, micro_batches), _as_lines(b, named, micro_batches)
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        width, first = (max([0, *map(len, texts)]) for texts in (keys, (ours.get(key, "-") for key in keys)))
        return "\n".join(
            f"{key:<{width}}  {ours.get(key, '-'):<{first}}  {theirs.get(key, '-')}".rstrip() for key in keys
        )

    @classmethod
    def legal(cls, topology: Topology) -> list[Plan]:
        """Every plan that is legal on a topology, without overrides: 7 on one axis, 25 on two."""
        rungs = range(len(topology.axes) + 1)
        return [
            cls(topology, params=params, after_forward=after_forward, grads=grads, optim=optim)
            for optim in rungs
            for params in rungs[: optim + 1]
            for grads in rungs[: optim + 1]
            for after_forward in rungs[: params + 1]
        ]

    @classmethod
    def ddp(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """Everything on every rank."""
        return cls(topology, **options)

    @classmethod
    def zero1(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """The optimizer over all ranks (ZeRO stage 1, arXiv 1910.02054)."""
        return cls(topology, optim="all", **options)

    @classmethod
    def zero2(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """Gradients and the optimizer over all ranks (ZeRO stage 2)."""
        return cls(topology, grads="all", optim="all", **options)

    @classmethod
    def zero3(cls, topology: Topology, *, reshard: bool = True, **options: Unpack[Options]) -> Plan:
        """Everything over all ranks (ZeRO stage 3, FSDP); without `reshard` full from the forward to the backward."""
        after_forward = "all" if reshard else "replicated"
        return cls(topology, params="all", after_forward=after_forward, grads="all", optim="all", **options)

    @classmethod
    def hsdp(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """Everything inside the outermost axis, replicated along it (FSDP's hybrid sharding)."""
        inside = _inside(topology, "hsdp")
        return cls(topology, params=inside, grads=inside, optim=inside, **options)

    @classmethod
    def mics(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """MiCS (arXiv 2205.00119) with a partition group of all axes but the outermost: the same row as `hsdp`."""
        inside = _inside(topology, "mics")
        return cls(topology, params=inside, grads=inside, optim=inside, **options)

    @classmethod
    def hpz(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """ZeRO-3 whose backward gathers inside the outermost axis (hpZ of ZeRO++, arXiv 2306.10209)."""
        inside = _inside(topology, "hpz")
        return cls(topology, params="all", after_forward=inside, grads="all", optim="all", **options)

    @classmethod
    def zeropp(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """ZeRO++ (arXiv 2306.10209): `hpz`, gathers in int8 (qwZ), reductions in int4 (qgZ)."""
        return cls.hpz(topology, **{**_quantized(topology), **options})

    @classmethod
    def frontier(cls, topology: Topology, **options: Unpack[Options]) -> Plan:
        """Three levels (arXiv 2501.04266): parameters inside a package, gradients inside a node, the optimizer over
        all; gathers in int8, reductions in int4. Raises `Error` where there are not three axes."""
        if len(topology.axes) != 3:
            raise Error(
                f"frontier needs three axes, but {topology} has {len(topology.axes)}",
                fix="Topology(node=..., gpu=4, gcd=2)",
            )
        given = {**_quantized(topology), **options}
        return cls(topology, params=topology.axes[2], grads=topology.axes[:0:-1], optim="all", **given)

    @classmethod
    def paro(cls, topology: Topology, letters: str, **options: Unpack[Options]) -> Plan:
        """One of PaRO's strategies, letters for params, grads, optim: N none, I all axes but the outermost, G all."""
        if letters not in PARO:
            raise Error(f"{letters!r} is not a PaRO strategy", fix=f"one of {', '.join(PARO)}")
        rungs = {"N": 0, "G": len(topology.axes)}
        if "I" in letters:
            rungs["I"] = _inside(topology, f"paro {letters!r}")
        params, grads, optim = (rungs[letter] for letter in letters)
        return cls(topology, params=params, grads=grads, optim=optim, **options)

    @classmethod
    def amsp(cls, topology: Topology, p: int, g: int, os: int, **options: Unpack[Options]) -> Plan:
        """AMSP (arXiv 2311.00257): `p`, `g`, `os` ranks share one copy of parameters, gradients, optimizer.

        A factor inside an axis splits it: `p=4` on `gpu=8` makes the plan's topology `gpu1=2, gpu0=4`. Raises `Error`
        for a factor that no split reaches.
        """
        split = topology.split((p, g, os))
        rungs = {split.shared_by(rung): rung for rung in reversed(range(len(split.axes) + 1))}
        return cls(split, params=rungs[p], grads=rungs[g], optim=rungs[os], **options)


def _quantized(topology: Topology) -> dict[str, Any]:
    return {"gather_wire": dict.fromkeys(topology.axes, "int8"), "reduce_wire": dict.fromkeys(topology.axes, "int4")}


_SAVE = "write it with Plan.save(path)"


def _as_lines(plan: Plan, named: Mapping[str, Parameter] | None, micro_batches: int) -> dict[str, str]:
    """What `Plan.diff` compares."""
    from shardc.cost import step_bytes

    lines = {
        "topology": repr(plan.topology),
        "links": "; ".join(f"{axis} {link}" for axis, link in plan.topology.links),
    }
    for state, rung in plan.default._asdict().items():
        shared = plan.topology.shared_by(rung)
        lines[state] = f"{plan.topology.rung_name(rung)} ({shared} rank{'s' * (shared > 1)} a copy)"
    lines |= {f"override {pattern}": _spelled(plan.topology, changes) for pattern, changes in plan.overrides}
    for key in (*DTYPES, "reduce", "memory_limit", *WIRES, "chain"):
        lines[key] = str(getattr(plan, key))
    if named is not None:
        lines |= {f"MiB at rest, {kind}": mib(n) for kind, n in state_bytes(plan, named).items()}
        sent = step_bytes(plan, named, micro_batches)
        lines |= {f"MiB sent a step, {move} over {axis}": mib(n) for (move, axis), n in sent.items() if n}
    return lines


def _rung(topology: Topology, state: str, spec: RungSpec) -> int:
    try:
        return topology.rung(spec)
    except Error as error:
        raise Error(f"{state}: {error.what}", where=error.where, fix=error.fix) from error


def _check_row(topology: Topology, row: Row, where: str | None = None) -> None:
    for low, high in (("params", "optim"), ("grads", "optim"), ("after_forward", "params")):
        below, above = getattr(row, low), getattr(row, high)
        if below > above:
            subject, relation, other = (low, "below", high) if low == "after_forward" else (high, "above", low)
            names = {low: topology.rung_name(below), high: topology.rung_name(above)}
            raise Error(
                f"{subject} must be at or {relation} {other} on the ladder, but {subject} is {names[subject]!r} "
                f"and {other} is {names[other]!r}",
                where=where,
                fix=f"{subject}={names[other]!r}, or {other}={names[subject]!r}",
            )


def _check_options(param_dtype: object, reduce_dtype: object, reduce: object) -> None:
    for key, dtype in zip(DTYPES, (param_dtype, reduce_dtype), strict=True):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise Error(f"{key} is {dtype!r}", fix="a floating-point dtype such as torch.bfloat16, or None")
    if reduce not in ("mean", "sum"):
        raise Error(f"reduce is {reduce!r}", fix="'mean' or 'sum' of the gradients over all ranks")


def _wire(topology: Topology, key: str, wire: object) -> tuple[tuple[str, str], ...]:
    try:
        given = dict(wire or {})  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise Error(f"{key} is {wire!r}", fix=f"a format by axis, such as {{'node': 'int8'}}: {FORMATS}") from error
    for axis, form in given.items():
        if axis not in topology.axes:
            raise Error(f"{key} names axis {axis!r}", fix=_did_you_mean(axis, topology.axes))
        if form not in FORMATS:
            raise Error(f"{key} over {axis!r} is {form!r}", fix=_did_you_mean(form, FORMATS))
    return tuple((axis, given[axis]) for axis in topology.axes if axis in given)


def _wire_block(block: object) -> int:
    if type(block) is not int or block < 8 or block % 8:
        raise Error(f"wire_block is {block!r}", fix=f"a multiple of 8, such as {WIRE_BLOCK}")
    return block


def _feedback(wanted: object, down: tuple[tuple[str, str], ...]) -> bool:
    if type(wanted) is not bool:
        raise Error(f"error_feedback is {wanted!r}", fix="True or False")
    if wanted and not any(form in LARGEST for _, form in down):
        raise Error(
            "error_feedback without a block-scaled reduce_wire", fix="reduce_wire={'node': 'int4'}, or leave it"
        )
    return wanted


def _patterns(patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, str) or not all(isinstance(it, str) for it in patterns):  # type: ignore[attr-defined]
        raise Error(f"wire_except is {patterns!r}", fix=f"patterns on names, such as {WIRE_EXCEPT}")
    return tuple(patterns)  # type: ignore[arg-type]


def _check_summed(topology: Topology, row: Row, wire: tuple[tuple[str, str], ...]) -> None:
    """A gradient is all-reduced over the axes that optim lacks, which adds numbers on the way."""
    whole = [axis for axis, _ in topology.inner[row.optim :]]
    for axis, form in wire:
        if axis in whole:
            rung = topology.rung_name(topology.inner.index((axis, topology.group_size(axis))) + 1)
            raise Error(
                f"reduce_wire over {axis!r} is {form!r}, but gradients are all-reduced over it: optim is "
                f"{topology.rung_name(row.optim)!r}",
                fix=f"optim={rung!r}, so that they are scattered, or reduce_dtype=torch.bfloat16",
            )


def _check_chain(topology: Topology, chain: object) -> None:
    if chain not in ("hop", "flat", "auto"):
        raise Error(f"chain is {chain!r}", fix="'hop', 'flat' or 'auto'")
    if chain == "auto" and not topology.links:
        raise Error("chain='auto' needs to know how fast axes are", fix="Topology(...).with_links(...), or chain='hop'")


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(limit: object, name: str = "memory_limit") -> int | None:
    """In bytes."""
    if isinstance(limit, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", limit, re.IGNORECASE)
        limit = int(float(match[1]) * _UNITS[match[2].upper()]) if match else limit
    if limit is not None and not (type(limit) is int and limit > 0):
        raise Error(f"{name} is {limit!r}", fix="bytes, or a text such as '80GB' or '74.5GiB', or None")
    return limit


def _normalised(topology: Topology, overrides: Any) -> tuple[tuple[str, Changes], ...]:
    try:
        rows = [(pattern, dict(changes)) for pattern, changes in dict(overrides or {}).items()]
    except (TypeError, ValueError) as error:
        raise Error(f"overrides are {overrides!r}", fix="{'*norm*': dict(params='replicated')}") from error
    return tuple((pattern, _changes(topology, pattern, changes)) for pattern, changes in rows)


def _changes(topology: Topology, pattern: str, changes: dict[str, RungSpec]) -> Changes:
    if not isinstance(pattern, str):
        raise Error(f"override {pattern!r} is no pattern", fix="a string such as '*norm*'")
    for key in changes:
        if key not in STATES:
            raise Error(f"override {pattern!r} sets {key!r}", fix=_did_you_mean(key, STATES))
    where = f"override {pattern!r}, "
    return tuple((state, _rung(topology, where + state, changes[state])) for state in STATES if state in changes)


def _merged(topology: Topology, row: Row, changes: Changes, pattern: str, name: str | None = None) -> Row:
    given = dict(changes)
    row = row._replace(**given)
    if "after_forward" not in given:
        row = row._replace(after_forward=min(row.after_forward, row.params))
    _check_row(topology, row, f"override {pattern!r}" + (f" for parameter {name!r}" if name else ""))
    return row


def _inside(topology: Topology, preset: str) -> int:
    """The rung inside the outermost axis (inside a node)."""
    if len(topology.axes) < 2:
        raise Error(
            f"{preset} needs two axes, but {topology} has one",
            fix=f"split it by node: Topology(node=..., {topology.axes[0]}=...)",
        )
    return len(topology.axes) - 1


def _parsed(text: str) -> dict[str, Any]:
    """The JSON object of a plan, its keys checked."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Error(f"not JSON: {error}", fix=_SAVE) from error
    if not isinstance(saved, dict):
        raise Error(f"a JSON {type(saved).__name__} where an object is expected", fix=_SAVE)
    known = ("topology", *STATES, "overrides", *DTYPES, "reduce", "memory_limit", *WIRES, "chain")
    for key in saved:
        if key not in known:
            raise Error(f"unknown key {key!r}", fix=_did_you_mean(key, known))
    if "topology" not in saved:
        raise Error("key 'topology' is missing", fix=_SAVE)
    return saved


def _dtype(key: str, name: object) -> torch.dtype | None:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not isinstance(dtype, torch.dtype):
        raise Error(f"{key} is {name!r}", fix="a name such as 'bfloat16', or null")
    return dtype


def _spelled(topology: Topology, row: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{state} {topology.rung_name(rung)}" for state, rung in row)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _did_you_mean(key: object, known: tuple[str, ...]) -> str:
    close = get_close_matches(str(key), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}"
