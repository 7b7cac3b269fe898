"""Three levels on Frontier (arXiv 2501.04266): 20B on 384 GCDs, against ZeRO++ and ZeRO-3.

    python examples/papers/frontier.py

A GPT of NeoX-20B's shape (44 layers of 6144, sequences of 2048) on 48 hosts of 4 x 2 GCDs (`frontier` of shardc.links).
Reported: 1.71x ZeRO++ and 2.4x ZeRO-3 in throughput, and a scaling efficiency of 0.94 up to 384 GCDs. Sequences and
micro-batches a GCD are not; so there are rows for several. What is gathered ahead is bounded by the 64 GB of a GCD.
Fitted: the part of the bandwidth between hosts that is reached, on the 2.4 of one micro-batch of one sequence. The
placement is what is known of it: parameters in a package, gradients in a node, the optimizer over all; int8 gathers,
int4 reductions.
"""

from __future__ import annotations

from common import Constants, Setup, compared, gpt, ids, machine, table

from shardc import Plan

LAYERS, DIM, HEADS, SEQUENCE = 44, 6144, 64, 2048
MI250X = Constants(efficiency=0.45, node=0.107)
REPORTED = {"ZeRO++": 1.71, "ZeRO-3": 2.4}
STRATEGIES = {"3 levels": Plan.frontier, "ZeRO++": Plan.zeropp, "ZeRO-3": Plan.zero3}


def main() -> None:
    given = Setup(gpt(LAYERS, DIM, HEADS), (ids(1, SEQUENCE),))
    predictor = given.predictor(machine("frontier", 1, MI250X))
    topology, rows = machine("frontier", 48, MI250X), []
    limit = int(topology.computes.memory_gb * 1e9)
    for micro_batches in (1, 2, 4, 8):
        found = {
            name: predictor(make(topology, param_dtype=given.dtype), micro_batches, memory_bytes=limit)
            for name, make in STRATEGIES.items()
        }
        ours = found["3 levels"]
        for name, it in found.items():
            paper = REPORTED.get(name) if micro_batches == 1 else None
            rate = micro_batches * SEQUENCE / it.step_us * 1e6
            fitted = "fitted" if (name, micro_batches) == ("ZeRO-3", 1) else ""
            cells = compared(paper, it.step_us / ours.step_us, ".2f")
            rows.append((name, micro_batches, f"{rate:.0f}", *cells, f"{it.peak_bytes / 2**30:.1f}", fitted))
    print("20B on 384 GCDs")
    print(
        table(
            ("strategy", "micro-batches", "tokens/s/GCD", "3 levels against it, paper", "ours", "ratio", "GiB", ""),
            rows,
        )
    )
    print("\nScaling of 3 levels, one micro-batch of one sequence; paper 0.94 at 384 GCDs")
    rates = {}
    for nodes in (1, 2, 6, 12, 24, 48):
        plan = Plan.frontier(machine("frontier", nodes, MI250X), param_dtype=given.dtype)
        rates[8 * nodes] = SEQUENCE / predictor(plan, memory_bytes=limit).step_us * 1e6
    first = rates[16]
    rows = [(gcds, f"{rate:.0f}", f"{rate / first:.2f}") for gcds, rate in rates.items()]
    print(table(("GCDs", "tokens/s/GCD", "of that at 16"), rows))


if __name__ == "__main__":
    main()
