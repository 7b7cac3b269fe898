"""PaRO (arXiv 2310.06003): its 14 strategies in order, and HO-Ring.

    python examples/papers/paro.py

The paper gives no numbers by strategy, so the order here is a prediction: LLaMA 7B and 65B, sequences of 2048, one a
micro-batch, 8 micro-batches, on 4 and 16 hosts of 8 A100 80GB with 100 Gb/s each (12.5 GB/s for 8 GPUs). Full training;
partial (the last quarter of the layers); parameter-efficient (adapters of rank 64 beside every matrix, about 3%).
Strategies that do not fit say by how much. Constants are those of the presets; nothing is fitted.

HO-Ring: the time of an all-gather of one bucket by chained hops in pieces, inter-node hops beside those inside a node,
against one flat ring over all ranks. Reported: +36.5% of effective bandwidth, for a bucket whose size is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from common import Config, Constants, Setup, ids, llama, machine, table
from llama import Llama, adapted
from torch import nn

from shardc import Plan, Topology
from shardc.plan import PARO
from shardc.times import collective_us

SEQUENCE, MICRO_BATCHES = 2048, 8
MODELS = {
    "7B": Config(4096, 32, 32, 32, 11008, 32000, SEQUENCE),
    "65B": Config(8192, 80, 64, 64, 22016, 32000, SEQUENCE),
}
CLUSTER = Constants(efficiency=0.7, node=1.0)
HOSTS = {"7B": 4, "65B": 16}
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
    model = trained(llama(MODELS[name]))
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
    print("\nHO-Ring: an all-gather over 8 hosts of 8, by simulation of its links; paper +36.5%")
    topology, rows = machine("dgx-a100", 8, CLUSTER, node=12.5 / 8), []
    for full_mb in (1, 8, 64, 512):
        full_bytes = full_mb << 20
        flat_us = collective_us(topology, "all_gather", "gpu+node", full_bytes * 63 / 64, 64)
        hops_us = min(_overlapped_us(topology, full_bytes, pieces) for pieces in (1, 2, 4))
        rows.append((f"{full_mb} MiB", f"{flat_us:.0f}", f"{hops_us:.0f}", f"{flat_us / hops_us - 1:+.1%}"))
    print(table(("bucket", "flat us", "hops us", "bandwidth"), rows))


def _overlapped_us(topology: Topology, full_bytes: int, pieces: int) -> float:
    """Two lanes: the hop over hosts of one piece beside the hop inside a host of the piece before."""
    outer = collective_us(topology, "all_gather", "node", full_bytes / pieces / 8 * 7 / 8, 8)
    inner = collective_us(topology, "all_gather", "gpu", full_bytes / pieces * 7 / 8, 8)
    return outer + (pieces - 1) * max(outer, inner) + inner


if __name__ == "__main__":
    for name, hosts in HOSTS.items():
        topology = machine("dgx-a100", hosts, CLUSTER, node=12.5 / 8)
        for trained in (full, partial, efficient):
            print(f"\n{name}, {trained.__name__} training, {hosts} hosts of 8 (a prediction)", flush=True)
            head = ("P G O", "tokens/s/GPU", "of the best", "waits", "GiB", "")
            print(table(head, ranked(name, topology, trained)), flush=True)
    ho_ring()
    sys.exit()
