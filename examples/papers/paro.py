"""PaRO (arXiv 2310.06003): its 14 strategies in order, and HO-Ring.

    python examples/papers/paro.py

The paper gives no numbers by strategy, so the order here is a prediction: LLaMA 7B and 65B, sequences of 2048, one a
micro-batch, 8 micro-batches, on 4 and 16 hosts of 8 A100 80GB with 100 Gb/s each (12.5 GB/s for 8 GPUs). Full training;
partial (the last quarter of the layers); parameter-efficient (adapters of rank 64 beside every matrix, about 3%).
The 65B model computes its blocks again in the backward. Strategies that do not fit say by how much. Constants are those
of the presets, with 0.7 of the devices' peak; nothing is fitted.

HO-Ring: an all-gather of one bucket by chained hops in pieces, hops between hosts beside those inside a host, against
one flat ring over all ranks. Reported: +36.5% of effective bandwidth, for a bucket whose size is not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Literal

import torch
from common import Config, Constants, Setup, ids, llama, machine, table
from llama import Llama, adapted, recomputed
from torch import nn

import shardc
from shardc import Plan, Topology
from shardc.plan import PARO

SEQUENCE, MICRO_BATCHES = 2048, 8
MODELS = {
    "7B": Config(4096, 32, 32, 32, 11008, 32000, SEQUENCE),
    "65B": Config(8192, 80, 64, 64, 22016, 32000, SEQUENCE),
}
CLUSTER = Constants(efficiency=0.7, node=1.0)
NODE = 12.5 / 8
"""GB/s of each of 8 ranks between hosts."""
HOSTS = {"7B": 4, "65B": 16}
RECOMPUTED = {"65B"}
RANK = 64


def full(model: Llama) -> nn.Module:
    return model


def partial(model: Llama) -> nn.Module:
    layers = model.layers
    model.requires_grad_(False)
    for layer in layers[3 * len(layers) // 4 :]:
        layer.requires_grad_(True)
    return model


def efficient(model: Llama) -> nn.Module:
    with torch.device("meta"):
        return adapted(model, RANK)


def ranked(name: str, topology: Topology, trained: Callable[[Llama], nn.Module]) -> list[tuple[object, ...]]:
    model = llama(MODELS[name])
    model = trained(recomputed(model) if name in RECOMPUTED else model)
    predictor = Setup(model, (ids(1, SEQUENCE), ids(1, SEQUENCE))).predictor(topology)
    limit = int(topology.computes.memory_gb * 1e9)
    found = {
        letters: predictor(Plan.paro(topology, letters, param_dtype=torch.bfloat16), MICRO_BATCHES, memory_bytes=limit)
        for letters in PARO
    }
    order = sorted(found.items(), key=lambda item: (item[1].peak_bytes > limit, item[1].step_us))
    best_us = order[0][1].step_us
    rows = []
    for letters, it in order:
        over = it.peak_bytes - limit
        waits = sum(it.exposed_us.values()) / it.step_us
        rows.append(
            (
                letters,
                f"{MICRO_BATCHES * SEQUENCE / it.step_us * 1e6:.0f}",
                f"{best_us / it.step_us:.2f}",
                f"{waits:.0%}",
                f"{it.peak_bytes / 2**30:.1f}",
                f"{over / 2**30:.1f} GiB too many" if over > 0 else "",
            )
        )
    return rows


def ho_ring() -> None:
    print("\nHO-Ring: an all-gather over 8 hosts of 8, by simulation; paper +36.5%")
    topology, rows = machine("dgx-a100", 8, CLUSTER, node=NODE), []
    for mib in (1, 8, 64, 512):
        flat_us, hops_us = (gather_us(topology, mib, chain) for chain in ("flat", "hop"))
        rows.append((f"{mib} MiB", f"{flat_us:.0f}", f"{hops_us:.0f}", f"{flat_us / hops_us - 1:+.1%}"))
    print(table(("bucket", "flat us", "hops us", "bandwidth"), rows))


def gather_us(topology: Topology, mib: int, chain: Literal["flat", "hop"]) -> float:
    """Until one bfloat16 weight has arrived, where nothing else is done."""
    with torch.device("meta"):
        layer, x = nn.Linear(1024, mib * 512, bias=False), torch.zeros(1, 1024)
    plan = Plan.zero3(topology, chain=chain, param_dtype=torch.bfloat16)
    with torch.no_grad():
        return shardc.simulate(shardc.trace(layer, plan, x, keep=False)).exposed_us


def main() -> None:
    for (name, hosts), trained in product(HOSTS.items(), (full, partial, efficient)):
        topology = machine("dgx-a100", hosts, CLUSTER, node=NODE)
        print(f"\n{name}, {trained.__name__} training, {hosts} hosts of 8 (a prediction)", flush=True)
        print(table(("P G O", "tokens/s/GPU", "of the best", "waits", "GiB", ""), ranked(name, topology, trained)))
    ho_ring()


if __name__ == "__main__":
    main()
