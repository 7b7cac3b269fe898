"""Bad input at run time: every rank raises, says what is wrong, where, and what to do."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardc
from world import RankError, run

TOPOLOGY = shardc.Topology(node=2, gpu=2)
ONE = shardc.Plan.zero3(shardc.Topology(node=1, gpu=1))


def compiled(model: nn.Module, plan: shardc.Plan | None = None, **options: object) -> nn.Module:
    options = {"backend": "eager", "timeout_s": 10.0, **options}
    return shardc.compile(model, plan or shardc.Plan.zero3(TOPOLOGY), progress=lambda line: None, **options)


# The process group


def test_no_process_group() -> None:
    with pytest.raises(shardc.Error, match="the process group is not initialised") as error:
        compiled(nn.Linear(2, 2))
    assert "fix: torch.distributed.init_process_group(...) before, under torchrun with 4 ranks" in str(error.value)


def wrong_world() -> None:
    with pytest.raises(shardc.Error, match=re.escape("Topology(node=2, gpu=2) has 4 ranks, the job has 2")):
        compiled(nn.Linear(2, 2))


def test_world_of_another_size_than_the_mesh() -> None:
    run(wrong_world, 2)


def axes_across_hosts() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    wide = shardc.Plan.zero3(shardc.Topology(node=3, gpu=2))
    with pytest.raises(shardc.Error, match="a host runs 3 ranks .* an axis would straddle hosts") as error:
        compiled(nn.Linear(2, 2), wide)
    assert "fix: make the inner axes multiply to 3" in str(error.value)


def test_axes_that_contradict_the_launcher() -> None:
    run(axes_across_hosts, 6)


# Ranks that differ


def another_plan() -> None:
    rank = dist.get_rank()
    plan = shardc.Plan.zero3(TOPOLOGY) if rank != 2 else shardc.Plan.hpz(TOPOLOGY)
    start = time.monotonic()
    with pytest.raises(shardc.Error, match="Ranks disagree on the plan and model: line 3 .* on rank 2 and") as error:
        compiled(nn.Linear(2, 2), plan)
    assert "after_forward" in str(error.value)
    assert time.monotonic() - start < 10


def test_ranks_with_another_plan_are_named_on_every_rank() -> None:
    run(another_plan, 4)


def another_model() -> None:
    model = nn.Linear(3 if dist.get_rank() == 1 else 2, 2)
    with pytest.raises(shardc.Error, match=re.escape("'weight: torch.float32[2, 3] trainable=True' on rank 1 and 'w")):
        compiled(model)


def test_ranks_with_another_model_are_named_by_their_first_different_parameter() -> None:
    run(another_model, 4)


def one_stays_away() -> None:
    if dist.get_rank() == 3:
        time.sleep(4)
        return
    start = time.monotonic()
    with pytest.raises(shardc.Error, match="Not all ranks came to compare their plan and model within 2 s"):
        compiled(nn.Linear(2, 2), timeout_s=2.0)
    assert time.monotonic() - start < 10


def test_a_rank_that_never_compiles() -> None:
    run(one_stays_away, 4, timeout_s=30)


class Sometimes(nn.Module):
    """Rank 1 computes something else with the same parameters."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) if self.other else self.second(self.first(x))).sum()


def another_graph() -> None:
    model = compiled(Sometimes(dist.get_rank() == 1))
    with pytest.raises(shardc.Error, match="Ranks disagree on the collectives: .* on rank 1"):
        model(torch.ones(2, 2))


def test_ranks_whose_graphs_have_other_collectives() -> None:
    run(another_graph, 4)


# What this machine lacks


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(
        shardc.Error, match=r"torch 2\.9\.1\+cpu is older than shardc supports.\n  fix: Install torch 2.11"
    ):
        compiled(nn.Linear(2, 2))


def test_unknown_backend() -> None:
    with pytest.raises(shardc.Error, match=r"Unknown backend 'inducto'.\n  fix: Choose one of inductor, "):
        compiled(nn.Linear(2, 2), backend="inducto")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(shardc.Error, match=r"needs a C\+\+ compiler.*which this machine does not have") as error:
        compiled(nn.Linear(2, 2), backend="inductor")
    assert "or pass backend='eager'" in str(error.value)


# Models and plans


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        print("mean", y.mean().item())  # here
        return y.sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # here
            return y.sum()
        return -y.sum()


def here(cls: type) -> str:
    """file:line of the line that is marked in a class."""
    lines, start = inspect.getsourcelines(cls)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if line.rstrip().endswith('# here'))}"


@pytest.mark.parametrize("cls", [Prints, Branches])
def test_graph_break_names_the_users_line_and_the_remedy(cls: type) -> None:
    with pytest.raises(shardc.Error, match="cannot be captured as one graph") as error:
        shardc.trace(cls(), shardc.Plan.zero3(TOPOLOGY), torch.ones(2, 2))
    assert f"  at: {here(cls)}" in str(error.value)
    assert "  fix: " in str(error.value)


def breaks() -> None:
    plan = shardc.Plan.zero3(shardc.Topology(node=1, gpu=1))
    for cls in (Prints, Branches):
        model = compiled(cls(), plan)
        with pytest.raises(shardc.Error, match="cannot be captured as one graph") as error:
            model(torch.ones(2, 2))
        assert f"  at: {here(cls)}" in str(error.value)


def test_graph_break_of_a_compiled_model() -> None:
    run(breaks, 1)


class Thrice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        print("mean", x.mean())
        if x.sum() > 0:
            x = x + 1
        return x * x.max().item()


def test_every_graph_break_is_in_one_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(shardc.Error, match="3 places break it") as error:
        shardc.trace(Thrice(2, 2), shardc.Plan.zero3(TOPOLOGY), torch.ones(2, 2))
    for line in ('print("mean", x.mean())', "if x.sum() > 0:", "return x * x.max().item()"):
        assert re.search(rf"\d\. {re.escape(__file__)}:\d+: {re.escape(line)}\n     .*\n     fix: ", str(error.value))
    assert "mean" not in capsys.readouterr().out


class OneRow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 1:
            raise ValueError(f"one row please, not {len(x)}")
        return super().forward(x)


def test_the_models_own_exceptions_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="one row please, not 2"):
        shardc.trace(OneRow(2, 2), shardc.Plan.zero3(TOPOLOGY), torch.ones(2, 2))


def changes_that_sharding_rules_out() -> None:
    model = compiled(nn.Linear(2, 2), shardc.Plan.zero3(shardc.Topology(node=1, gpu=1)))
    assert model.to("cpu").float() is model
    with pytest.raises(shardc.Error, match="cannot be converted .from torch.float32 on cpu to torch.bfloat16") as error:
        model.to(torch.bfloat16)
    assert "pass the plan `param_dtype=`" in str(error.value)
    with pytest.raises(shardc.Error, match=r"`\.data` of a sharded parameter would change nothing") as error:
        model.weight.data = 2 * model.weight.data
    assert "parameter.copy_(values)" in str(error.value)


def test_conversion_and_assignment_to_data() -> None:
    run(changes_that_sharding_rules_out, 1)


# Ranks that are lost


def lost(directory: str, dies: bool, backend: str, timeout_s: int) -> None:
    """Rank 1 does not come to the second step. Each other rank writes down what it raises."""
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s))
    model = compiled(nn.Sequential(nn.Linear(4, 4, bias=False)), shardc.Plan.zero3(TOPOLOGY), backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
        if dies:
            os._exit(1)
        time.sleep(timeout_s + 5)
        return
    start = time.monotonic()
    with pytest.raises(shardc.Error) as error:
        model(torch.ones(2, 4)).sum().backward()
    Path(directory, f"rank{dist.get_rank()}").write_text(f"{time.monotonic() - start:.0f} {error.value}")
    time.sleep(timeout_s + 5 if dies else 0)  # so that it is the death of rank 1 that the others see


def check_all_named_it(directory: Path, timeout_s: int) -> None:
    for rank in (0, 2, 3):
        seconds, _, message = (directory / f"rank{rank}").read_text().partition(" ")
        assert int(seconds) < timeout_s + 5
        assert re.match(r"A collective failed: gather all_gather over (gpu|node) of 0.weight\.\n    \S", message)
        assert "fix: Look at the ranks of this axis" in message


ARRIVING = [("eager", 3), pytest.param("inductor-whole", 10, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("backend", "timeout_s"), ARRIVING)
def test_a_rank_that_never_arrives_is_noticed_by_all(tmp_path: Path, backend: str, timeout_s: int) -> None:
    run(lost, 4, str(tmp_path), False, backend, timeout_s)
    check_all_named_it(tmp_path, timeout_s)


def test_a_rank_that_dies_is_noticed_by_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1:\nthe process died"):
        run(lost, 4, str(tmp_path), True, "eager", 3)
    check_all_named_it(tmp_path, 3)


# Models that cannot be sharded


class Parameter(nn.Module):
    """One that the forward changes, returns, or gives to a dict that it returns."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Any:
        if self.how == "changes":
            with torch.no_grad():
                self.weight.mul_(2)
        y = (x @ self.weight).sum()
        return {"changes": y, "returns": (y, self.weight), "returns in a dict": {"y": y, "w": [self.weight]}}[self.how]


def lazily() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(2))


def on_dtensors() -> nn.Module:
    model = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    return model


def with_its_own_forward() -> nn.Module:
    model = nn.Linear(2, 2)
    model.forward = lambda x: x
    return model


def complex_numbers() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.relu, "compiles an nn.Module, not a builtin"),
    (lambda: nn.ReLU(), "ReLU has no parameters: there is nothing to shard"),
    (lazily, "Parameter '0.weight' has no shape yet"),
    (on_dtensors, "Parameter 'weight' is a DTensor: something has sharded the model before"),
    (complex_numbers, "Parameter 'weight' is torch.complex64"),
    (with_its_own_forward, "`forward` was assigned to this model object"),
    (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "'0' makes sparse gradients"),
    (lambda: torch.compile(nn.Linear(2, 2)), "wrapped in OptimizedModule"),
    (lambda: nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "wrapped in DistributedDataParallel"),
    (lambda: compiled(nn.Linear(2, 2), ONE), "compiled already"),
]


def unfit_models() -> None:
    for make, says in UNFIT:
        with pytest.raises(shardc.Error, match=says):
            compiled(make(), ONE)


def test_models_that_cannot_be_sharded() -> None:
    run(unfit_models, 1)


def forwards_that_touch_a_parameter() -> None:
    with pytest.raises(shardc.Error, match="changes the parameter 'weight' in place"):
        compiled(Parameter("changes"), ONE)(torch.ones(2, 2))
    for how in ("returns", "returns in a dict"):
        with pytest.raises(shardc.Error, match="returns the parameter 'weight' itself"):
            compiled(Parameter(how), ONE)(torch.ones(2, 2))


def test_a_parameter_that_the_forward_changes_or_returns() -> None:
    run(forwards_that_touch_a_parameter, 1)


# Loops that cannot be


def optimizer_of_the_model_before() -> None:
    model = nn.Linear(2, 2)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    model = compiled(model, ONE)
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(shardc.Error, match="SGD has parameters that the model had before shardc.compile"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_an_input_of_another_dtype_than_the_model_computes_in() -> None:
    plan = shardc.Plan.zero3(TOPOLOGY, param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4, bias=False)))
    with pytest.raises(shardc.Error, match=r"multiplies float32 by bfloat16 \(aten.mm.default\)") as error:
        shardc.trace(model[1], plan, torch.ones(2, 4))
    assert "1" in str(error.value) and "fix: inputs are not cast to the plan's param_dtype" in str(error.value)
    shardc.trace(model, plan, torch.ones(2, 4, dtype=torch.bfloat16))


def test_an_optimizer_built_before_compile() -> None:
    run(optimizer_of_the_model_before, 1)


def parameters_that_come_and_go() -> None:
    model = compiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ONE)
    expected = model(torch.ones(2, 2))
    model.append(nn.Linear(2, 2))
    with pytest.raises(shardc.Error, match="Parameter '2.weight' was added after shardc.compile"):
        model(torch.ones(2, 2))
    del model[2]
    kept = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(shardc.Error, match="Parameter '1.weight' was replaced or taken away"):
        model(torch.ones(2, 2))
    model[1].weight = kept
    assert torch.equal(model(torch.ones(2, 2)), expected)


def test_parameters_added_or_replaced_after_compile() -> None:
    run(parameters_that_come_and_go, 1)


def uses_past_the_forward() -> None:
    model = compiled(nn.Sequential(nn.Linear(2, 2)), ONE)
    with pytest.raises(shardc.Error, match="met a plain tensor outside of the model's forward") as error:
        model[0](torch.ones(2, 2))
    assert "parameter.full_tensor()" in str(error.value)
    with pytest.raises(shardc.Error, match="cannot be pickled"):
        pickle.dumps(model)
    x = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(shardc.Error, match="gradients of gradients"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_uses_that_a_compiled_model_does_not_have() -> None:
    run(uses_past_the_forward, 1)


# Plans


def override_of_nothing() -> None:
    plan = shardc.Plan.zero3(shardc.Topology(node=1, gpu=1), overrides={"wieght": {"params": "replicated"}})
    with pytest.raises(shardc.Error, match="override 'wieght' matches no parameter") as error:
        compiled(nn.Linear(2, 2), plan)
    assert "the closest names are 'weight'" in str(error.value)


def test_override_that_matches_no_parameter() -> None:
    run(override_of_nothing, 1)
