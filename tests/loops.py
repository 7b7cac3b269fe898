"""Loops: how people train, a function each. It takes a model, trains it and returns what it saw (losses, mostly); it
does not know whether the model is sharded. Micro-batches are the same on every rank, so one process sees the same."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import models
import shardc
from training import LIMIT, adamw, batch, error

STEPS = range(3)
Loop = Callable[[nn.Module], list[float]]


def data(step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    return batch(step, micro, 0)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The plain step."""
    return finish(model(*data(step)), optimizer)


def finish(loss: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """What follows a forward."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def value(x: Tensor) -> float:
    return float(x.full_tensor() if hasattr(x, "full_tensor") else x)


# Optimizers and gradients


def plain(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    return [update(model, optimizer, step) for step in STEPS]


def groups_schedule_and_clipping(model: nn.Module) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = adamw(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        loss.backward()
        norm = clip_grad_norm_(trained, 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen += [loss.item(), value(norm)]
    return seen


def clipping_by_value(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        loss.backward()
        clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def grad_scaler(model: nn.Module, scale: float = 1024.0) -> list[float]:
    optimizer, scaler = adamw(model.parameters()), torch.amp.GradScaler("cpu", init_scale=scale)
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.item(), scaler.get_scale()]
    return seen


def grad_scaler_that_skips_steps(model: nn.Module) -> list[float]:
    return grad_scaler(model, scale=3e38)


def compiled_optimizer(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=True)
    step_of = torch.compile(optimizer.step, backend="aot_eager")
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        loss.backward()
        step_of()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def update_by_hand(model: nn.Module) -> list[float]:
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
        seen.append(loss.item())
    return seen


def autograd_grad(model: nn.Module) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        with torch.no_grad():
            for p, grad in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
                if grad is not None:
                    p.sub_(0.1 * grad)
        seen.append(loss.item())
    return seen


def hooks_on_parameters(model: nn.Module) -> list[float]:
    seen: list[float] = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda grad: grad * 0.5)
            p.register_post_accumulate_grad_hook(lambda p: seen.append(value(p.grad.detach().norm())))
    optimizer = adamw(model.parameters())
    losses = [update(model, optimizer, step) for step in STEPS]
    return losses + sorted(seen)


def optimizer_in_the_backward(model: nn.Module) -> list[float]:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step_and_free(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step_and_free)
    seen = []
    for step in STEPS:
        loss = model(*data(step))
        loss.backward()
        seen.append(loss.item())
    return seen


# Accumulation


def accumulation(model: nn.Module, skip: Callable[[bool], Any]) -> list[float]:
    """`skip(True)` is a context in which gradients do not sync."""
    optimizer = adamw(model.parameters())
    seen = []
    for step in STEPS:
        for micro in range(3):
            with skip(micro < 2):
                loss = model(*data(step, micro)) / 3
                loss.backward()
            seen.append(loss.item())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def accumulation_with_no_sync(model: nn.Module) -> list[float]:
    """As under DDP."""
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    return accumulation(model, lambda skip: no_sync() if skip else contextlib.nullcontext())


def accumulation_with_a_switch(model: nn.Module) -> list[float]:
    """As under FSDP2."""
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)

    def skip(yes: bool) -> Any:
        switch(not yes)
        return contextlib.nullcontext()

    return accumulation(model, skip)


def accumulation_of_synced_gradients(model: nn.Module) -> list[float]:
    """A loop that knows of neither."""
    return accumulation(model, lambda skip: contextlib.nullcontext())


def gradients_cleared_half_way(model: nn.Module) -> list[float]:
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)
    optimizer = adamw(model.parameters())
    seen = []
    for step, clear in enumerate((model, optimizer, model, optimizer)):
        for micro in range(3):
            if micro == 1:
                clear.zero_grad(set_to_none=step < 2)
            switch(micro == 2)
            loss = model(*data(step, micro))
            loss.backward()
            seen.append(loss.item())
        optimizer.step()
        model.zero_grad(set_to_none=step % 2 == 0)
    return seen


# Forwards and backwards


def forwards_begun_ahead(model: nn.Module) -> list[float]:
    """Some of them for nothing: parameters are written to, another forward comes, the loop begins twice."""
    prefetch = getattr(model, "prefetch", lambda: None)
    prefetch()
    optimizer, seen = adamw(model.parameters()), []
    for step in (0, 1, 2, 1, 0):
        seen.append(update(model, optimizer, step))
        prefetch()
        if step == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
        elif step == 2:
            seen += evaluation(model, step)
            prefetch()
            prefetch()
    return seen


def autocast(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    seen = []
    for step in STEPS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(*data(step))
        seen.append(finish(loss, optimizer))
    return seen


def evaluation(model: nn.Module, step: int) -> list[float]:
    model.eval()
    with torch.no_grad():
        seen = [model(*data(step)).item()]
    with torch.inference_mode():
        seen.append(model(*data(step)).item())
    model.train()
    return seen


def evaluation_before_and_between_steps(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    with torch.inference_mode():
        seen = [model(*data(0)).item()]
    for step in STEPS:
        seen += [update(model, optimizer, step), *evaluation(model, step)]
    return seen


def evaluation_in_the_middle_of_an_accumulation(model: nn.Module) -> list[float]:
    switch = getattr(model, "set_requires_gradient_sync", lambda on: None)
    optimizer = adamw(model.parameters())
    seen = []
    for step in STEPS:
        for micro in range(2):
            switch(micro == 1)
            loss = model(*data(step, micro))
            loss.backward()
            seen += [loss.item(), *evaluation(model, step)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def two_forwards_before_a_backward(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    return [finish(model(*data(step)) + model(*data(step, 1)), optimizer) for step in STEPS]


def backwards_in_another_order(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    seen = []
    for step in STEPS:
        first, second = model(*data(step)), model(*data(step, 1))
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [first.item(), second.item()]
    return seen


def retained_graph(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    loss = model(*data(0))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return [loss.item(), model(*data(0)).item()]


def checkpoint_around_the_model(model: nn.Module) -> list[float]:
    def doubled(*args: Tensor) -> Tensor:
        return 2 * model(*args)

    optimizer = adamw(model.parameters())
    return [finish(checkpoint(doubled, *data(step), use_reentrant=False), optimizer) for step in STEPS]


# The model changes


def of_lengths(model: nn.Module, lengths: list[int]) -> list[float]:
    """A step for each length of the batch."""
    optimizer = adamw(model.parameters())
    batches = ((x[:, :length].clone() for x in data(step)) for step, length in enumerate(lengths))
    return [finish(model(*batch), optimizer) for batch in batches]


def changing_shapes(model: nn.Module) -> list[float]:
    return of_lengths(model, [2, 3, 4, 2, 3, 4])


def hooks_on_modules(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    doubled = model.register_forward_hook(lambda module, args, out: 2 * out)
    inner = next(model.children()).register_forward_hook(lambda module, args, out: out + 1)
    seen = [update(model, optimizer, 0)]
    doubled.remove()
    seen.append(update(model, optimizer, 1))
    inner.remove()
    return [*seen, update(model, optimizer, 2)]


def freezing_and_thawing(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    first = next(model.parameters())
    seen = []
    for step in range(4):
        first.requires_grad_(step % 2 == 0)
        seen.append(update(model, optimizer, step))
    first.requires_grad_(True)
    return seen


def changed_attribute(model: nn.Module) -> list[float]:
    """A plain attribute that the forward reads; the norm of the examples' GPT has one."""
    norm = next(m for m in model.modules() if isinstance(m, nn.RMSNorm))
    optimizer = adamw(model.parameters())
    before, seen = norm.eps, []
    for step in STEPS:
        norm.eps = (before, 0.5, before)[step]
        seen.append(update(model, optimizer, step))
    return seen


# Averages and copies


def average_of_weights(model: nn.Module) -> list[float]:
    optimizer = adamw(model.parameters())
    average = [p.detach().clone() for p in model.parameters()]
    seen = []
    for step in STEPS:
        seen.append(update(model, optimizer, step))
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p, 0.1)
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            p.copy_(a)
    return [*seen, model(*data(0)).item()]


def averaged_model(model: nn.Module) -> list[float]:
    """torch's own, which copies the model."""
    average, optimizer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), adamw(model.parameters())
    seen = []
    for step in STEPS:
        seen.append(update(model, optimizer, step))
        average.update_parameters(model)
        seen.append(average(*data(step)).item())
    return seen


def deep_copy(model: nn.Module) -> list[float]:
    """From then on each is trained by itself."""
    optimizer = adamw(model.parameters())
    seen = [update(model, optimizer, 0)]
    other = copy.deepcopy(model)
    seen.append(update(model, optimizer, 1))
    optimizer = adamw(other.parameters())
    seen += [update(other, optimizer, 2), update(other, optimizer, 1)]
    return [*seen, model(*data(2)).item()]


LOOPS: list[Loop] = [
    plain,
    groups_schedule_and_clipping,
    clipping_by_value,
    grad_scaler,
    grad_scaler_that_skips_steps,
    compiled_optimizer,
    update_by_hand,
    autograd_grad,
    hooks_on_parameters,
    optimizer_in_the_backward,
    accumulation_with_no_sync,
    accumulation_with_a_switch,
    accumulation_of_synced_gradients,
    gradients_cleared_half_way,
    forwards_begun_ahead,
    autocast,
    evaluation_before_and_between_steps,
    evaluation_in_the_middle_of_an_accumulation,
    two_forwards_before_a_backward,
    backwards_in_another_order,
    retained_graph,
    checkpoint_around_the_model,
    changing_shapes,
    hooks_on_modules,
    freezing_and_thawing,
    changed_attribute,
    average_of_weights,
    averaged_model,
    deep_copy,
]
LASTING: list[Loop] = [hooks_on_parameters, optimizer_in_the_backward]
"""They leave hooks behind."""
COMPILED: list[Loop] = [
    gradients_cleared_half_way,
    forwards_begun_ahead,
    evaluation_before_and_between_steps,
    averaged_model,
]
"""The few that a test runs through Inductor too."""

# Optimizers of torch that take DTensors, form by form. The others say no at their first step: Adafactor, LBFGS, Rprop,
# SparseAdam (dense gradients), and the fused forms of SGD and Adagrad.
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"foreach": form}) for name in ("Adadelta", "Adagrad", "Adamax", "ASGD") for form in (False, True)),
    *((name, {"foreach": form}) for name in ("NAdam", "RAdam", "RMSprop", "SGD") for form in (False, True)),
    *((name, form) for name in ("Adam", "AdamW") for form in ({"foreach": False}, {"foreach": True}, {"fused": True})),
    ("Muon", {}),
]


def with_optimizer(model: nn.Module, name: str, options: dict[str, Any]) -> list[float]:
    """Muon takes matrices only."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    make = getattr(torch.optim, name)
    eps = (
        {"eps": 1e-3} if name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop") else {}
    )
    optimizer = make(matrices if name == "Muon" else model.parameters(), **options, **eps)
    return [update(model, optimizer, step) for step in STEPS]


# Against one process


def compiled(model: nn.Module, plan: shardc.Plan, backend: str) -> nn.Module:
    return shardc.compile(model, plan, backend=backend, progress=lambda line: None)


def small_gpt() -> nn.Module:
    torch.manual_seed(0)
    return models.gpt(layers=1)


def worst(loop: Callable[[nn.Module], list[float]], model: nn.Module, reference: nn.Module) -> float:
    """The largest relative error of all that the loop saw and of the parameters in the end."""
    found, expected = torch.tensor(loop(model)), torch.tensor(loop(reference))
    assert found.shape == expected.shape
    same = (found == expected) | (found.isnan() & expected.isnan())  # a norm of infinite gradients is itself infinite
    away = ((found - expected).abs() / expected.abs().clamp_min(1e-30)).nan_to_num(torch.inf)
    seen = away.masked_fill(same, 0.0).max()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float(seen), *(error(p.detach().full_tensor(), q.detach()) for p, q in pairs))


def run_loops(names: list[str], plan: shardc.Plan, backend: str) -> dict[str, float]:
    """One model after the other way of training it, from the same values each time."""
    by_name = {loop.__name__: loop for loop in LOOPS}
    model = compiled(small_gpt(), plan, backend)
    start = copy.deepcopy(model.state_dict())
    errors = {}
    for name in names:
        model.load_state_dict(start)
        model.zero_grad()
        errors[name] = worst(by_name[name], model, small_gpt())
        if by_name[name] in LASTING:
            model = compiled(small_gpt(), plan, backend)
    return errors


def too_far(errors: dict[str, float], limit: float = LIMIT) -> dict[str, float]:
    return {name: e for name, e in errors.items() if not e <= limit}
