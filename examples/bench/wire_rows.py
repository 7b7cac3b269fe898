"""The systems of `wire.py`: what each trains with, by the name of its row.

Baselines have prefetch and asynchronous gathers where torch offers them (`fsdp2.py`). With more than one micro-batch:

    ddp                     all-reduces at the last micro-batch (what `no_sync` does)
    fsdp2, hsdp             gather in every forward and backward, and reduce at the last micro-batch
    fsdp2-held              parameters stay full from the first forward of a step to its last backward: the fastest
                            where links are slow, and the largest
    fsdp2-each, hsdp-each   reduce at every micro-batch (hsdp: inside a host), so that gradients stay sharded

`-exchanged`: reduce-scatters are an all-to-all and a local sum, for Gloo's own sends as much as an all-reduce does.
`-overlapped`: these run in the background, too, as on a GPU's stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from fsdp2 import sharded_by_fsdp2
from llama import Config, Llama, adapted
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import shardc

CONFIG = Config(dim=384, layers=6, heads=8, kv_heads=8, hidden=1024, vocab=8192, context=128)
BF16 = torch.bfloat16
LORA_RANK = 12
"""of adapters that are 3% of the parameters"""
NORMS = ["*norm*"]
ALONE, BASELINE, OURS = "alone", "baseline", "shardc"
"""Kinds of rows; the first are without communication."""
POWER_RANK = 2
ONE_BUCKET = 1 << 10
"""MiB. PowerSGD starts collectives when others end; those of two buckets meet in another order on each rank of Gloo."""
PLAIN_STEPS = 2
"""before PowerSGD begins, as few as it allows"""


@dataclass(frozen=True)
class Task:
    """What one job is to do; it goes there as JSON."""

    row: str
    hosts: int
    processes: int
    """a host"""
    rate: str
    """of the links, as `tc` spells it"""
    micro_batches: int
    warmup: int
    steps: int
    measure: bool = False
    """shardc times its regions on the device"""
    topology: dict[str, Any] | None = None
    """as calibrated"""
    piece_us: float | None = None
    """what a piece of compute took meanwhile"""
    plan: str | None = None
    """of the planner"""
    memory: int | None = None
    """bytes that the planner may use, or that a baseline of the same placement needs"""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """tasks of the rows that take turns"""

    @property
    def world(self) -> int:
        return self.hosts * self.processes

    @property
    def shape(self) -> shardc.Topology:
        """With its links, where they are known."""
        known = self.topology and shardc.Topology.from_dict(self.topology)
        return known or shardc.Topology(node=self.hosts, gpu=self.processes)


@dataclass
class System:
    """A model that is ready to be trained, and what a loop has to tell it."""

    model: nn.Module
    shared_by: int
    """ranks that share one copy of the optimizer's state"""
    begin: Callable[[bool], None] = lambda last: None
    """called before each micro-batch: whether it is the last of a step"""
    settle: Callable[[], None] = lambda: None
    """waits for what is still in flight when the last backward is over"""
    plan: shardc.Plan | None = None


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    make: Callable[[Task], System]
    precision: str = "fp32"
    kind: str = BASELINE
    beside: str = "alone"
    """the row without communication that computes alike"""
    lora: bool = False
    as_small_as: str = ""
    """the baseline of the same placement, whose peak is the memory limit"""
    where: Callable[[Task], str] = lambda task: ""
    """why there is no such row, or nothing"""

    @property
    def against(self) -> str:
        """The precision of the baselines that it is compared with."""
        return self.precision if self.precision in ("fp32", "bf16") else "bf16"


def built(row: Row | None = None) -> Llama:
    """With the same values everywhere."""
    torch.manual_seed(0)
    model = Llama(CONFIG)
    return adapted(model, LORA_RANK) if row and row.lora else model


def parameters_of(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype, bool]]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


# Without communication


def alone(task: Task, compiled: bool = False, dtype: torch.dtype = torch.float32) -> System:
    model = built(ROWS[task.row]).to(dtype)
    for layer in model.layers if compiled else ():
        layer.compile(fullgraph=True, dynamic=False)
    return System(model, 1)


# Baselines


def ddp(
    task: Task, hook: Callable[[], tuple[Any, Any]] | None = None, compiled: bool = False, bucket_mib: int | None = None
) -> System:
    model = built(ROWS[task.row])
    for layer in model.layers if compiled else ():
        layer.compile(fullgraph=True, dynamic=False)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    if hook:
        wrapped.register_comm_hook(*hook())

    def begin(last: bool) -> None:
        wrapped.require_backward_grad_sync = last  # what `no_sync` sets

    return System(wrapped, 1, begin)


def in_bf16() -> tuple[Any, Any]:
    """DDP refuses the hook by its name where there is no NCCL, though Gloo can do what it does."""
    return None, lambda state, bucket: bf16_compress_hook(state, bucket)


def by_power_sgd() -> tuple[Any, Any]:
    state = powerSGD_hook.PowerSGDState(None, POWER_RANK, PLAIN_STEPS)
    return state, powerSGD_hook.powerSGD_hook


def fsdp2(task: Task, replicated: bool = False, held: bool = False, each: bool = False, **options: Any) -> System:
    model, settle = sharded_by_fsdp2(
        built(ROWS[task.row]),
        "cpu",
        (task.hosts, task.processes),
        replicated=replicated,
        held=held,
        prefetch=1,
        **{"compiled": False, "reduces": "own", **options},
    )

    def begin(last: bool) -> None:
        if each:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)
        if held:
            model.set_reshard_after_backward(last)

    return System(model, task.processes if replicated else task.world, begin, settle)


# shardc


def ours(task: Task, make: Callable[..., shardc.Plan], **wires: Any) -> System:
    return under(limited(make(task.shape, **wires), task.memory), task)


def limited(plan: shardc.Plan, memory: int | None) -> shardc.Plan:
    """Within a memory limit, where that is foretold to be enough; that it is not is said."""
    if memory is None:
        return plan
    within = replace(plan, memory_limit=memory)
    ids = torch.zeros(1, CONFIG.context, dtype=torch.long)
    try:
        shardc.trace(built(), within, ids, ids, keep=False)
    except shardc.Error as error:
        print(error, file=sys.stderr)
        return plan
    return within


def chosen(task: Task) -> System:
    """By the planner."""
    assert task.plan
    return under(shardc.Plan.from_json(task.plan), task)


def under(plan: shardc.Plan, task: Task) -> System:
    model = shardc.compile(built(ROWS[task.row]), plan, measure=task.measure, progress=lambda text: None)
    return System(model, plan.topology.shared_by(plan.optim), model.set_requires_gradient_sync, plan=plan)


PLANS: dict[str, Callable[..., shardc.Plan]] = {
    "zero3": shardc.Plan.zero3,
    "hpz": shardc.Plan.hpz,
    "hsdp": shardc.Plan.hsdp,
    **{letters: partial(shardc.Plan.paro, letters=letters) for letters in ("NIG", "IIG", "ING")},
}


SAME = {"zero3": "fsdp2", "hsdp": "hsdp"}
"""Baselines of the same placement."""


@dataclass(frozen=True)
class Format:
    """How values travel."""

    precision: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)
    """the same, as the planner is told"""
    beside: str = "alone-compiled"


FORMATS = {
    "": Format("fp32", {}, {"param_dtype": None}),
    "-bf16": Format(
        "bf16",
        {"gather_wire": {"node": "bf16"}, "reduce_wire": {"node": "bf16"}},
        {"param_dtype": None, "gather_wires": ["bf16"], "reduce_wires": ["bf16"]},
    ),
    "-bf16-compute": Format("bf16", {"param_dtype": BF16}, {"param_dtype": BF16}, "alone-bf16-compiled"),
    "-int8-int4": Format(
        "int8, int4",
        {"gather_wire": {"node": "int8"}, "reduce_wire": {"node": "int4"}},
        {"param_dtype": None, "gather_wires": ["int8"], "reduce_wires": ["int4"]},
    ),
    "-int8-int4-all": Format(
        "int8, int4",
        {"gather_wire": {"node": "int8"}, "reduce_wire": {"node": "int4"}, "wire_except": NORMS},
        {"param_dtype": None, "gather_wires": ["int8"], "reduce_wires": ["int4"], "wire_except": NORMS},
    ),
    "-int8-int4-all-bf16-compute": Format(
        "int8, int4",
        {"param_dtype": BF16, "gather_wire": {"node": "int8"}, "reduce_wire": {"node": "int4"}, "wire_except": NORMS},
        {"param_dtype": BF16, "gather_wires": ["int8"], "reduce_wires": ["int4"], "wire_except": NORMS},
        "alone-bf16-compiled",
    ),
}
"""`-all` sends the embedding in these formats, too. Plans leave it as it is unless told otherwise, and it is then over
half of all bytes between hosts. Baselines in bf16 compute in bf16; what is compared with them does so, or not."""


def _legal(task: Task, name: str, form: Format) -> str:
    """A plan that is an error is left out; so is one that is another by another name where a host has one process."""
    try:
        plan = PLANS[name](task.shape, **form.plan)
    except shardc.Error as error:
        return str(error)
    for other in list(PLANS)[: list(PLANS).index(name)]:
        if _factors(PLANS[other](task.shape)) == _factors(plan):
            return f"moves and holds what {other} does"
    return ""


def _factors(plan: shardc.Plan) -> list[int]:
    return [plan.topology.shared_by(rung) for rung in plan.default]


def _two_level(task: Task) -> str:
    return "" if task.processes > 1 else "a host has one process: there is nothing to shard inside it"


def _several(task: Task) -> str:
    return "" if task.micro_batches > 1 else "for more than one micro-batch"


def _two_level_several(task: Task) -> str:
    return _two_level(task) or _several(task)


def _rows_of_shardc() -> Iterator[tuple[str, Row]]:
    for suffix, form in FORMATS.items():
        for name, make in PLANS.items():
            row = partial(ours, make=make, **form.plan)
            legal = partial(_legal, name=name, form=form)
            placed = SAME.get(name, "") + ("-bf16" if "bf16" in form.beside else "") * (name in SAME)
            yield f"shardc-{name}{suffix}", Row(row, form.precision, OURS, form.beside, as_small_as=placed, where=legal)
        yield f"planner{suffix}", Row(chosen, form.precision, OURS, form.beside)
    for name in ("IIG", "ING"):
        row = partial(ours, make=PLANS[name])
        yield f"shardc-{name}-lora", Row(row, "fp32", OURS, "alone-lora-compiled", lora=True, where=_several)
    yield "planner-lora", Row(chosen, "fp32", OURS, "alone-lora-compiled", lora=True, where=_several)


HSDP = partial(fsdp2, replicated=True)
ROWS: dict[str, Row] = {
    "alone": Row(alone, kind=ALONE),
    "alone-compiled": Row(partial(alone, compiled=True), kind=ALONE),
    "alone-bf16": Row(partial(alone, dtype=BF16), "bf16", ALONE),
    "alone-bf16-compiled": Row(partial(alone, compiled=True, dtype=BF16), "bf16", ALONE),
    "alone-lora": Row(alone, kind=ALONE, lora=True, where=_several),
    "alone-lora-compiled": Row(partial(alone, compiled=True), kind=ALONE, lora=True, where=_several),
    "ddp": Row(ddp),
    "ddp-compiled": Row(partial(ddp, compiled=True), beside="alone-compiled"),
    "ddp-bf16-hook": Row(partial(ddp, hook=in_bf16), "bf16"),
    "ddp-powersgd": Row(partial(ddp, hook=by_power_sgd, bucket_mib=ONE_BUCKET), "low rank"),
    "ddp-lora": Row(ddp, beside="alone-lora", lora=True, where=_several),
    "fsdp2": Row(fsdp2),
    "fsdp2-compiled": Row(partial(fsdp2, compiled=True), beside="alone-compiled"),
    "fsdp2-held": Row(partial(fsdp2, held=True)),
    "fsdp2-each": Row(partial(fsdp2, each=True), where=_several),
    "fsdp2-bf16": Row(partial(fsdp2, dtype=BF16), "bf16", beside="alone-bf16"),
    "fsdp2-held-bf16": Row(partial(fsdp2, held=True, dtype=BF16), "bf16", beside="alone-bf16"),
    "fsdp2-exchanged": Row(partial(fsdp2, reduces="exchanged")),
    "fsdp2-overlapped": Row(partial(fsdp2, reduces="exchanged in background")),
    "fsdp2-lora": Row(partial(fsdp2, held=True), beside="alone-lora", lora=True, where=_several),
    "hsdp": Row(HSDP, where=_two_level),
    "hsdp-compiled": Row(partial(HSDP, compiled=True), beside="alone-compiled", where=_two_level),
    "hsdp-each": Row(partial(HSDP, each=True), where=_two_level_several),
    "hsdp-bf16": Row(partial(HSDP, dtype=BF16), "bf16", beside="alone-bf16", where=_two_level),
    "hsdp-exchanged": Row(partial(HSDP, reduces="exchanged"), where=_two_level),
    "hsdp-overlapped": Row(partial(HSDP, reduces="exchanged in background"), where=_two_level),
} | dict(_rows_of_shardc())
