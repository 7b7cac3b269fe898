"""InternLM-7B on 8 to 512 A100: the optimizer over all ranks against inside each node.

    python examples/papers/internlm.py

The cleanest public figures of what AMSP (arXiv 2311.00257) proposes: only the optimizer's sharding differs. Hosts of 8
A100 with 4 x 100 Gb/s, sequences of 2048, 2 a micro-batch, 4 micro-batches. In these runs nothing is computed while
updated parameters are spread. Fitted on "all": efficiency at 8 GPUs, the part of the bandwidth between hosts that is
reached and the time of a step of a ring at 32 and 512. All else is predicted.
"""

from __future__ import annotations

from dataclasses import replace

from common import Config, Constants, Setup, compared, ids, llama, machine, refresh_apart, table

from shardc import Plan

INTERNLM = Config(4096, 32, 32, 32, 11008, 103168, 2048)
OPTIMIZER = {
    "all": {8: 4062, 32: 3752, 128: 3571, 512: 2861},
    "gpu": {8: 4078, 32: 3919, 128: 3928, 512: 3835},
}
A100 = Constants(efficiency=0.695, node=0.783)
LATENCY_US = 371.0


def main() -> None:
    given = Setup(llama(INTERNLM), (ids(2, 2048), ids(2, 2048)))
    rows, predictor = [], given.predictor(machine("dgx-a100", 1, A100))
    for gpus in (8, 32, 128, 512):
        shape = machine("dgx-a100", gpus // 8, A100, node=6.25)
        node = replace(shape.link("node"), latency_us=LATENCY_US)
        topology = shape.with_links(shape.computes, node=node, gpu=shape.link("gpu"))
        for rung, reported in OPTIMIZER.items():
            it = predictor(Plan(topology, optim=rung, param_dtype=given.dtype), 4)
            fitted = "fitted" if (rung, gpus) in (("all", 8), ("all", 32), ("all", 512)) else ""
            rows.append((rung, gpus, *compared(reported[gpus], 4 * 2 * 2048 / (refresh_apart(it) / 1e6)), fitted))
    print(table(("optim", "GPUs", "tokens/s/GPU, paper", "ours", "ratio", ""), rows))


if __name__ == "__main__":
    main()
