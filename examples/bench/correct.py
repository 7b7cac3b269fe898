"""Correct: is training under every plan that of one process? On real Gloo processes of this machine.

    python examples/bench/correct.py      # every plan on 2x2, with 1 and 3 micro-batches, eager and Inductor
    python examples/bench/correct.py --plans 2/1/2/2 --backends eager --topology node=3,gpu=2

A row is a plan: the rungs of params, after_forward, grads and optim as numbers of inner axes. Cells are the worst error
of all losses, gradients and parameters over 3 AdamW steps, relative to the largest magnitude of each tensor. Exits
with 1 when one is above 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shardc  # noqa: E402
from training import LIMIT, one_process, sharded, spelled, worst_error  # noqa: E402
from world import RankError, run  # noqa: E402

STEPS = 3


def train(plan: shardc.Plan, micro_batches: int, backend: str, depth: int) -> float:
    """On each rank."""
    counts = (micro_batches,) * STEPS
    return worst_error(sharded(plan, counts, backend, depth), one_process(plan.topology.world, counts, depth))


def measured(plan: shardc.Plan, micro_batches: int, backend: str, depth: int) -> float:
    """The worst of all ranks; infinite where one fails, with its traceback on stderr."""
    try:
        return max(run(train, plan.topology.world, plan, micro_batches, backend, depth, timeout_s=900))
    except RankError as error:
        print(error, file=sys.stderr)
        return float("inf")


def topology(text: str) -> shardc.Topology:
    return shardc.Topology(**{name: int(size) for name, size in (axis.split("=") for axis in text.split(","))})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=topology, default="node=2,gpu=2", help="outermost axis first")
    parser.add_argument("--plans", nargs="+", help="such as 2/1/2/2 (default: all that are legal)")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--depth", type=int, default=2, help="blocks of the model")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    plans = [p for p in shardc.Plan.legal(options.topology) if not options.plans or spelled(p) in options.plans]
    columns = [(backend, m) for backend in options.backends for m in options.micro_batches]
    width = len(spelled(plans[0])) + 2
    print(f"{options.topology}: worst relative error, params/after_forward/grads/optim by backend x micro-batches")
    print(" " * width + "".join(f"{f'{backend} x {m}':>16}" for backend, m in columns), flush=True)
    worst = 0.0
    for plan in plans:
        print(f"{spelled(plan):<{width}}", end="", flush=True)
        for backend, m in columns:
            error = measured(plan, m, backend, options.depth)
            worst = max(worst, error)
            print(f"{error:>16.1e}", end="", flush=True)
        print()
    print(f"worst {worst:.1e}, limit {LIMIT:.0e}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
