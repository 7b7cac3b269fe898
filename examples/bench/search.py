"""How long the search takes, and how many plans it looks at: 7B, 70B and 405B at 1024 and 16384 ranks.

    python examples/bench/search.py

Llama models on DGX H100 hosts, one sequence of 4096 tokens a rank and micro-batch; the larger two compute their blocks
again in the backward. On one CPU core.
"""

from __future__ import annotations

import argparse

import torch
from llama import Config, Llama, recomputed

import shardc

MODELS = {
    "7B": Config(4096, 32, 32, 32, 11008, 32000, 4096),
    "70B": Config.llama_70b(),
    "405B": Config(16384, 126, 128, 8, 53248, 128256, 4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="the whole table of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.zeros((1, 4096), dtype=torch.long, device="meta")
    print("| model | ranks | plans looked at | simulated | seconds | best | step ms | left unproved |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        with torch.device("meta"):
            model = Llama(MODELS[name])
        if name != "7B":
            recomputed(model)
        for ranks in options.ranks:
            topology = shardc.Topology.preset("dgx-h100", nodes=ranks // 8)
            found = shardc.search(
                model, topology, ids, ids, micro_batches=options.micro_batches, progress=lambda text: None
            )
            best = "/".join(map(str, found.best.row)) + (", by layer" if found.plan.overrides else "")
            print(
                f"| {name} | {ranks} | {len(found.ranked)} | {found.simulated} | {found.seconds:.0f} | {best} "
                f"| {found.best.step_us / 1e3:.0f} | {found.gap:.1%} |",
                flush=True,
            )
            if options.show:
                print(found, flush=True)


if __name__ == "__main__":
    main()
