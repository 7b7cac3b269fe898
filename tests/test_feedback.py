"""Error feedback: what a format loses is late, not lost; where it is kept, and what it costs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc
from passes.errors import Error
from passes.feedback import feedback
from passes.layout import Layout
from passes.parse import parse
from passes.verify import verify
from passes.wire import dequantize, lost, quantize
from shardc.footprint import RESIDUALS, footprint
from shardc.links import Device, Link
from shardc.model import runtime_of
from shardc.rest import state_bytes
from shardc.simulate import calls_of
from shardc.testing import run_ranks
from world import run

TWO_BY_TWO = shardc.Topology(node=2, gpu=2)
WIRES = {"reduce_wire": {"node": "int4", "gpu": "int4"}, "wire_block": 8}
PLAN = shardc.Plan.zero3(TWO_BY_TWO, error_feedback=True, **WIRES)


# What is lost


@pytest.mark.parametrize("wire", ["fp8", "int8", "int4"])
def test_what_is_lost_is_what_a_message_lacks_of_its_value(wire: str) -> None:
    x = torch.randn(4, 16)
    arrived = dequantize(quantize(x, wire, 8, 2), wire, 8, [4, 16], torch.float32)
    assert torch.equal(lost(x, wire, 8, 2), x - arrived)


def test_a_gradient_that_is_not_finite_leaves_nothing_behind() -> None:
    x = torch.ones(3, 8)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    assert lost(x, "int8", 8, 3).eq(0).all()


# In the graph

BACKWARD = """\
def backward(x: f32[8, 2], tangents_1: f32[2, 8]):
    p: f32[8, 8] = mm(x, tangents_1)
    m: u8[2, 24] = quantize(p, 'int4', 8, 2)
    a: u8[2, 24] = all_to_all(m, 'gpu', 2, purpose='reduce', params=['w'], wire='int4')
    b: u8[2, 24] = wait(a)
    y: f32[8, 8] = shardc.dequantize(b, 'int4', 8, [8, 8], f32)
    z: f32[4, 8] = fold(y, 2)
    m_1: u8[2, 12] = quantize(z, 'int4', 8, 2)
    a_1: u8[2, 12] = all_to_all(m_1, 'node', 2, purpose='reduce', params=['w'], wire='int4')
    b_1: u8[2, 12] = wait(a_1)
    y_1: f32[4, 8] = shardc.dequantize(b_1, 'int4', 8, [4, 8], f32)
    z_1: f32[2, 8] = fold(y_1, 2)
    return {'w': z_1}
"""
FORWARD = "def forward(w: f32[8, 8], x: f32[8, 2]):\n    return ([x], [x])\n"
W = Layout("w", (8, 8), (("gpu", 2), ("node", 2)), 0, 0, 2, 2)


def test_each_axis_has_a_residual_of_its_own_and_the_laws_know_it() -> None:
    graph = feedback(parse(BACKWARD), {"w": W})
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    assert names == ["x", "tangents_1", "residual_0_w", "residual_1_w"]
    verify({"w": W}, forward=parse(FORWARD), backward=graph)


def test_a_residual_that_is_added_on_another_rung_breaks_a_law() -> None:
    text = BACKWARD.replace("tangents_1: f32[2, 8]):", "tangents_1: f32[2, 8], residual_0_w: f32[4, 8]):").replace(
        "m_1: u8[2, 12] = quantize(z,", "s: f32[4, 8] = add.Tensor(z, residual_0_w)\n    m_1: u8[2, 12] = quantize(s,"
    )
    with pytest.raises(Error, match="law 3, one sum: `s` adds to the gradient of w what has not crossed the same axes"):
        verify({"w": W}, forward=parse(FORWARD), backward=parse(text))


# Numbers


def test_what_one_step_loses_the_next_ones_bring() -> None:
    """The same gradient again and again: with feedback its mean comes as near as one wants, without it does not."""
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False)
    batches = [torch.randn(4, 32) for _ in range(4)]
    tangents = [torch.randn(4, 16) for _ in range(4)]
    exact = sum(t.T @ x for t, x in zip(tangents, batches, strict=True)) / 4
    plain = shardc.trace(model, shardc.Plan.zero3(TWO_BY_TWO, **WIRES), batches[0])
    fed = shardc.trace(model, PLAN, batches[0])
    once = mean_error(plain, batches, tangents, exact, 1)
    assert mean_error(plain, batches, tangents, exact, 16) == pytest.approx(once)
    assert mean_error(fed, batches, tangents, exact, 16) < once / 8


def mean_error(
    program: shardc.Program, batches: list[Tensor], tangents: list[Tensor], exact: Tensor, steps: int
) -> float:
    backward = program.variation(synced=True, accumulated={})
    saved = [[x] for x in batches]
    names = [node.name for node in backward.nodes if node.op == "placeholder" and node.name.startswith("residual")]
    shapes = {node.name: node.meta["val"].shape for node in backward.nodes if node.name in names}
    kept = [{name: torch.zeros(shapes[name]) for name in names} for _ in batches]
    total = torch.zeros_like(exact)
    for _ in range(steps):
        inputs = [[*saved[r], tangents[r], *kept[r].values()] for r in range(4)]
        found = run_ranks(backward, inputs, node=2, gpu=2)
        kept = [{name: it[name] for name in names} for it in found]
        total += torch.cat([found[2 * node + gpu]["weight"] for gpu in range(2) for node in range(2)])
    return float((total / steps - exact).norm() / exact.norm())


def trained(plan: shardc.Plan, backend: str, steps: int, micro_batches: int) -> list[float]:
    """Relative errors of the mean of the gradients so far, of the weight of a layer that is not updated."""
    torch.manual_seed(0)
    model = nn.Linear(32, 16, bias=False)
    batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)) for i in range(4 * micro_batches)]
    own = [batches[dist.get_rank() * micro_batches + i] for i in range(micro_batches)]
    exact = torch.autograd.grad(sum(model(x).square().sum() for x in batches) / 4, model.weight)[0]
    model = shardc.compile(model, plan, backend=backend, progress=lambda line: None)
    total, errors = torch.zeros_like(exact), []
    for step in range(steps):
        for i, x in enumerate(own):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            model(x).square().sum().backward()
        total += model.weight.grad.full_tensor()
        errors.append(float((total / (step + 1) - exact).norm() / exact.norm()))
        model.weight.grad = None
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "backend"),
    [(PLAN, "inductor"), (shardc.Plan.paro(TWO_BY_TWO, "ING", error_feedback=True, **WIRES), "eager")],
    ids=["zero3 inductor", "ING eager"],
)
def test_real_processes_keep_residuals_from_step_to_step_and_over_micro_batches(
    plan: shardc.Plan, backend: str
) -> None:
    errors = run(trained, 4, plan, backend, 16, 2)[0]
    assert errors[-1] < errors[0] / 8


def test_profiling_leaves_residuals_as_they_were() -> None:
    topology = TWO_BY_TWO.with_links(Device("d", 1.0, 1.0, 1.0), node=Link(1.0, 1.0), gpu=Link(1.0, 1.0))
    plan = shardc.Plan.zero3(topology, error_feedback=True, **WIRES)
    with shardc.emulate(topology):
        model = shardc.compile(nn.Linear(32, 16, bias=False), plan, backend="eager", progress=lambda line: None)
        x = torch.randn(4, 32)
        model(x).sum().backward()
        before = dict(runtime_of(model).residuals)
        shardc.profile(model, x)
        after = runtime_of(model).residuals
    assert len(before) == 2 and all(after[name] is value for name, value in before.items())


# What it costs


def test_residuals_are_counted_as_memory() -> None:
    model = nn.Linear(32, 16, bias=False)
    named = {"weight": ((16, 32), torch.float32, True)}
    assert state_bytes(PLAN, named)["residuals"] == 4 * (16 * 32 + 8 * 32)
    assert "residuals" in PLAN.table(named)
    program = shardc.trace(model, PLAN, torch.randn(4, 32))
    found = footprint(program, calls_of(program, 2))
    assert found.peak.by_kind[RESIDUALS] >= 4 * (16 * 32 + 8 * 32)


# In a plan


def test_a_plan_with_feedback_goes_through_json_and_says_so() -> None:
    assert shardc.Plan.from_json(PLAN.to_json()) == PLAN
    assert "with error feedback" in str(PLAN)
    assert eval(repr(PLAN), {"Plan": shardc.Plan, "Topology": shardc.Topology}) == PLAN


@pytest.mark.parametrize("wire", [{}, {"reduce_wire": {"node": "bf16"}}])
def test_feedback_without_a_scaled_format_is_an_error(wire: dict) -> None:
    with pytest.raises(shardc.Error, match="error_feedback without a block-scaled reduce_wire"):
        shardc.Plan.zero3(TWO_BY_TWO, error_feedback=True, **wire)
