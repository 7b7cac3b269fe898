"""On a GPU: one rank under NCCL, through Inductor and Triton, against the same training without shardc."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import models
import shardc
from matrix import Case, errors_of, too_far
from shardc.emulate import let_pass
from training import adamw, batch

TOPOLOGY = shardc.Topology(node=1, gpu=1)
NAMES = ["gpt", "checkpointed gpt", "uneven, tied, frozen, 0-dim, unused", "llama", "flex attention", "branching"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module, **options: object) -> nn.Module:
    plan = shardc.Plan.zero3(TOPOLOGY, **options)
    return shardc.compile(model, plan, progress=lambda line: None)


@pytest.mark.parametrize("name", NAMES)
def test_models_train_as_without_shardc(name: str) -> None:
    assert too_far(errors_of([Case(name, "zero3", "inductor", 2)], TOPOLOGY)) == {}


def scaled_losses(model: nn.Module, autocast: bool) -> tuple[list[float], float]:
    """float16 with loss scaling; a scale that starts so high that the first two steps are skipped. And the last one."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, backoff_factor=2.0**-15)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(8):
        ids, labels = on_gpu(step)
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, scaler.get_scale()


def on_gpu(step: int) -> list[Tensor]:
    return [x.cuda() for x in batch(step, 0, 0)]


def test_float16_with_a_grad_scaler_trains() -> None:
    reference = models.gpt().cuda()
    expected, scale = scaled_losses(copy.deepcopy(reference), autocast=True)
    found, own_scale = scaled_losses(compiled(reference, param_dtype=torch.float16), autocast=False)
    assert own_scale == scale == 2.0**10
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_models_of_one_job_train_in_turns_as_without_shardc() -> None:
    """They have process groups and lanes in common."""
    references = [models.gpt().cuda() for _ in range(2)]
    found, expected = ([] for _ in range(2))
    for losses, trained in ((found, [compiled(copy.deepcopy(m)) for m in references]), (expected, references)):
        optimizers = [adamw(model.parameters()) for model in trained]
        for step in range(3):
            now = [model(*on_gpu(step + own)) for own, model in enumerate(trained)]
            for loss in now:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.extend(float(loss.detach()) for loss in now)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


def test_dropout_repeats_with_the_seed_of_its_generator() -> None:
    model = compiled(models.Dropping())
    x = torch.ones(40, 10, device="cuda")
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seen.append(model(x).detach())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_parameters_on_meta_start_on_the_gpu() -> None:
    with torch.device("meta"):
        model = models.gpt()
    model = compiled(model)
    assert all(p.to_local().is_cuda for p in model.parameters())
    assert torch.isfinite(model(*on_gpu(0)))


def test_a_model_on_the_gpu_is_traced_there() -> None:
    program = shardc.trace(models.gpt().cuda(), shardc.Plan.zero3(TOPOLOGY), *on_gpu(0))
    values = [node.meta.get("val") for variant in program.step() for node in program.graph(variant).nodes]
    assert {value.device.type for value in values if isinstance(value, Tensor)} == {"cuda"}


def test_calibrate_says_how_fast_the_gpu_is() -> None:
    device = shardc.calibrate(TOPOLOGY).computes
    assert device.name == torch.cuda.get_device_name()
    assert 10 < device.tflops < 3000
    assert device.memory_gb_per_s > 100
    assert {"products16", "products32", "attention16", "attention32", "memory"} < device.tables.keys()


def test_time_passes_by_the_clock_while_the_gpu_is_busy() -> None:
    x, passing = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    let_pass(1e-6)  # the first is compiled
    torch.cuda.synchronize()
    for _ in range(50):
        x @ x
    with torch.cuda.stream(passing):
        begin.record()
        let_pass(0.02)
        end.record()
    end.synchronize()
    assert 20 <= begin.elapsed_time(end) < 23  # it begins when a product that runs is over
