"""Trial: how long compute takes, and what hops take of it, in steps that are really made.

Compute is pinned first, without hops: models go forward and backward, one with a large matrix, of few rows and of more,
a deep one, both in 32 bits and in 16 (where these are not emulated), and one of adapters, whose many small products
take what it takes to call them; next to nothing is fused there, which could be mistaken for calls. Four factors make
what was foretold of them most like what these took: of products of either length, of their numbers, and of calls.
(Attention takes what its table says; where it was scaled with products, what these take hid behind it.)

Beside hops in flight compute finds its caches cold, threads wake up at the wrong time, and each start reads its code
from memory again; of that, what is measured in a loop shows little. So the first model is then trained under a few
plans, for four factors more: of what a hop takes of compute, of what it takes for each byte, through memory that ranks
share and otherwise, and of quantizing. (What that model's compute is still off by is left out there. One for compute
in 16 bits could not be told from noise: it was 1.09, from four runs that are foretold up to 5% too short without it,
where runs of the same graphs in 32 bits differed by 5%.) Of each, steps are timed, and forwards and backwards that do
not sync, in which compute waits for little: where there were only steps, whatever else these took longer was put down
to hops, as if they took twice as much of compute, and what micro-batches do before the last was foretold 7 to 18% too
long.

A machine is faster in one minute than in the next, and what is foretold is made of both kinds of runs. So none is timed
at once: all are, a step each, one after the other, in rounds. Many rounds of few steps, for steps that follow each
other have the same luck: medians of three in a row were up to 1.5 times as long in one round as in the next. In each, a
step that does not count comes first: caches are another model's, and what its step put off may still be under way. What
was measured in loops is measured again before these rounds, and counts as it was faster (`gauge.faster`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.errors import Error
from shardc.compile import compile, paused_gc
from shardc.gauge import LEAST, Block, Say, faster, gauged, slowed
from shardc.links import Device, Link
from shardc.plan import Plan
from shardc.predict import predicted
from shardc.program import Program
from shardc.simulate import calls_of, clocked
from shardc.topology import Topology
from shardc.trace import programs, trace


def _narrow(topology: Topology, dtype: torch.dtype | None = None) -> Plan:
    """With messages between hosts that take compute to make, and few bytes."""
    outer = topology.inner[-1][0]
    return Plan.zero3(topology, param_dtype=dtype, gather_wire={outer: "int8"}, reduce_wire={outer: "int4"})


RUNS = (
    (Plan.zero3, 1),
    (Plan.hsdp, 1),
    (partial(Plan.paro, letters="IIG"), 1),
    (partial(Plan.paro, letters="IIG"), 4),
    (partial(Plan.paro, letters="NIG"), 1),
    (partial(Plan.paro, letters="NIG"), 4),
    (partial(Plan.paro, letters="NIG", param_dtype=torch.bfloat16), 1),
    (_narrow, 1),
    (partial(_narrow, dtype=torch.bfloat16), 1),
)
"""Plans, and micro-batches: gathers that are relayed and some that are not, reductions and all-reduces, many bytes and
few, between hosts and inside of them."""
LAYERS, DIM, HEADS, VOCAB, TOKENS = 2, 384, 8, 8192, 128
"""of a model that has half of its parameters in one matrix, as small language models do"""
LENGTH = LAYERS + 2
"""with that matrix and a loss"""
DEEP = 6
"""layers of one without that matrix"""
RANK, ADAPTERS = 12, 96
"""of a model of adapters alone, which takes as long as it takes to call its products: of so many, for each pass takes
some milliseconds whatever is in it, and one of 24 took 1.25 times as long for each"""
ROWS = (1, 4)
"""of a batch, the fewest that are enough; of more, compute without hops has not been pinned"""
BUSY = 1.25
"""times as much as the busiest lane compute has to do: what holds it up is not hidden"""
ROUNDS = 12
"""in each of which each run makes a step"""
PASSES_S = 1.5
"""for which forwards and backwards go on: as in the micro-batches of a step, ranks do not wait for each other after
each, which took up to 3% more"""
LAUNCH_US, VALUE_NS = 40.0, 0.5
"""of a product, and of a number, before they are pinned"""
COMPUTE = ("products32", "products16", "number", "launch")
"""what is pinned, as `_with_factors` has it"""
HOPS = ("hop", "near byte", "far byte", "quantize")
"""what compute is taken by, and what takes longer beside it, as `_scaled` has them"""
FITS = 9
"""of compute: after one, calls can be pinned to three times what they take"""
FIRM = {"compute": 0.02, "hops": 0.04}
"""In each fit a factor of 2 is as unlikely as what takes so much longer than foretold."""


Run = tuple[Program, int, float]
"""A program, the micro-batches of its step (0: a forward and a backward without sync), and the seconds that it took."""


@dataclass
class Runner:
    """A compiled model that is run in rounds."""

    model: nn.Module
    micro_batches: int
    step_s: Callable[[], float]
    """makes what does not count and what does, and says what that took"""
    rounds_s: list[float] = field(default_factory=list)

    def go_on(self) -> Runner:
        with paused_gc():
            self.rounds_s.append(_slowest(self.step_s()))
        return self

    @property
    def run(self) -> Run:
        return programs(self.model)[0], self.micro_batches, median(self.rounds_s)


def tried(
    topology: Topology, overheads: Callable[[Topology], Mapping[str, Link]], progress: Say = lambda text: None
) -> Topology:
    """The topology with compute and factors as they were in training. All ranks call it together, with the same
    numbers, and have the same when it returns. `overheads` measures what collectives take of compute once more, by the
    names of axes."""
    topology = _with(topology, replace(topology.computes, launch_us=LAUNCH_US, value_ns=VALUE_NS))
    alone: dict[tuple[int, torch.dtype | None, int], Runner] = {}
    for model, plan, x in _without_hops(topology):
        progress(f"running a model of {len(model)} layers on {len(x)} rows of {x.dtype}, without hops")
        alone[len(model), plan.param_dtype, len(x)] = _alone(plan, model, x).go_on()
    trained = []
    for plan, micro_batches in _plans(_with_compute(topology, alone.values())):
        progress(f"training a small model, {micro_batches} micro-batches: {plan}")
        rows = _rows(plan, micro_batches)
        steps = _trained(plan, rows, micro_batches).go_on()
        passes = _passes(steps.model, _batch(plan, rows)).go_on()
        trained += [(it, alone[LENGTH, plan.param_dtype, rows]) for it in (steps, passes)]
    links = [dict(topology.links + topology.flat), overheads(topology)]
    again = gauged(torch.device("cpu"), lambda text: progress(f"{text}, once more"))
    topology = _with(topology, faster(topology.computes, again))
    for count in range(1, ROUNDS):
        progress(f"running all of these again: round {count + 1} of {ROUNDS}")
        for runner in (*alone.values(), *(it for it, _ in trained)):
            runner.go_on()
    topology = _with_middle(topology, [*links, overheads(topology)])
    topology, runs = _with_compute(topology, alone.values()), []
    for (program, micro_batches, took_s), (without_hops, _, alone_s) in ((a.run, b.run) for a, b in trained):
        off_s = alone_s - _foretold_s(without_hops, 0, topology)
        runs.append((program, micro_batches, took_s - max(1, micro_batches) * off_s))
    return of_rank_0(refitted(runs, partial(_scaled, topology), len(HOPS), FIRM["hops"]))


def _with_middle(topology: Topology, measured: Sequence[Mapping[str, Link]]) -> Topology:
    """With what collectives take of compute as it was measured in the middle of these."""

    def middle(axes: str, link: Link) -> Link:
        found = [links[axes] for links in measured if axes in links]
        names = ("launch_us", "gather_us_per_mb", "reduce_us_per_mb")
        return replace(link, **{name: median(getattr(it, name) for it in found) for name in names})

    links = {axis: middle(axis, link) for axis, link in topology.links}
    return topology.with_links(topology.computes, **links).with_flat({a: middle(a, link) for a, link in topology.flat})


def _with_compute(topology: Topology, alone: Iterable[Runner]) -> Topology:
    """Pinned to what runs without hops have taken so far."""
    return of_rank_0(pinned(topology, [runner.run for runner in alone]))


def pinned(topology: Topology, runs: Sequence[Run]) -> Topology:
    """To runs without hops. Over and over, for which products take as long as it takes to read them is not known before
    it is how long their operations take."""
    for _ in range(FITS):
        topology = refitted(runs, partial(_with_factors, topology), len(COMPUTE), FIRM["compute"])
    return topology


def of_rank_0(topology: Topology) -> Topology:
    """Ranks go by the same numbers: what each of them fits to what all have measured may differ in the last digit."""
    saved = [topology.to_dict()]
    dist.broadcast_object_list(saved, src=0)
    return Topology.from_dict(saved[0])


def refitted(runs: Sequence[Run], scaled: Callable[[Sequence[float]], Topology], count: int, firm: float) -> Topology:
    """What `scaled` makes of the factors, `count` of them, with which what is foretold of runs is most like what they
    took: by least squares of what they take longer, relative to what they take."""
    before = scaled([1.0] * count)
    doubled = [scaled(factors) for factors in (1.0 + torch.eye(count)).tolist()]
    rows = []
    for program, micro_batches, took_s in runs:
        once_s, *twice_s = (_foretold_s(program, micro_batches, it) for it in (before, *doubled))
        rows.append([(s - once_s) / took_s for s in (*twice_s, took_s)])
    firmly = [[firm * float(i == j) for j in range(count)] + [0.0] for i in range(count)]
    of = torch.tensor([*rows, *firmly], dtype=torch.float64)
    return scaled([max(LEAST, 1.0 + x) for x in torch.linalg.lstsq(of[:, :-1], of[:, -1:]).solution[:, 0].tolist()])


def _without_hops(topology: Topology) -> Iterator[tuple[nn.Sequential, Plan, Tensor]]:
    """Models, the plans that say what they compute in, and batches."""
    for dtype in _dtypes(topology):
        plan = Plan.ddp(topology, param_dtype=dtype)
        yield from ((_model(), plan, _batch(plan, rows)) for rows in ROWS)
        yield _deep_model(), plan, _batch(plan, ROWS[0])
    plan = Plan.ddp(topology)
    yield _adapters(), plan, _batch(plan, ROWS[0])


def _alone(plan: Plan, model: nn.Module, x: Tensor) -> Runner:
    return _passes(compile(model, plan, progress=lambda text: None), x)


def _passes(model: nn.Module, x: Tensor) -> Runner:
    """A step is some forwards and backwards without sync, until all ranks have made them; the seconds are of one."""
    _, once_s = _passes_s(model, x, 1), _slowest(_passes_s(model, x, 1))  # the first compiles
    calls = max(1, int(PASSES_S / once_s))

    def step_s() -> float:
        _passes_s(model, x, 1)
        return _passes_s(model, x, calls)

    return Runner(model, 0, step_s)


def _passes_s(model: nn.Module, x: Tensor, calls: int) -> float:
    """Of one of so many forwards and backwards, without sync."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        with model.no_sync():
            model(x).backward()
    dist.barrier()
    return (time.perf_counter() - began) / calls


def _with_factors(topology: Topology, factors: Sequence[float]) -> Topology:
    long, short, of_number, of_launch = factors
    device = slowed(topology.computes, {"products32": long, "products16": short})
    device = replace(device, value_ns=of_number * device.value_ns, launch_us=of_launch * device.launch_us)
    return _with(topology, device)


def _with(topology: Topology, device: Device) -> Topology:
    return topology.with_links(device, **dict(topology.links)).with_flat(dict(topology.flat))


def _plans(topology: Topology) -> Iterator[tuple[Plan, int]]:
    """Those that are legal and in a dtype that is tried, with micro-batches, and no two that are alike, as where a mesh
    has one host."""
    seen = set()
    for make, micro_batches in RUNS:
        try:
            plan = make(topology)
        except Error:  # such as PaRO's on one axis
            continue
        alike = *map(topology.shared_by, plan.default), plan.gather_wire, plan.param_dtype, micro_batches
        if plan.param_dtype in _dtypes(topology) and alike not in seen:
            seen.add(alike)
            yield plan, micro_batches


def _dtypes(topology: Topology) -> tuple[torch.dtype | None, ...]:
    """In which models run. Where products in 16 bits take longer, as on CPUs that have none and emulate them, nobody
    trains in these, and steps that take ten times as long would be most of the trial."""
    return (None, torch.bfloat16) if topology.computes.slower_fp32 > 1.0 else (None,)


class MeanSquare(nn.Module):
    """A loss, in the graph, so that it is foretold as well."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return _with_loss(*(Block(DIM, HEADS) for _ in range(LAYERS)), nn.Linear(DIM, VOCAB, bias=False))


def _deep_model() -> nn.Sequential:
    return _with_loss(*(Block(DIM, HEADS) for _ in range(DEEP)))


def _adapters() -> nn.Sequential:
    """Of values that neither grow nor shrink from one to the next: torch's own would soon be denormal, with which a
    pass took five times as long on an Intel CPU."""
    torch.manual_seed(0)
    ends = (DIM, RANK), (RANK, DIM)
    model = _with_loss(*(nn.Sequential(*(nn.Linear(*it, bias=False) for it in ends)) for _ in range(ADAPTERS)))
    for weight in model.parameters():
        nn.init.kaiming_normal_(weight, nonlinearity="linear")
    return model


def _with_loss(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, MeanSquare())


def _batch(plan: Plan, rows: int) -> Tensor:
    return torch.randn(rows, TOKENS, DIM, dtype=plan.param_dtype)


def _rows(plan: Plan, micro_batches: int) -> int:
    for rows in ROWS:
        found = predicted(trace(_model(), plan, _batch(plan, rows), keep=False), micro_batches)
        if found.compute_us > BUSY * max(found.lanes_us.values()):
            break
    return rows


def _trained(plan: Plan, rows: int, micro_batches: int) -> Runner:
    """The seconds are from when the last rank was through with one step to when it was with the next."""
    model = compile(_model(), plan, progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = _batch(plan, rows)

    def end_s() -> float:
        for i in range(micro_batches):
            with nullcontext() if i == micro_batches - 1 else model.no_sync():
                model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter()

    def step_s() -> float:
        began_s = end_s()  # with the last rank's
        return end_s() - began_s

    step_s()  # compiles
    return Runner(model, micro_batches, step_s)


def _slowest(seconds: float) -> float:
    """What the slowest rank took; the same on all."""
    taken = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _foretold_s(program: Program, micro_batches: int, topology: Topology) -> float:
    """Of the same graphs. Without sync, of the second micro-batch's calls, which add to sums."""
    there = replace(program, plan=replace(program.plan, topology=topology), pace={})
    if micro_batches:
        return predicted(there, micro_batches).step_us / 1e6
    return clocked(there, topology, calls_of(there, 3)[2:4]).now_us / 1e6


def _scaled(topology: Topology, factors: Sequence[float]) -> Topology:
    *overheads, of_quantizing = factors
    device = topology.computes
    tables = {name: of_quantizing for name in device.tables if "quantize" in name}
    links = {axis: with_overheads(link, *overheads) for axis, link in topology.links}
    flat = {axes: with_overheads(link, *overheads) for axes, link in topology.flat}
    return topology.with_links(slowed(device, tables), **links).with_flat(flat)


def with_overheads(link: Link, of_hop: float, of_near_byte: float, of_far_byte: float) -> Link:
    of_byte = of_near_byte if link.near else of_far_byte
    return replace(
        link,
        launch_us=of_hop * link.launch_us,
        gather_us_per_mb=of_byte * link.gather_us_per_mb,
        reduce_us_per_mb=of_byte * link.reduce_us_per_mb,
    )
