"""AMSP (arXiv 2311.00257): 7B, 13B and 30B on 8 to 1024 A800, and what the planner chooses there.

    python examples/papers/amsp.py

Tokens a second and GPU, MFU and peak memory, by simulation; paper, ours, ratio. LLaMA models, sequences of 4096, one a
micro-batch, 4M tokens a global batch, on hosts of 8 A800 (`a800` of shardc.links); the 30B model computes its forward
again. Fitted: the devices' efficiency, on AMSP's 7B at 32 GPUs, and the part of the bandwidth between hosts that is
reached, on the same at 1024. All else is predicted. In the paper's runs nothing is computed while updated parameters
are spread; so it is here, where a row says AMSP.

The planner is given the same devices and batches, and chooses among all plans without quantized wires.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import product

from common import Config, Constants, Setup, compared, ids, llama, machine, refresh_apart, table
from llama import recomputed

import shardc
from shardc import Plan, Topology
from shardc.predict import Prediction, Predictor
from shardc.search import Candidate, Found

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
FITTED = {("7B", "AMSP", 32), ("7B", "AMSP", 1024)}
A800 = Constants(efficiency=0.813, node=0.348)
GPUS = (8, 32, 128, 512, 1024)
PEAK, MEMORY = 312e12, 80 * 10**9
"""Of a device: FLOP a second, bytes."""


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


def predicted(name: str, gpus: int) -> dict[str, Prediction]:
    """A step of each strategy, with what is gathered ahead bounded by the devices' memory."""
    return {
        strategy: captured(name)(plan, micro_batches_of(gpus), memory_bytes=MEMORY)
        for strategy, plan in plans(name, machine("a800", gpus // 8, A800)).items()
    }


def micro_batches_of(gpus: int) -> int:
    return max(1, GLOBAL // SEQUENCE // gpus)


def rate_of(gpus: int, us: float) -> float:
    """Tokens a second and GPU of a step."""
    return micro_batches_of(gpus) * SEQUENCE / us * 1e6


def without_overlap_us(it: Prediction) -> float:
    return it.compute_us + it.update_us + sum(it.moves_us.values())


def step_us(strategy: str, it: Prediction) -> float:
    return refresh_apart(it) if strategy == "AMSP" else it.step_us


def throughput() -> None:
    rows: list[tuple[object, ...]] = []
    at_1024: dict[str, Prediction] = {}
    for name, gpus in product(MODELS, GPUS):
        for strategy, it in predicted(name, gpus).items():
            rate = rate_of(gpus, step_us(strategy, it))
            mfu = rate * FLOP[name] / PEAK
            if (name, gpus) == ("7B", 1024):
                at_1024[strategy] = it
            fits = "" if it.peak_bytes <= MEMORY else "too large"
            cells = compared(REPORTED.get((name, strategy, gpus)), rate)
            fitted = "fitted" if (name, strategy, gpus) in FITTED else ""
            rows.append((name, gpus, strategy, *cells, f"{mfu:.1%}", f"{it.peak_bytes / 1e9:.0f}", fitted or fits))
        _say(f"{name} on {gpus} GPUs")
    print(table(("model", "GPUs", "strategy", "tokens/s/GPU, paper", "ours", "ratio", "MFU", "GB", ""), rows))
    print("\nMFU of 7B at 1024 GPUs; systems on engines of their own, of which a model of one engine knows nothing")
    ours = {name: rate_of(1024, step_us(name, it)) * FLOP["7B"] / PEAK for name, it in at_1024.items()}
    print(table(("strategy", "paper", "ours", "ratio"), ((s, *compared(MFU[s], ours[s], ".1%")) for s in MFU)))
    print("\nAMSP's choice against MiCS's in one engine, 7B at 1024 GPUs")
    amsp, mics = at_1024["AMSP"], at_1024["MiCS"]
    ratios = {
        "updated parameters spread alone": mics.step_us / refresh_apart(amsp),
        "all that can overlap does": mics.step_us / amsp.step_us,
        "nothing overlaps, as in AMSP's objective": without_overlap_us(mics) / without_overlap_us(amsp),
    }
    print(table(("", "paper", "ours", "ratio"), ((how, *compared(1.3, it, ".2f")) for how, it in ratios.items())))


def planner(gpus: int = 1024) -> None:
    """AMSP's choice among the plans that the search ranks, both with updated parameters spread during the forward."""
    print(f"\nThe planner's choice at {gpus} GPUs, 80 GB")
    rows = []
    for name in MODELS:
        topology, given = machine("a800", gpus // 8, A800), setup(name)
        found = shardc.search(given.model, topology, *given.batch, micro_batches=micro_batches_of(gpus), progress=_say)
        theirs = next(c for c in found.ranked if c.row[:1] + c.row[2:] == CHOSEN[name] and c.row[1] == c.row[0])
        if not theirs.prediction:
            theirs.prediction = predicted(name, gpus)["AMSP"]
        rows += [(name, who, *_cells(found, it)) for who, it in (("AMSP", theirs), ("search", found.best))]
    print(table(("model", "chosen by", "params/after forward/grads/optim", "step s", "GB", "why not"), rows))


def _cells(found: Found, it: Candidate) -> tuple[str, ...]:
    by_layer = ", by layer" if it.plan.overrides else ""
    spelled = "/".join(map(str, it.row)) + by_layer
    return spelled, f"{it.step_us / 1e6:.3f}", f"{it.holds_bytes / 1e9:.0f}", found.why(it)


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    throughput()
    planner()
