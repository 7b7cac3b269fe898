"""Loops: does every way to write a training loop give what it gives in one process? On two Gloo processes.

    python examples/bench/loops.py                                 # all loops, eager and through Inductor
    python examples/bench/loops.py --plans zero3 --backends eager

Cells are the worst error of all losses, gradients and parameters, relative to the largest magnitude of each tensor.
Exits with 1 when one is above 1e-5. `autocast` through Inductor may be off by a rounding of bfloat16 (4e-3): Inductor
keeps float32 between the ops that it fuses, with torch.compile as with shardc.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shardc  # noqa: E402
from loops import LOOPS, run_loops  # noqa: E402
from training import LIMIT  # noqa: E402
from world import run  # noqa: E402

TOPOLOGY = shardc.Topology(node=2, gpu=1)
PLANS = {"IIG": shardc.Plan.paro(TOPOLOGY, "IIG"), "zero3": shardc.Plan.zero3(TOPOLOGY)}
BACKENDS = ["eager", "inductor"]
LIMITS = {("autocast", "inductor"): 4e-3}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    names = [loop.__name__ for loop in LOOPS]
    columns = list(product(options.backends, options.plans))
    errors = {}
    for backend, plan in columns:
        print(f"{plan}, {backend}: {len(names)} loops", file=sys.stderr, flush=True)
        errors[backend, plan] = run(run_loops, TOPOLOGY.world, names, PLANS[plan], backend, timeout_s=1800)[0]
    print(f"| loop | {' | '.join(f'{backend} {plan}' for backend, plan in columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name in names:
        print(f"| {name.replace('_', ' ')} | {' | '.join(f'{errors[column][name]:.1e}' for column in columns)} |")
    return int(any(e > LIMITS.get((name, c[0]), LIMIT) for c in columns for name, e in errors[c].items()))


if __name__ == "__main__":
    sys.exit(main())
