"""Steps as they ran, over the step as it is foretold: on real Gloo processes, and on emulated links in this one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from passes import ops
from passes.errors import Error
from shardc.links import Device, Link
from shardc.model import runtime_of
from shardc.timeline import COMPUTE, Lanes
from world import run

CORE = Device("a CPU core", 0.05, 10.0, 16.0)
SHAPE = shardc.Topology(node=2, gpu=2)
TOPOLOGY = SHAPE.with_links(CORE, node=Link(0.1, 50.0), gpu=Link(1.0, 10.0))
STEPS, MICRO_BATCHES = 2, 2


class Blocks(nn.Module):
    """Each draws random numbers; there are statistics, and a frozen parameter."""

    def __init__(self, dim: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.norm = nn.BatchNorm1d(dim)
        self.layers[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.dropout(torch.relu(layer(x)), 0.1, self.training)
        return self.norm(x)


class Choosing(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def compiled(plan: shardc.Plan, backend: str = "eager", model: type[nn.Module] = Blocks) -> nn.Module:
    torch.manual_seed(0)
    return shardc.compile(model(), plan, backend=backend, progress=lambda line: None)


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


@dataclass
class Wanted:
    """Of a hop of a program, in its order."""

    graph: str
    hop: ops.Hop
    sent_bytes: int
    waited: bool


def wanted(program: shardc.Program, micro_batches: int) -> dict[str, list[Wanted]]:
    """By lane."""
    found: dict[str, list[Wanted]] = {}
    for i, variant in enumerate(program.step(micro_batches)):
        name = variant.half if micro_batches == 1 else f"{variant.half} {i // 2}"
        for start in ops.hops(program.graph(variant)):
            it = Wanted(name, ops.hop(start), ops.moved_bytes(start), ops.wait_of(start) is not None)
            found.setdefault(it.hop.axis, []).append(it)
    return found


def check(step: Lanes, hops: dict[str, list[Wanted]]) -> None:
    """Every hop of the program is there once, on its lane and in its order, and lanes do one thing at a time."""
    assert step.lanes == [COMPUTE, *sorted(hops)]
    for lane in step.lanes:
        events = [event for event in step.events if event.lane == lane]
        assert all(a.end_us <= b.start_us + 1e-6 for a, b in pairwise(events))
        if lane != COMPUTE:
            assert [(e.graph, e.hop, e.sent_bytes) for e in events] == [
                (it.graph, it.hop, it.sent_bytes) for it in hops[lane]
            ]
            assert [e.exposed_us > 0 for e in events] == [it.waited for it in hops[lane]]
            assert all(e.start_us >= e.issued_us >= 0 for e in events)


# On real processes


@dataclass
class Found:
    profile: shardc.Profile
    hops: dict[str, list[Wanted]]
    as_simulated: bool


def profiled() -> Found:
    model = compiled(shardc.Plan.paro(TOPOLOGY, "IIG"))
    profile = shardc.profile(model, batch(), steps=STEPS, micro_batches=MICRO_BATCHES)
    (program,) = shardc.programs(model)
    as_simulated = profile.predicted == shardc.simulate(program, micro_batches=MICRO_BATCHES)
    return Found(replace(profile, profiler=None), wanted(program, MICRO_BATCHES), as_simulated)


@cache
def ranks() -> list[Found]:
    return run(profiled, 4)


def test_every_hop_of_the_program_is_measured_once_a_step() -> None:
    for rank in ranks():
        assert len(rank.profile.steps) == STEPS
        for step in rank.profile.steps:
            check(step, rank.hops)


def test_compute_is_measured_block_by_block_within_the_step() -> None:
    for step in (step for rank in ranks() for step in rank.profile.steps):
        computing = [event for event in step.events if event.lane == COMPUTE]
        assert {event.name for event in computing} == {"layers.0", "layers.1", "model"}
        assert {event.graph for event in computing} == {f"{h} {i}" for h in ("forward", "backward") for i in range(2)}
        assert 0 < step.busy_us[COMPUTE] + step.exposed_us < step.step_us


def test_the_prediction_is_that_of_simulate_and_has_each_hop_at_its_place() -> None:
    for rank in ranks():
        assert rank.as_simulated
        for measured, predicted in rank.profile.pairs:
            assert predicted is not None
            assert (measured.graph, measured.lane, measured.hop) == (predicted.graph, predicted.lane, predicted.hop)
        assert len(rank.profile.pairs) == sum(map(len, rank.hops.values()))


def test_ranks_know_the_slowest() -> None:
    profiles = [rank.profile for rank in ranks()]
    assert [profile.rank for profile in profiles] == list(range(4))
    assert {profile.slowest_us for profile in profiles} == {max(profile.measured.step_us for profile in profiles)}


def test_it_prints_a_line_a_collective_and_then_totals() -> None:
    profile = ranks()[0].profile
    head, hops, totals = str(profile).split("\n\n")
    assert f"of {STEPS} (the median) of rank 0" in head and "of the slowest rank" in head
    columns, *lines = hops.splitlines()
    assert columns.split()[:5] == ["in", "moves", "by", "over", "sent"] and "predicted to begin" in columns
    assert len(lines) == len(profile.pairs)
    names = [line.split("  ")[0] for line in totals.splitlines()]
    assert names == ["", "step", "compute", "exposed", "neither", "gpu busy", "node busy"]


def state(model: nn.Module) -> list[Any]:
    return [torch.get_rng_state(), *(v.full_tensor() if hasattr(v, "full_tensor") else v for v in values(model))]


def values(model: nn.Module) -> Iterator[Tensor]:
    return (value.detach().clone() for value in model.state_dict().values())


def train(model: nn.Module, *, sync: bool) -> None:
    torch.manual_seed(dist.get_rank())
    model.set_requires_gradient_sync(sync)
    model(batch()).square().sum().backward()


def goes_on_as_if_nothing_had_been(path: str) -> tuple[str, list[str]]:
    """Between two micro-batches and before an optimizer's step; on a topology without links."""
    model, other = (compiled(shardc.Plan.paro(SHAPE, "IIG")) for _ in range(2))
    called: list[nn.Parameter] = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(called.append)
    for sync in (False, True):
        train(model, sync=sync), train(other, sync=sync)
        before, grads, count = state(model), [p.grad for p in model.parameters()], len(called)
        profile = shardc.profile(model, batch(), steps=1, micro_batches=2)
        assert all(map(torch.equal, before, state(model)))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert runtime_of(model).syncing == sync
        assert len(called) == count
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
    if dist.get_rank() == 0:
        profile.svg(path)
    return str(profile), profile.steps[0].lanes


def test_training_goes_on_as_if_nothing_had_been_and_nothing_is_predicted_without_links(tmp_path: Path) -> None:
    path = tmp_path / "profile.svg"
    for text, lanes in run(goes_on_as_if_nothing_had_been, 4, str(path)):
        assert lanes == [COMPUTE, "gpu", "node"]
        assert "nothing is predicted: the plan's topology does not say how fast it is" in text
        assert "predicted to begin" not in text and "difference" not in text
    assert "measured: step" in path.read_text() and "predicted" not in path.read_text()


# On emulated links


@cache
def emulated(backend: str = "eager") -> Found:
    wide = shardc.Topology(node=8, gpu=4).with_links(CORE, node=Link(0.1, 50.0), gpu=Link(1.0, 10.0))
    with shardc.emulate(wide):
        model = compiled(shardc.Plan.zero3(wide), backend)
        profile = shardc.profile(model, batch(), steps=1)
        (program,) = shardc.programs(model)
        return Found(profile, wanted(program, 1), profile.predicted == shardc.simulate(program))


def test_one_process_is_profiled_as_a_rank_of_a_large_world() -> None:
    found = emulated()
    check(found.profile.measured, found.hops)
    assert found.as_simulated


def test_torch_has_ranges_of_the_same_names() -> None:
    found = emulated()
    names = {event.name for event in found.profile.profiler.events()}
    hops = {str(it.hop) for its in found.hops.values() for it in its}
    assert hops | {"layers.0", "layers.1", "model"} <= names


def test_the_trace_has_both_as_processes(tmp_path: Path) -> None:
    profile = emulated().profile
    profile.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert profile.predicted is not None and names.keys() == {"measured", "predicted"}
    for name, step in (("measured", profile.measured), ("predicted", profile.predicted)):
        assert sum(e["ph"] == "X" and e["pid"] == names[name] for e in events) == len(step.events)


def test_the_picture_has_both_underneath_each_other(tmp_path: Path) -> None:
    profile = emulated().profile
    profile.svg(tmp_path / "profile.svg")
    root = ElementTree.parse(tmp_path / "profile.svg").getroot()
    texts = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert texts.index("measured") < texts.index("predicted")
    assert texts.count("gpu") == texts.count("node") == 2
    assert profile.predicted is not None
    boxes = sum(e.tag.endswith("title") for e in root.iter())
    assert boxes == len(profile.measured.events) + len(profile.predicted.events)


def test_afterwards_the_model_runs_what_it_ran_before() -> None:
    with shardc.emulate(TOPOLOGY):
        model = compiled(shardc.Plan.zero3(TOPOLOGY))
        model(batch()).sum().backward()
        lowering = runtime_of(model).lowering
        runs = dict(lowering.runs)
        shardc.profile(model, batch(), steps=1)
        assert runtime_of(model).lowering is lowering and dict(lowering.runs) == runs
        assert not any("stretch" in run.source for run in runs.values())


@pytest.mark.slow
def test_regions_that_inductor_has_compiled_are_measured_and_not_compiled_again() -> None:
    with shardc.emulate(TOPOLOGY):
        model = compiled(shardc.Plan.zero3(TOPOLOGY), "inductor")
        model(batch()).sum().backward()
        known = dict(runtime_of(model).lowering.compiled)
        profile = shardc.profile(model, batch(), steps=1)
        assert runtime_of(model).lowering.compiled == known
        check(profile.measured, wanted(shardc.programs(model)[0], 1))
    assert {e.name for e in profile.measured.events if e.lane == COMPUTE} >= {"layers.0", "layers.1"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_moments_are_events_on_streams() -> None:
    with shardc.emulate(TOPOLOGY, "cuda"):
        model = compiled(shardc.Plan.zero3(TOPOLOGY))
        profile = shardc.profile(model, batch().cuda(), steps=STEPS)
        for step in profile.steps:
            check(step, wanted(shardc.programs(model)[0], 1))


# Bad input


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with pytest.raises(Error, match="Blocks is not a compiled model"):
        shardc.profile(Blocks(), torch.ones(2, 16))


@pytest.mark.parametrize("count", [{"steps": 0}, {"steps": 1.5}, {"micro_batches": 0}], ids=str)
def test_less_than_one_step_is_refused(count: dict[str, Any]) -> None:
    with shardc.emulate(TOPOLOGY), pytest.raises(Error, match="There is nothing to measure in") as error:
        shardc.profile(compiled(shardc.Plan.zero3(TOPOLOGY)), batch(), **count)
    assert error.value.where is not None and error.value.fix is not None


def test_a_model_without_a_loss_is_refused_and_left_as_it_was() -> None:
    with shardc.emulate(TOPOLOGY):
        model = compiled(shardc.Plan.zero3(TOPOLOGY), model=Choosing)
        before = state(model)
        with pytest.raises(Error, match="returned nothing to differentiate"):
            shardc.profile(model, batch())
        assert all(map(torch.equal, before, state(model)))


def test_a_graph_that_is_compiled_as_one_is_refused() -> None:
    with shardc.emulate(TOPOLOGY), pytest.raises(Error, match="of which no part can be measured"):
        shardc.profile(compiled(shardc.Plan.zero3(TOPOLOGY), "inductor-whole"), batch())
