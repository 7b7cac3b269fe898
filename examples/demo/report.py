"""What the demo prints: from rank 0, one section a heading."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

import shardc
from gpt import GPT
from shardc.cost import MOVES, by_axis, step_bytes
from shardc.links import MACHINES
from shardc.plan import Parameter

LAYER = "blocks.1"
"""The layer whose graph is shown: a middle one, for the first and the last have neighbours of another kind."""


OUT = Path("out")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def title(text: str) -> None:
    say(f"\n== {text}\n")


def plan(plan: shardc.Plan, model: GPT) -> None:
    """Where each state rests."""
    title("Plan")
    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters; {plan.table(described(model))}")


def graphs(plan: shardc.Plan, build_model: Callable[[torch.device], GPT], rows: int, micro_batches: int) -> None:
    """The forward of one layer as it was captured, and with its hops inserted; pictures of all. Traced on rank 0,
    without storage."""
    if dist.get_rank() == 0:
        meta = torch.device("meta")
        model = build_model(meta)
        ids = torch.empty(rows, model.config.context, dtype=torch.long, device=meta)
        program = shardc.trace(model, plan, ids, ids)
        title(f"{LAYER}, as written")
        say(program.layer_text(LAYER, after="capture"))
        title(f"{LAYER}, with its hops")
        say(program.layer_text(LAYER, after="insert"))
        title("Pictures")
        pictures(program, micro_batches)
    title("Training")


def pictures(program: shardc.Program, micro_batches: int) -> None:
    """The graphs, and a step as it is foretold for GPUs on two hosts with 10 Gb/s Ethernet."""
    hosts = MACHINES["ethernet"]
    topology = program.topology.with_links(hosts.device, **dict(hosts.links))
    timeline = shardc.simulate(program, topology, micro_batches=micro_batches)
    say("\n".join(str(path) for path in program.svg(OUT)))
    timeline.svg(OUT / "timeline.svg")
    timeline.chrome_trace(OUT / "trace.json")
    say(f"{OUT / 'timeline.svg'}\n{OUT / 'trace.json'} (for ui.perfetto.dev)\n{timeline}")


def step(step: int, loss: float, tokens_per_second: float) -> None:
    say(f"step {step + 1:4}   loss {loss:.4f}   {tokens_per_second:8,.0f} tokens/s   peak {peak_memory_mb():6,.0f} MB")


def traffic(plan: shardc.Plan, model: GPT, micro_batches: int, counted: Mapping[str, float]) -> None:
    """`counted` is what one rank sent in a step, bytes by axis; beside it the plan's closed form, by move."""
    # The gradient of a table is a sum of rows: the backward does not look at the table itself.
    regathered = [name for name, _ in model.named_parameters() if name != "embed.weight"]
    expected = step_bytes(plan, described(model), micro_batches, regathered=regathered)
    title("Traffic: MB that one rank sends in a step")
    say(_row("axis", *MOVES, "closed form", "counted"))
    for axis, total in by_axis(expected).items():
        moves = (expected.get((move, axis), 0) for move in MOVES)
        say(_row(axis, *(f"{sent / 1e6:.3f}" for sent in (*moves, total, counted[axis]))))


def _row(axis: str, *cells: str) -> str:
    return f"{axis:<6}" + "".join(f"{cell:>17}" for cell in cells)


def described(model: GPT) -> dict[str, Parameter]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


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
