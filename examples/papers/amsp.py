"""AMSP (arXiv 2311.00257), and the runs of InternLM-7B that its optimizer sharding comes from.

    python examples/papers/amsp.py

Tokens a second and GPU, and MFU, by simulation; paper, ours, ratio. LLaMA models, sequences of 4096, one a micro-batch,
4M tokens a global batch, on hosts of 8 A800 (`a800` of shardc.links); the 30B model computes its forward again. Fitted:
the devices' efficiency, on AMSP's 7B at 32 GPUs, and the part of the bandwidth between hosts that is reached, on the
same at 1024. All else is predicted. In the paper's runs nothing is computed while updated parameters are spread; so it
is here, where a row says AMSP.

The planner is given the same devices and batches, and chooses among all plans without quantized wires.

InternLM-7B: A100 with 4 x 100 Gb/s a host, sequences of 2048, 2 a micro-batch, 4 micro-batches. Fitted: efficiency, on
"all" at 8 GPUs; bandwidth and the time of a step of a ring, on "all" at 32 and 512.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

from common import Config, Constants, Predictor, Setup, compared, ids, llama, machine, refresh_apart, table
from llama import recomputed

import shardc
from shardc import Plan, Topology

SEQUENCE, GLOBAL = 4096, 4 << 20
MODELS = {
    "7B": Config(4096, 32, 32, 32, 11008, 32000, SEQUENCE),
    "13B": Config(5120, 40, 40, 40, 13824, 32000, SEQUENCE),
    "30B": Config(6144, 60, 48, 48, 16384, 32000, SEQUENCE),
}
FLOP = {"7B": 46.9e9, "13B": 88.1e9, "30B": 182e9}
"""A token, as MFU counts them."""
CHOSEN = {"7B": (1, 1, 8), "13B": (4, 4, 8), "30B": (8, 8, 32)}
MICS = {"7B": 8, "13B": 8, "30B": 16}
REPORTED = {("7B", "AMSP", 32): 4360, ("7B", "AMSP", 128): 4230, ("7B", "AMSP", 512): 3890, ("7B", "AMSP", 1024): 3480}
MFU = {"AMSP": 0.51, "ZeRO-1": 0.36, "MiCS": 0.35, "ZeRO-3": 0.04, "ZeRO++": 0.04}
"""7B at 1024 GPUs; systems on engines of their own."""
A800 = Constants(efficiency=0.72, node=0.6)
GPUS = (8, 32, 128, 512, 1024)
PEAK = 312e12


def setup(name: str) -> Setup:
    model = llama(MODELS[name])
    return Setup(recomputed(model) if name == "30B" else model, (ids(1, SEQUENCE), ids(1, SEQUENCE)))


@cache
def captured(name: str) -> Predictor:
    """For plans on any topology."""
    return setup(name).predictor(machine("a800", 1, A800))


def plans(name: str, topology: Topology) -> dict[str, Plan]:
    p, g, os = (min(factor, topology.world) for factor in CHOSEN[name])
    mics = min(MICS[name], topology.world)
    options = {"param_dtype": setup(name).dtype}
    return {
        "AMSP": Plan.amsp(topology, p, g, os, **options),
        "ZeRO-1": Plan.zero1(topology, **options),
        "MiCS": Plan.amsp(topology, mics, mics, mics, **options),
        "ZeRO-3": Plan.zero3(topology, **options),
        "ZeRO++": Plan.zeropp(topology, **options),
    }


def predicted(name: str, gpus: int) -> dict[str, tuple[float, float]]:
    """(tokens a second and GPU, MFU) of each strategy."""
    topology = machine("a800", gpus // 8, A800)
    micro_batches = max(1, GLOBAL // SEQUENCE // gpus)
    predictor, found = captured(name), {}
    for strategy, plan in plans(name, topology).items():
        it = predictor(plan, micro_batches)
        step_s = (refresh_apart(it) if strategy == "AMSP" else it.step_us) / 1e6
        rate = micro_batches * SEQUENCE / step_s
        found[strategy] = rate, rate * FLOP[name] / PEAK
    return found


def throughput() -> None:
    rows, at_1024 = [], {}
    for name in MODELS:
        for gpus in GPUS:
            for strategy, (rate, mfu) in predicted(name, gpus).items():
                if (name, gpus) == ("7B", 1024):
                    at_1024[strategy] = mfu
                reported = REPORTED.get((name, strategy, gpus))
                fitted = "fitted" if (name, strategy, gpus) in (("7B", "AMSP", 32), ("7B", "AMSP", 1024)) else ""
                rows.append((name, gpus, strategy, *compared(reported, rate), f"{mfu:.1%}", fitted))
    print(table(("model", "GPUs", "strategy", "tokens/s/GPU, paper", "ours", "ratio", "MFU", ""), rows))
    print("\nMFU of 7B at 1024 GPUs; systems on engines of their own, of which a model of one engine knows nothing")
    print(table(("strategy", "paper", "ours", "ratio"), ((s, *compared(MFU[s], at_1024[s], ".1%")) for s in MFU)))
    ours = at_1024["AMSP"] / at_1024["MiCS"]
    print(f"\nAMSP's choice against MiCS's in one engine, 7B: paper 1.30, ours {ours:.2f}, ratio {ours / 1.3:.2f}")


def planner(gpus: int = 1024) -> None:
    print(f"\nThe planner's choice at {gpus} GPUs, 80 GB")
    rows = []
    for name in MODELS:
        topology, micro_batches = machine("a800", gpus // 8, A800), max(1, GLOBAL // SEQUENCE // gpus)
        given = setup(name)
        found = shardc.search(given.model, topology, *given.batch, micro_batches=micro_batches, progress=_say)
        theirs = captured(name)(plans(name, topology)["AMSP"], micro_batches)
        best = found.best
        rows.append(
            (
                name,
                "/".join(map(str, CHOSEN[name])),
                f"{theirs.step_us / 1e6:.3f}",
                f"{theirs.peak_bytes / 2**30:.1f}",
                "/".join(map(str, (best.row.params, best.row.grads, best.row.optim))),
                f"{best.step_us / 1e6:.3f}",
                f"{best.holds_bytes / 2**30:.1f}",
                f"{theirs.step_us / best.step_us:.3f}",
            )
        )
    head = ("model", "AMSP P/G/OS", "step s", "GiB", "ours P/G/OS", "step s", "GiB", "AMSP's / ours")
    print(table(head, rows))


INTERNLM = Config(4096, 32, 32, 32, 11008, 103168, 2048)
OPTIMIZER = {
    "all": {8: 4062, 32: 3752, 128: 3571, 512: 2861},
    "gpu": {8: 4078, 32: 3919, 128: 3928, 512: 3835},
}
A100 = Constants(efficiency=0.66, node=0.6)
LATENCY_US = 30.0


def internlm() -> None:
    given = Setup(llama(INTERNLM), (ids(2, 2048), ids(2, 2048)))
    rows, predictor = [], given.predictor(machine("dgx-a100", 1, A100))
    for gpus in (8, 32, 128, 512):
        shape = machine("dgx-a100", gpus // 8, A100, node=6.25)
        node = replace(shape.link("node"), latency_us=LATENCY_US)
        topology = shape.with_links(shape.computes, node=node, gpu=shape.link("gpu"))
        for rung, reported in OPTIMIZER.items():
            it = predictor(Plan(topology, optim=rung, param_dtype=given.dtype), 4)
            fitted = "fitted" if (rung, gpus) in (("all", 8), ("all", 32), ("all", 512)) else ""
            rows.append((rung, gpus, *compared(reported[gpus], 4 * 2 * 2048 / (it.step_us / 1e6)), fitted))
    print("\nInternLM-7B, optimizer over all ranks or inside each node")
    print(table(("optim", "GPUs", "tokens/s/GPU, paper", "ours", "ratio", ""), rows))


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    throughput()
    planner()
    internlm()
