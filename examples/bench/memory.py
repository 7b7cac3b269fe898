"""Memory at rest, as allocated, beside the plan's table: 4 ranks, six plans.

    torchrun --standalone --nproc-per-node 4 examples/bench/memory.py

Counts the storages that each state really holds on each rank (the largest rank is shown): the parameters' and
gradients' local tensors,
AdamW's state, compute copies, and the accumulators between two micro-batches. Exits non-zero when a total is off by
more than 3%.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from llama import Config, Llama

import shardc
from shardc.plan import Plan
from shardc.rest import state_bytes

TOPOLOGY = shardc.Topology(node=2, gpu=2)
PLANS = {
    "zero1": Plan.zero1(TOPOLOGY),
    "zero2": Plan.zero2(TOPOLOGY),
    "zero3": Plan.zero3(TOPOLOGY),
    "mics": Plan.mics(TOPOLOGY),
    "hpz bf16": Plan.hpz(TOPOLOGY, param_dtype=torch.bfloat16),
    "IIG bf16": Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16),
}
LIMIT = 0.03


def main() -> int:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    say(f"torch {torch.__version__}, cpu, 4 Gloo ranks as node=2, gpu=2; MiB a rank, allocated / table")
    worst = 0.0
    for name, plan in PLANS.items():
        measured, table = measure(plan)
        worst = max(worst, abs(sum(measured.values()) / sum(table.values()) - 1))
        cells = "".join(f"{key} {mib(measured[key])} / {mib(table[key])}   " for key in table)
        say(f"{name:<10}{cells}total {mib(sum(measured.values()))} / {mib(sum(table.values()))}")
    say(f"worst total: {worst:.2%} off (limit {LIMIT:.0%})")
    dist.destroy_process_group()
    return int(worst > LIMIT)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.2f}"


def measure(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by state: the largest rank's as allocated, and the plan's."""
    torch.manual_seed(0)
    config = Config(dim=192, layers=3, heads=4, kv_heads=4, hidden=500, vocab=1001, context=32)
    model = Llama(config)
    named = {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    model = shardc.compile(model, plan, backend="eager", progress=lambda text: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randint(config.vocab, (2, 1, config.context))
    with model.no_sync():
        model(x, y).backward()
    held = model._shardc.params.values()
    # One that is on the optim rung is `.grad` in waiting, and its place is counted there.
    measured = {"accumulators": storages(p.accumulator for p in held if not p.param.grad_is_accumulator)}
    measured["copies"] = storages(p.copy for p in held)
    model(x, y).backward()
    measured["grads"] = storages(p.grad for p in model.parameters())
    optimizer.step()
    measured["master"] = storages(model.parameters())
    measured["optimizer"] = storages(v for state in optimizer.state.values() for k, v in state.items() if k != "step")
    return largest(measured), state_bytes(plan, named)


def storages(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    locals_ = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in locals_}.values())


def largest(measured: dict[str, int]) -> dict[str, int]:
    values = torch.tensor(list(measured.values()))
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(measured, values.tolist(), strict=True))


if __name__ == "__main__":
    sys.exit(main())
