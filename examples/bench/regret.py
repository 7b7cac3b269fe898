"""Regret: how much faster than the plan that the search chose the fastest plan is, when all are run.

    python examples/bench/regret.py                      # 20 configurations, a few minutes each

Each configuration is a mesh, links, a memory limit and a number of micro-batches. The search is told the links, and a
device whose efficiency is set so that a step without communication takes as long as it is measured to, and what issuing
a collective takes of it as `shardc.calibrate` measures it. Then the plan that it chose, the next that it ranked, and
the strategies that people know run side by side on emulated links (`shardc.emulate`), each in a process of its own, a
step of one after a step of the other; medians. All are given the limit; plans that cannot keep it do not run, and of
those that make the same moves (their foretold step is the same) one does. The fastest is the one with the least median
of every second round; regret is (chosen - fastest) / fastest in the other rounds, so that the luck of the fastest of
many equal ones is not counted. It can be below zero.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.pool
import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from llama import Config, Llama

import shardc
from shardc.calibrate import launch_us
from shardc.emulate import emulate
from shardc.links import Device, Link
from shardc.predict import Predictor, predicted
from shardc.search import Candidate

CONFIG = Config(dim=256, layers=4, heads=4, kv_heads=4, hidden=688, vocab=2048, context=128)
ROWS = 2
DEVICE = Device("a CPU core", 0.13, 30.0, 16.0)
NEXT = 3
"""Plans that are run besides the chosen one, as the search ranks them."""
ROUNDS = 30
"""A step of every plan in each."""
KNOWN = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")
MESHES = ((2, 4), (8, 8))
RATIOS = (1.0, 0.5, 2.0)
"""Time of ZeRO-3's busiest lane to that of compute."""
ROOM = (1.2, 4.0)
"""Memory, as a multiple of what ZeRO-3 needs."""
BATCHES = (1, 4)
CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Task:
    """A plan, and how often its model is called in a step."""

    plan: shardc.Plan
    micro_batches: int


class Host:
    """A process that trains under one plan."""

    def __init__(self, task: Task):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()

    def step_s(self) -> float:
        self.pipe.send(True)
        return self.pipe.recv()

    def end(self) -> None:
        self.pipe.send(False)
        self.process.join()


def made() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randint(CONFIG.vocab, (2, ROWS, CONFIG.context)))


def serve(pipe: Any, task: Task) -> None:
    torch.set_num_threads(1)
    with emulate(task.plan.topology):
        model = shardc.compile(made(), task.plan, progress=lambda text: None)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        inputs = batch()
        for _ in range(2):
            step_s(model, optimizer, inputs, task.micro_batches)
        while pipe.recv():
            pipe.send(step_s(model, optimizer, inputs, task.micro_batches))


def step_s(model: Any, optimizer: Any, inputs: Any, micro_batches: int) -> float:
    optimizer.zero_grad()
    began = time.perf_counter()
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        model(*inputs).backward()
    optimizer.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=20, help="the first so many of 20")
    parser.add_argument("--first", type=int, default=0, help="but not the first so many of these; for a run in parts")
    options = parser.parse_args()
    cases = list(product(RATIOS, MESHES, ROOM, BATCHES))[options.first : options.configurations]
    if not cases:
        parser.error(f"--first {options.first} leaves out all of --configurations {options.configurations}")
    device, launch = fitted_device(), launched_us()
    print(
        f"torch {torch.__version__}, cpu, {CONFIG}, {ROWS} rows; {device.efficiency:.2f} of {device.tflops} TFLOP/s, "
        f"{launch:.0f} us to issue a collective\n"
    )
    print("| mesh | comm / compute | memory MiB | micro-batches | chosen | ms | foretold | fastest | ms | regret |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    links = {"node": Link(1.0, 1.0), "gpu": Link(1.0, 1.0)}
    base = shardc.Plan.zero3(shardc.Topology(node=2, gpu=4).with_links(device, **links))
    predictor = Predictor(made(), base, *batch())
    regrets = []
    for ratio, mesh, room, micro_batches in cases:
        regrets.append(compare(device, launch, mesh, ratio, room, micro_batches, predictor))
    print(f"\nworst {max(regrets):.1%}, median {statistics.median(regrets):.1%}")


def fitted_device() -> Device:
    """With the efficiency at which a step of one process is foretold as it is."""
    alone = shardc.Topology(rank=1).with_links(DEVICE, rank=Link(1.0, 0.0))
    host = Host(Task(shardc.Plan.ddp(alone), 1))
    measured_s = statistics.median(host.step_s() for _ in range(15))
    host.end()
    program = shardc.trace(made(), shardc.Plan.ddp(alone), *batch(), keep=False)
    foretold_s = predicted(program, 1).step_us / 1e6
    return replace(DEVICE, efficiency=DEVICE.efficiency * foretold_s / measured_s)


def launched_us() -> float:
    """What a collective takes of compute, as it is measured where it is emulated."""
    with multiprocessing.pool.Pool(1, context=CONTEXT) as pool:
        return pool.apply(_launched_us)


def _launched_us() -> float:
    torch.set_num_threads(1)
    with emulate(shardc.Topology(node=2, gpu=4).with_links(DEVICE, node=Link(1.0, 1.0), gpu=Link(1.0, 1.0))):
        return statistics.median(launch_us(dist.group.WORLD) for _ in range(9))


def linked(device: Device, launch: float, mesh: tuple[int, int], ratio: float, predictor: Predictor) -> shardc.Topology:
    """Links with which ZeRO-3's busiest lane has `ratio` times as much to do as compute."""

    def with_rate(rate: float) -> shardc.Topology:
        links = {"node": Link(rate, 20.0, launch_us=launch), "gpu": Link(9.0 * rate, 5.0, launch_us=launch)}
        return shardc.Topology(node=mesh[0], gpu=mesh[1]).with_links(device, **links)

    found = predictor(shardc.Plan.zero3(with_rate(1.0)))
    return with_rate(max(found.lanes_us.values()) / (ratio * found.compute_us))


def compare(
    device: Device,
    launch: float,
    mesh: tuple[int, int],
    ratio: float,
    room: float,
    micro_batches: int,
    predictor: Predictor,
) -> float:
    topology = linked(device, launch, mesh, ratio, predictor)
    limit = int(room * predictor(shardc.Plan.zero3(topology)).peak_bytes)
    options: dict[str, Any] = {"memory": limit, "micro_batches": micro_batches, "param_dtype": None}
    found = shardc.search(made(), topology, *batch(), progress=lambda text: None, **options)
    fit = {named(c): c.prediction for c in found.ranked if c.prediction and c.holds_bytes <= limit}
    tried = dict(list(fit.items())[: NEXT + 1])
    chosen = next(iter(tried))
    for name in KNOWN:
        plan = getattr(shardc.Plan, name)(topology, memory_limit=limit)
        known = predictor(plan, micro_batches, memory_bytes=limit)
        if known.peak_bytes <= limit and known.step_us not in [it.step_us for it in tried.values()]:
            tried[name] = known
    choice, verdict = side_by_side({name: it.plan for name, it in tried.items()}, micro_batches)
    fastest = min(choice, key=choice.__getitem__)
    regret = verdict[chosen] / verdict[fastest] - 1
    ms = [f"{it:.0f}" for it in (verdict[chosen], found.best.step_us / 1e3, verdict[fastest])]
    cells = " | ".join((chosen, ms[0], ms[1], fastest, ms[2], f"{regret:.1%}"))
    print(f"| {mesh[0]} x {mesh[1]} | {ratio} | {limit / 2**20:.0f} | {micro_batches} | {cells} |", flush=True)
    for name, it in tried.items():
        say(f"{name:>12} {choice[name]:7.1f} {verdict[name]:7.1f} ms, foretold {it.step_us / 1e3:.1f}")
    return regret


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def named(candidate: Candidate) -> str:
    return "/".join(map(str, candidate.row)) + "+" * bool(candidate.plan.overrides)


def side_by_side(plans: dict[str, shardc.Plan], micro_batches: int) -> list[dict[str, float]]:
    """Medians of every second round, and of the others; milliseconds."""
    hosts = {name: Host(Task(plan, micro_batches)) for name, plan in plans.items()}
    taken: dict[str, list[float]] = {name: [] for name in hosts}
    for _ in range(ROUNDS):
        for name, host in hosts.items():
            taken[name].append(host.step_s() * 1e3)
    for host in hosts.values():
        host.end()
    return [{name: statistics.median(ms[half::2]) for name, ms in taken.items()} for half in (0, 1)]


if __name__ == "__main__":
    main()
