"""What one job of `wire.py` does, in a process of its own or in one process a rank: it trains, trains several rows in
turns, measures links, searches for a plan, or trains in one process to have losses to compare with.

A step is a forward and a backward of each micro-batch and the optimizer's update; steps follow each other without a
barrier, so that what is put off to the next step is counted there. Python's garbage collector is off between them. Peak
memory is taken in two more steps: what the C library's allocator gives out beyond what lives between steps, and that.

Machines get slower and faster within minutes. So steps are timed in blocks, and before each and after the last all
ranks go forwards and backwards through the model of the benchmark, without communication; how long that took goes with
the result. A block begins with a step that does not count: what the one before it put off was done when these pieces
were. Of rows of shardc the step is foretold twice: by what `calibrate` has measured, and as if all compute took as many
times as long as these pieces do, compared with those that were made while it measured.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocator import grown
from memory import storages
from torch import nn
from wire_rows import CONFIG, FORMATS, ROWS, System, Task, built, parameters_of

import shardc
from passes import ops
from passes.order import Orders
from shardc.cost import crossing, step_bytes
from shardc.gauge import slowed
from shardc.heap import keep_freed
from shardc.near import held_bytes, is_shared
from shardc.predict import predicted
from shardc.program import Program, Variant
from shardc.trial import ROUNDS, with_overheads

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Of the host that the process is in."""
TOKENS = 256
"""that texts are made of, of a larger vocabulary: that is what is learned first"""
LEARNING_RATE = 1e-3
PEAK_STEPS = 2
PIECES = 8
"""forwards and backwards, of which the median counts"""
BLOCKS = 4
"""of steps"""
TURNS = 8
"""of rows that take turns, each of as many steps as a block has"""

Result = dict[str, Any]


def work(task: Task, out: Path) -> None:
    """The result of a task, written by the first rank."""
    torch.set_num_threads(1)
    keep_freed()  # for baselines, too
    result = _job(task.row)(task)
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _job(row: str) -> Callable[[Task], Result]:
    if row in ROWS:
        return measured
    of_others = {"calibrate": calibrated, "search": searched, "one-process": in_one_process, "turns": in_turns}
    return of_others[row.split("/")[0]]


def piece_us(model: nn.Module) -> float:
    """Of a forward and backward of a model without communication, by all ranks at once, on their average."""
    given = batch(0, 0, 0)

    def taken_s() -> float:
        dist.barrier()
        began = time.perf_counter()
        model(*given).backward()
        return time.perf_counter() - began

    taken_s()
    return statistics.median(mean([torch.tensor(taken_s()) for _ in range(PIECES)])) * 1e6


def calibrated(task: Task) -> Result:
    """With a piece of compute before it and before each other round of its trial, which goes on for minutes."""
    dist.init_process_group("gloo")
    pieces_us = [piece_us(built())]

    def say(text: str) -> None:
        if "round" in text:
            pieces_us.append(piece_us(built()))

    topology = shardc.calibrate(task.shape, progress=say)
    assert len(pieces_us) == ROUNDS
    return {"piece_us": statistics.mean(pieces_us), "pieces_us": pieces_us, "topology": topology.to_dict()}


def searched(task: Task) -> Result:
    """`search/-bf16`: for the planner's row of that suffix."""
    suffix = task.row.split("/")[1]
    row = ROWS[f"planner{suffix}"]
    options = FORMATS["" if row.lora else suffix].search
    with torch.device("meta"):
        model = built(row)
        ids = torch.zeros(1, CONFIG.context, dtype=torch.long)
    found = shardc.search(model, task.shape, ids, ids, memory=task.memory, micro_batches=task.micro_batches, **options)
    return {"plan": found.plan.to_json(), "foretold_s": found.best.step_us / 1e6, "table": str(found)}


def in_one_process(task: Task) -> Result:
    """Losses, where each micro-batch of each rank is a micro-batch. `one-process/alone-lora`: of that row's model."""
    model = built(ROWS[task.row.split("/")[1]])
    optimizer = adamw(model)
    losses = []
    for step in range(task.warmup + task.steps):
        total = 0.0
        for rank in range(task.world):
            for micro in range(task.micro_batches):
                loss = model(*batch(step, micro, rank)) / (task.world * task.micro_batches)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses}


def batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence and what follows each of its tokens."""
    generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * micro + rank)
    text = torch.randint(TOKENS, (1, CONFIG.context + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, fused=True)


class Loop:
    """Trains, and writes down losses and when parts of steps were over."""

    def __init__(self, task: Task, system: System):
        self.task, self.system = task, system
        self.optimizer = adamw(system.model)
        self.losses: list[torch.Tensor] = []
        self.accumulated_s: list[float] = []
        self.updated_s: list[float] = []

    def step(self) -> None:
        self.accumulate()
        self.accumulated_s.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updated_s.append(time.perf_counter())

    def accumulate(self) -> None:
        total, count = torch.zeros(()), self.task.micro_batches
        for micro in range(count):
            self.system.begin(micro == count - 1)
            loss = self.system.model(*batch(len(self.losses), micro, dist.get_rank())) / count
            loss.backward()
            total += loss.detach()
        self.system.settle()
        self.losses.append(total)

    def begin(self) -> None:
        """Forgets the times of steps before; the next one begins now."""
        self.accumulated_s, self.updated_s = [], [time.perf_counter()]

    def took_s(self) -> dict[str, list[float]]:
        """Of all steps: from when the last rank was through with one to when the last was through with the next. (All
        have the same clock, that of the machine.)"""
        ends, middles = slowest(self.updated_s), slowest(self.accumulated_s)
        return {
            "steps_s": [end - begin for begin, end in pairwise(ends)],
            "accumulate_s": [middle - begin for begin, middle in zip(ends, middles, strict=False)],
            "update_s": [end - middle for middle, end in zip(middles, ends[1:], strict=True)],
        }


def measured(task: Task) -> Result:
    """Of one row."""
    dist.init_process_group("gloo")
    parameters = parameters_of(built(ROWS[task.row]))
    began = time.perf_counter()
    loop = warm(task)
    system = loop.system
    result: Result = {"ready_s": time.perf_counter() - began, **timed(loop)}
    result["losses"] = mean(loop.losses[: task.warmup + task.steps])
    result |= {"peak_bytes": slowest([float(peak_bytes(loop))])[0], "shared_by": system.shared_by}
    result |= paced(task, result["pieces_us"])
    if system.plan and dist.get_rank() == 0:
        result |= foretold(task, system, parameters, result["pace"])
    return result


def in_turns(task: Task) -> Result:
    """Of several rows: what steps took, a few of one after a few of the other, and the other way round in every second
    turn, so that a machine that gets slower does so for all of them."""
    dist.init_process_group("gloo")
    model = built()
    loops = [warm(Task(**each)) for each in task.turns]
    steps_s: dict[str, list[float]] = defaultdict(list)
    pieces_us = []
    with no_gc():
        for turn in range(TURNS):
            pieces_us.append(piece_us(model))
            for loop in loops if turn % 2 == 0 else reversed(loops):
                steps_s[loop.task.row] += block(loop, max(1, task.steps // BLOCKS))["steps_s"]
    result: Result = {"turns_s": steps_s, "pieces_us": pieces_us, **paced(task, pieces_us)}
    if task.piece_us and dist.get_rank() == 0:
        result["foretold_at_pace_s"] = {
            loop.task.row: predicted_s(planned(loop.system), task.micro_batches, result["pace"])[1]
            for loop in loops
            if loop.system.plan
        }
    return result


def paced(task: Task, pieces_us: list[float]) -> Result:
    """How many times as long as while links were calibrated, if they were."""
    return {"pace": statistics.mean(pieces_us) / task.piece_us} if task.piece_us else {}


def warm(task: Task) -> Loop:
    """Compiled, and behind its first steps."""
    loop = Loop(task, ROWS[task.row].make(task))
    for _ in range(task.warmup):
        loop.step()
    return loop


def block(loop: Loop, steps: int) -> dict[str, list[float]]:
    """What steps took, behind one that does not count."""
    loop.step()
    loop.begin()
    for _ in range(steps):
        loop.step()
    return loop.took_s()


def timed(loop: Loop) -> Result:
    """What steps took, and sent, and what pieces of compute took between them."""
    taken: dict[str, list[float]] = defaultdict(list)
    pieces_us = []
    with no_gc():
        before = sent_bytes()
        for numbers in torch.arange(loop.task.steps).chunk(BLOCKS):
            pieces_us.append(piece_us(built()))
            for part, seconds in block(loop, len(numbers)).items():
                taken[part] += seconds
        sent = sent_bytes() - before
        steps = loop.task.steps + len(pieces_us)
        return {**taken, "sent_bytes": sent / steps, "pieces_us": [*pieces_us, piece_us(built())]}


def sent_bytes() -> int:
    """By this host so far, when no rank has anything left to send."""
    dist.barrier()
    found = int(SENT.read_text())
    dist.barrier()
    return found


@contextmanager
def no_gc() -> Iterator[None]:
    """Collections take long, and come when they like."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def slowest(values: list[float]) -> list[float]:
    """The largest of all ranks, one by one."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def mean(losses: list[torch.Tensor]) -> list[float]:
    """Over all ranks."""
    found = torch.stack(losses).double()
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def peak_bytes(loop: Loop) -> int:
    """The most of a few steps on this rank, with the tensors that live between them (DDP's buckets are such, too) and
    this rank's share of the memory that ranks have in common."""
    own = (x for x in tensors() if not is_shared(x))
    return max(grown(loop.step) for _ in range(PEAK_STEPS)) + storages(own) + held_bytes()


def tensors() -> Iterator[torch.Tensor]:
    """All that live, without those that only stand for others (fake ones, DTensors, and on the meta device)."""
    gc.collect()
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type != "meta":
            yield found


def foretold(task: Task, system: System, parameters: dict[str, Any], pace: float) -> Result:
    """What closed forms, the simulation and its bound say of the first program, on one rank.

    The step is foretold as the planner would: from the links and the device that were measured, not from regions. And
    once more, of the same graphs, at the pace of now.
    """
    assert system.plan
    program = planned(system)
    foretold_s, at_pace_s = predicted_s(program, task.micro_batches, pace)
    simulated = shardc.simulate(program, micro_batches=task.micro_batches)
    moved = step_bytes(system.plan, parameters, task.micro_batches, regathered=regathered(program))
    sent = crossing(moved, system.plan.topology)
    node_bytes = sum(sent[axis] for axis in sent if "node" in system.plan.topology.lanes(axis))
    return {
        "closed_bytes": node_bytes * task.processes,
        "foretold_s": foretold_s,
        "foretold_at_pace_s": at_pace_s,
        "foretold_peak_bytes": simulated.peak_bytes,
        "bound_s": simulated.bound.us / 1e6,
        "bound_by": simulated.bound.by,
        "plan": str(system.plan),
    }


def planned(system: System) -> Program:
    """The first program, with no graphs yet."""
    return replace(shardc.programs(system.model)[0], made={}, orders=Orders())


def predicted_s(program: Program, micro_batches: int, pace: float) -> tuple[float, float]:
    """Of a step: as the planner foretells it, and of the same graphs, where all compute takes so many times as long."""
    unmeasured = replace(program, pace={})
    now = replace(unmeasured, plan=replace(program.plan, topology=at_pace(program.topology, pace)))
    before_s, now_s = (predicted(each, micro_batches).step_us / 1e6 for each in (unmeasured, now))
    return before_s, now_s


def at_pace(topology: shardc.Topology, pace: float) -> shardc.Topology:
    """Where all that computes takes so many times as long, and what moves takes as long as before."""
    device = slowed(topology.computes, dict.fromkeys(topology.computes.tables, pace))
    device = replace(device, launch_us=device.launch_us * pace, value_ns=device.value_ns * pace)
    links, flat = (
        {axis: with_overheads(link, pace, pace, pace) for axis, link in known}
        for known in (topology.links, topology.flat)
    )
    return topology.with_links(device, **links).with_flat(flat)


def regathered(program: Program) -> set[str]:
    """Parameters that the backward needs in full."""
    if program.halves[1] is None:
        return set()
    return {name for hop in ops.hops(program.draft(Variant("backward")), "gather") for name in ops.hop(hop).params}
