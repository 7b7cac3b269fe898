"""One process as a rank of a large world: what collectives bring, when they end, and who runs on it unchanged."""

from __future__ import annotations

import threading
import time
from collections import Counter
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardc
from passes import ops
from passes.errors import Error
from shardc.cost import by_axis, step_bytes
from shardc.lanes import Lane
from shardc.links import Device, Link
from shardc.times import collective_us

CORE = Device("a CPU core", 0.05, 10.0, 16.0)
WORLD = shardc.Topology(node=8, gpu=4).with_links(CORE, node=Link(0.1, 50.0), gpu=Link(1.0, 10.0))


class Blocks(nn.Module):
    def __init__(self, dim: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return x.square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_all_ranks_are_taken_to_hold_what_this_one_holds() -> None:
    with shardc.emulate(WORLD):
        x, gathered, scattered = torch.arange(4.0), torch.empty(128), torch.empty(4)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(scattered, gathered)
        assert torch.equal(gathered, x.repeat(32)) and torch.equal(scattered, 32 * x)
        dist.all_reduce(x)
        assert torch.equal(x, 32 * torch.arange(4.0))
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert torch.equal(x, 32 * torch.arange(4.0))


def test_a_collective_ends_when_its_links_say_behind_what_is_on_them() -> None:
    with shardc.emulate(WORLD) as world:
        mesh = init_device_mesh("cpu", (8, 4), mesh_dim_names=("node", "gpu"))
        x = torch.ones(1 << 19)
        works = [
            dist.all_reduce(x.clone(), group=mesh.get_group(axis), async_op=True) for axis in ("node", "gpu", "node")
        ]
        for work in works:
            work.wait()
        assert time.perf_counter() >= max(c.end_s for c in world.collectives)
        first, inside, second = world.collectives
    assert [c.axis for c in (first, inside, second)] == ["node", "gpu", "node"]
    assert first.sent_bytes == 2 * x.nbytes * 7 // 8
    assert first.end_s - first.begin_s == pytest.approx(
        collective_us(WORLD, "all_reduce", "node", first.sent_bytes, 8) / 1e6
    )
    assert inside.begin_s == inside.issued_s
    assert second.begin_s == max(second.issued_s, first.end_s)


class Held:
    """A clock, on which whoever sleeps wakes late, for Python was busy."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + 0.05


@pytest.mark.parametrize("later_s", [0.0, 0.02], ids=["straight on", "later"])
def test_a_thread_that_goes_straight_on_from_a_wait_is_not_late_because_python_was_busy(
    monkeypatch: pytest.MonkeyPatch, later_s: float
) -> None:
    clock = Held()
    monkeypatch.setattr(import_module("shardc.emulate"), "time", clock)

    def hand_on(first: dist.Work) -> None:
        first.wait()
        clock.now_s += later_s
        dist.all_reduce(x, group=mesh.get_group("gpu"))

    with shardc.emulate(WORLD) as world:
        mesh = init_device_mesh("cpu", (8, 4), mesh_dim_names=("node", "gpu"))
        x = torch.ones(1 << 20)
        work = dist.all_reduce(x, group=mesh.get_group("node"), async_op=True)
        thread = threading.Thread(target=hand_on, args=(work,))
        thread.start()
        thread.join()
        first, second = world.collectives
    assert second.begin_s == pytest.approx(first.end_s + (0.05 + later_s if later_s else 0.0))


def test_compute_stands_still_for_a_hop_that_is_yet_to_be_issued() -> None:
    with shardc.emulate(WORLD) as world:
        mesh = WORLD.mesh("cpu")
        lanes = {axis: Lane(mesh.get_group(axis).group_name) for axis in ("node", "gpu")}
        hops = {axis: ops.Hop("all_gather", axis, n, "gather", ("w",), False) for axis, n in (("node", 8), ("gpu", 4))}
        world.clear()
        first = lanes["node"].start(hops["node"], torch.ones(1 << 17))
        relayed = lanes["gpu"].start(hops["gpu"], first)
        began_s = time.perf_counter()
        relayed.wait()
        assert len(world.collectives) == 2
        assert world.exposed_s > 0.9 * (world.collectives[-1].end_s - began_s) > 0.0


def test_a_flat_collective_takes_a_place_on_all_of_its_axes() -> None:
    with shardc.emulate(WORLD) as world:
        mesh = init_device_mesh("cpu", (8, 4), mesh_dim_names=("node", "gpu"))
        flat = dist.all_reduce(torch.ones(1 << 19), async_op=True)
        inside = dist.all_reduce(torch.ones(1 << 19), group=mesh.get_group("gpu"), async_op=True)
        flat.wait(), inside.wait()
        assert world.collectives[0].axis == "gpu+node"
        assert world.collectives[1].begin_s == max(world.collectives[1].issued_s, world.collectives[0].end_s)


@pytest.mark.parametrize("shape", [(32,), (8, 4)], ids=["FSDP", "HSDP"])
def test_fsdp2_runs_on_it_unchanged(shape: tuple[int, ...]) -> None:
    with shardc.emulate(WORLD) as world:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu")[: len(shape)])
        model = Blocks()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses = train(model, torch.optim.AdamW(model.parameters()))
        assert all(torch.isfinite(torch.tensor(losses)))
        found = Counter((c.kind, c.axis) for c in world.collectives)
    if len(shape) == 1:
        assert found == {("all_gather", "gpu+node"): 12, ("reduce_scatter", "gpu+node"): 6}
    else:
        assert found == {("all_gather", "gpu"): 12, ("reduce_scatter", "gpu"): 6, ("all_reduce", "node"): 6}


@pytest.mark.parametrize("name", ["zero3", "hsdp"])
def test_shardc_sends_on_it_what_its_plan_says(name: str) -> None:
    plan = getattr(shardc.Plan, name)(WORLD)
    with shardc.emulate(WORLD) as world:
        model = Blocks()
        parameters = {n: (tuple(p.shape), p.dtype, True) for n, p in model.named_parameters()}
        model = shardc.compile(model, plan, backend="eager", progress=lambda line: None)
        world.clear()
        model(torch.ones(4, 64)).backward()
        sent: Counter[str] = Counter()
        for c in world.collectives:
            sent[c.axis] += c.sent_bytes
        program = shardc.programs(model)[0]
    again = {
        hop for n in program.backward.nodes for hop in n.kwargs.get("params", []) if n.kwargs["purpose"] == "gather"
    }
    assert sent == by_axis(step_bytes(plan, parameters, 1, regathered=again))


def test_a_measured_program_goes_by_what_its_regions_took() -> None:
    plan = shardc.Plan.zero3(WORLD)
    with shardc.emulate(WORLD):
        said: list[str] = []
        model = shardc.compile(Blocks(), plan, backend="eager", measure=True, progress=said.append)
        train(model, torch.optim.AdamW(model.parameters()))
        program = shardc.programs(model)[0]
    assert any(line.startswith("measuring forward") for line in said)
    assert set(program.pace) == {"forward", "backward"}
    compute = {n.name for n in program.halves[0].nodes if "addmm" in n.name or n.name.startswith("mm")}
    us = program.pace["forward"].us
    assert compute <= set(us) and all(us[name] > 0 for name in compute)
    by_clock = program.times_us(program.forward, "forward")
    assert all(by_clock[node] == us[node.name] for node in program.forward.nodes if node.name in compute)
    variant = program.step()[0]
    draft = program.times_us(program.draft(variant), "forward")
    drafted_us = sum(us for node, us in draft.items() if not ops.is_start(node))
    final_us = sum(us for node, us in by_clock.items() if not ops.is_start(node))
    assert drafted_us <= final_us * (1 + 1e-9)  # which has copies on top


def test_measured_or_not_a_model_trains_the_same() -> None:
    one = shardc.Topology(node=1, gpu=1).with_links(CORE, node=Link(1.0, 1.0), gpu=Link(1.0, 1.0))
    torch.manual_seed(0)
    plain = Blocks()
    state = plain.state_dict()
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    with shardc.emulate(one):
        torch.manual_seed(0)
        model = shardc.compile(
            Blocks(), shardc.Plan.zero3(one), backend="eager", measure=True, progress=lambda line: None
        )
        assert state.keys() == model.state_dict().keys()
        assert train(model, torch.optim.AdamW(model.parameters())) == pytest.approx(expected, rel=1e-6)


def test_there_is_nothing_to_emulate_without_links() -> None:
    with (
        pytest.raises(Error, match="does not say what its devices are"),
        shardc.emulate(shardc.Topology(node=2, gpu=2)),
    ):
        pass


def test_a_process_has_one_default_group() -> None:
    with shardc.emulate(WORLD), pytest.raises(Error, match="there is a process group already"), shardc.emulate(WORLD):
        pass


def test_a_group_over_a_part_of_an_axis_has_no_link() -> None:
    with shardc.emulate(WORLD), pytest.raises(Error, match="not over whole axes"):
        dist.new_group([0, 1])


def test_regions_are_measured_only_where_there_are_some_and_links_are_known() -> None:
    with pytest.raises(Error, match="compiles the graph with its collectives as one"):
        shardc.compile(Blocks(), shardc.Plan.zero3(WORLD), backend="inductor-whole", measure=True)
    with pytest.raises(Error, match="does not say what its devices are"):
        shardc.compile(Blocks(), shardc.Plan.zero3(shardc.Topology(gpu=2)), measure=True)
