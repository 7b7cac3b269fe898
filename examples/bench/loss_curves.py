"""Loss curves of the demo's GPT with quantized wires, beside those with float32 on the wire.

    torchrun --standalone --nproc-per-node 4 examples/bench/loss_curves.py

The same model, data and learning rates as `examples/train_gpt.py`, under IIG on 2 x 2, trained anew for each row:
nothing quantized; gathers and refreshes in int8; these, and reductions in int4. A loss is the mean over all ranks and
micro-batches of a step, and the table has the mean of the last ten.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardc
import train_gpt
from train_gpt import GLOBAL_BATCH, MICRO_BATCHES, build_model, train

AXES = ("node", "gpu")
WIRES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8 gathers": {"gather_wire": dict.fromkeys(AXES, "int8")},
    "int8 gathers, int4 reductions": {
        "gather_wire": dict.fromkeys(AXES, "int8"),
        "reduce_wire": dict.fromkeys(AXES, "int4"),
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    train_gpt.STEPS = options.steps
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    topology = shardc.Topology(node=2, gpu=dist.get_world_size() // 2)
    rows = GLOBAL_BATCH // (MICRO_BATCHES * dist.get_world_size())
    curves, sent = {}, {}
    for name, wires in WIRES.items():
        plan = shardc.Plan.paro(topology, "IIG", **wires)
        model = shardc.compile(build_model(device), plan)
        curves[name], sent[name] = train(model, device, rows)
    if dist.get_rank() == 0:
        print(table(curves, sent))
    dist.destroy_process_group()
    return 0


def table(curves: dict[str, list[float]], sent: dict[str, dict[str, float]]) -> str:
    steps = len(next(iter(curves.values())))
    shown = list(range(50, steps + 1, 50))
    lines = [f"| wires | {' | '.join(f'step {step}' for step in shown)} | MB a step over node | over gpu |"]
    lines.append("|" + "---|" * (len(shown) + 3))
    for name, losses in curves.items():
        means = " | ".join(f"{mean(losses[step - 10 : step]):.4f}" for step in shown)
        lines.append(f"| {name} | {means} | {sent[name]['node'] / 1e6:.2f} | {sent[name]['gpu'] / 1e6:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
