"""ZeRO++ (arXiv 2306.10209): 18B and 138B on 384 V100, against ZeRO-3.

    python examples/papers/zeropp.py

GPT models on 24 hosts of 16 V100 with 400 Gb/s each (`dgx2-400g` of shardc.links), 1k tokens a GPU, float16, blocks
computed again in the backward, within the devices' 32 GB. Reported, TFLOP/s a GPU: 18B from 25 to 35, 138B from 23 to
36. Fitted: the part of the bandwidth between hosts that is reached, on ZeRO-3 with 18B, and the devices' efficiency, on
ZeRO++ with 18B. The rows of 138B are predicted.
"""

from __future__ import annotations

import torch
from common import Constants, Setup, compared, gpt, ids, machine, table
from torch.utils.checkpoint import checkpoint

from shardc import Plan
from shardc.look import Layer

TOKENS = 1024
V100 = Constants(efficiency=0.355, node=0.365)
MODELS = {"18B": (43, 6144, 48), "138B": (75, 12288, 96)}
"""Layers, width, heads: shapes of that size, for the paper's are not known."""
REPORTED = {("18B", "ZeRO-3"): 25, ("18B", "ZeRO++"): 35, ("138B", "ZeRO-3"): 23, ("138B", "ZeRO++"): 36}
FITTED = {("18B", "ZeRO-3"), ("18B", "ZeRO++")}


class Checkpointed(Layer):
    """A layer that computes its forward again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def main() -> None:
    topology, rows = machine("dgx2-400g", 24, V100), []
    limit = int(topology.computes.memory_gb * 1e9)
    for name, (layers, dim, heads) in MODELS.items():
        model = gpt(layers, dim, heads)
        for layer in model.layers:
            layer.__class__ = Checkpointed
        given = Setup(model, (ids(1, TOKENS),), torch.float16)
        predictor = given.predictor(topology)
        billions = sum(p.numel() for p in model.parameters()) / 1e9
        rates = {}
        for strategy, make in (("ZeRO-3", Plan.zero3), ("ZeRO++", Plan.zeropp)):
            it = predictor(make(topology, param_dtype=given.dtype), memory_bytes=limit)
            # The usual count: forward, backward and forward again, 2 operations a parameter and token each.
            rates[strategy] = 8e3 * billions * TOKENS / it.step_us
            fitted = "fitted" if (name, strategy) in FITTED else ""
            cells = compared(REPORTED[name, strategy], rates[strategy], ".1f")
            rows.append((name, f"{billions:.1f}", strategy, *cells, f"{it.peak_bytes / 2**30:.1f}", fitted))
        paper = REPORTED[name, "ZeRO++"] / REPORTED[name, "ZeRO-3"]
        ours = rates["ZeRO++"] / rates["ZeRO-3"]
        rows.append((name, "", "ZeRO++ / ZeRO-3", *compared(paper, ours, ".2f"), "", ""))
    print(table(("model", "billions", "strategy", "TFLOP/s a GPU, paper", "ours", "ratio", "GiB", ""), rows))


if __name__ == "__main__":
    main()
