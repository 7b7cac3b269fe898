"""Models: does each train under each plan as in one process? On real Gloo processes of this machine.

    python examples/bench/models.py                                # all models, plans and backends; an hour on 2 cores
    python examples/bench/models.py --models llama t5 --plans zero3 --backends inductor --micro-batches 2

Cells are the worst error of all losses, gradients, parameters and buffers over 2 AdamW steps, relative to the largest
magnitude of each tensor. Exits with 1 when one is above 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import shardc  # noqa: E402
from matrix import Case, errors_of, plans_of, table, too_far  # noqa: E402
from models import MODELS, NOT_COMPILED  # noqa: E402
from world import RankError, run  # noqa: E402

TOPOLOGY = shardc.Topology(node=2, gpu=2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=plans_of(TOPOLOGY), default=list(plans_of(TOPOLOGY)))
    parser.add_argument("--backends", nargs="+", choices=["eager", "inductor"], default=["eager", "inductor"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2])
    return parser.parse_args()


def measured(cases: list[Case]) -> dict[Case, float]:
    """In one group of processes; all infinite where a rank fails, with its traceback on stderr."""
    first = cases[0]
    print(f"{first.model}, {first.backend}: {len(cases)} cases", end=" ", file=sys.stderr, flush=True)
    try:
        errors = run(errors_of, TOPOLOGY.world, cases, TOPOLOGY, timeout_s=900 * len(cases))[0]
    except RankError as failure:
        print(failure, file=sys.stderr)
        return dict.fromkeys(cases, float("inf"))
    print(f"{max(errors.values()):.1e}", file=sys.stderr, flush=True)
    return errors


def main() -> int:
    options = arguments()
    errors: dict[Case, float] = {}
    for backend, model in product(options.backends, options.models):
        if backend == "inductor" and model in NOT_COMPILED:
            continue
        errors |= measured([Case(model, p, backend, m) for m in options.micro_batches for p in options.plans])
    print(f"{TOPOLOGY}\n{table(errors)}")
    return int(bool(too_far(errors)))


if __name__ == "__main__":
    sys.exit(main())
