"""What the demo prints: from rank 0, one section a heading."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import shardc
from gpt import GPT

LAYER = "blocks.1"
"""The layer whose graph is shown: a middle one, for the first and the last have neighbours of another kind."""


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def title(text: str) -> None:
    say(f"\n== {text}\n")


def plan(plan: shardc.Plan, model: GPT) -> None:
    """Where each state rests and what each move costs."""
    title("Plan")
    named = {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    say(plan.table(named))


def layer(model: GPT) -> None:
    """The forward of one layer as it was captured, and with its hops inserted."""
    program = shardc.programs(model)[0]  # CONNECT: programs() -> list[Program]
    title(f"{LAYER}, as written")
    say(program.layer_text(LAYER, after="capture"))  # CONNECT: Program.layer_text(layer, after=stage)
    title(f"{LAYER}, with its hops")
    say(program.layer_text(LAYER, after="insert"))
    title("Training")


def step(step: int, loss: float, tokens_per_second: float) -> None:
    say(f"step {step + 1:4}   loss {loss:.4f}   {tokens_per_second:8,.0f} tokens/s   peak {peak_memory_mb():6,.0f} MB")


@contextmanager
def traffic(model: GPT, plan: shardc.Plan, *, steps: int, micro_batches: int) -> Iterator[None]:
    """Count what passes through the process groups in the block; print it a step, beside the plan's closed form."""
    with shardc.testing.count_bytes(model) as counted:  # CONNECT: count_bytes(model) -> {axis: bytes sent by this rank}
        yield
    expected = plan.step_bytes(model, micro_batches=micro_batches)  # CONNECT: closed form -> {axis: bytes}
    title("Traffic: MB that one rank sends in a step")
    say(f"{'axis':<12}{'counted':>12}{'closed form':>14}")
    for axis in expected:
        say(f"{axis:<12}{counted[axis] / steps / 1e6:12.3f}{expected[axis] / 1e6:14.3f}")


def verdict(losses: list[float], expected: list[float], max_difference: float, max_last: float) -> list[str]:
    """What failed, in a sentence each; prints the comparison with one process."""
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=False))
    title("Check")
    say(f"first {len(expected)} losses: {difference:.1e} from those of one process (limit {max_difference:g})")
    say(f"last loss {losses[-1]:.4f} nats/byte (limit {max_last:g})")
    failures = []
    if not difference <= max_difference:
        failures.append("the sharded run does not follow the run in one process")
    if not losses[-1] <= max_last:
        failures.append("the model did not learn")
    say("\n".join(f"FAILED: {failure}" for failure in failures) or "passed")
    return failures


def reset_peak_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak resident size starts again from here


def peak_memory_mb() -> float:
    """Since `reset_peak_memory`: the allocator's peak on a GPU, else the resident size of the whole process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
