"""Runtime: updates, micro-batches, clearing and clipping on real Gloo processes, by value against one process.

Every story runs on 4 ranks as 2 nodes of 2 GPUs. The plan is PaRO's IIG unless it says otherwise: copies on the gpu
rung, accumulators on the gpu rung, optimizer on all, so each kind of state is there.
"""

from __future__ import annotations

import copy
import gc
import io
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardc
from passes.order import collective_order
from passes.text import to_text
from shardc import near
from shardc.lanes import Flying
from shardc.links import Device, Link
from training import error
from world import run

TOPOLOGY = shardc.Topology(node=2, gpu=2)
LIMIT = 1e-5


class Model(nn.Module):
    """5 rows lie unevenly on 2x2, 3 rows leave a rank without any; `up_weight` and `up.weight` want the same name in a
    graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 3)
        self.up_weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.up_weight * self.down(torch.relu(self.up(x)))


def plan(letters: str = "IIG", **options: Any) -> shardc.Plan:
    return shardc.Plan.paro(TOPOLOGY, letters, **options)


def data(index: int, rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * index + rank)) + 0.5


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


class Pair:
    """A sharded model and the one of one process, fed the same."""

    def __init__(self, of: shardc.Plan, change: Callable[[nn.Module], Any] = lambda model: None):
        torch.manual_seed(0)
        self.reference = Model()
        change(self.reference)
        self.model = shardc.compile(copy.deepcopy(self.reference), of, backend="eager", progress=lambda line: None)
        self.sharded = self.model._shardc.params
        self.index = 0

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.model, self.reference

    def optimizers(self, kind: type = torch.optim.SGD, **options: Any) -> list[torch.optim.Optimizer]:
        options = {"lr": 0.1, "foreach": False, **options}
        return [kind(model.parameters(), **options) for model in self.both]

    def micro_batch(self, scale: float = 1.0) -> None:
        """A forward and a backward with new data; the losses are equal."""
        ours = loss_of(self.model, data(self.index, dist.get_rank())) * scale
        ours.backward()
        parts = [loss_of(self.reference, data(self.index, rank)) * scale for rank in range(4)]
        (sum(parts) / 4).backward()
        assert abs(float(ours) - float(parts[dist.get_rank()])) < LIMIT * abs(float(ours))
        self.index += 1

    def check_outputs(self) -> None:
        x = data(99, dist.get_rank())
        with torch.no_grad():
            assert error(self.model(x), self.reference(x)) < LIMIT

    def check_grads(self) -> None:
        for (name, p), (_, q) in zip(*(model.named_parameters() for model in self.both), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert q.grad is None or error(p.grad.full_tensor(), q.grad) < LIMIT, name

    def check_params(self) -> None:
        for (name, p), (_, q) in zip(*(model.named_parameters() for model in self.both), strict=True):
            assert error(p.detach().full_tensor(), q.detach()) < LIMIT, name


# Updates: the forward behind one sees the new values

OPTIMIZERS = [
    (torch.optim.AdamW, dict(eps=1e-3, foreach=False)),
    (torch.optim.AdamW, dict(eps=1e-3, foreach=True)),
    (torch.optim.AdamW, dict(eps=1e-3, foreach=None, fused=True)),
    (torch.optim.SGD, dict(momentum=0.9, foreach=False)),
    (torch.optim.SGD, dict(momentum=0.9, foreach=True)),
]


def every_form_of_optimizer() -> None:
    pair = Pair(plan())
    for kind, options in OPTIMIZERS:
        optimizers = pair.optimizers(kind, **options)
        for _ in range(2):
            pair.micro_batch()
            for optimizer in optimizers:
                optimizer.step()
            pair.check_outputs()
            for optimizer in optimizers:
                optimizer.zero_grad()
        pair.check_params()


def test_forward_sees_what_any_form_of_optimizer_did() -> None:
    run(every_form_of_optimizer, 4)


def updates_by_hand() -> None:
    pair = Pair(plan())
    pair.check_outputs()
    for _ in range(2):
        pair.micro_batch()
        pair.check_outputs()
        for model in pair.both:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-0.1)
            model.zero_grad()
        pair.check_outputs()


def test_forward_sees_updates_by_hand_also_after_an_eval_forward() -> None:
    run(updates_by_hand, 4)


WAYS_TO_DOUBLE: list[Callable[[nn.Parameter], object]] = [
    lambda weight: weight.mul_(2),
    lambda weight: weight.detach().mul_(2),
    lambda weight: weight.data.mul_(2),
    lambda weight: torch._foreach_mul_([weight], 2.0),
    lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
    lambda weight: weight.__imul__(2),
    lambda weight: weight.__setitem__(slice(None), 2 * weight.detach()),
]


def doubled_in_every_way() -> None:
    pair = Pair(plan())
    pair.check_outputs()
    for double in WAYS_TO_DOUBLE:
        for model in pair.both:
            with torch.no_grad():
                double(model.up.weight)
        pair.check_outputs()
        assert not pair.model._shardc.stale


def test_forward_sees_what_changed_without_an_optimizer_in_whatever_way() -> None:
    run(doubled_in_every_way, 4)


def saved_and_loaded() -> None:
    model = Pair(plan()).model
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert {type(v) for v in loaded.values()} == {DTensor}
    assert all(
        torch.equal(v.full_tensor(), p.full_tensor()) for v, p in zip(loaded.values(), model.parameters(), strict=True)
    )


def test_state_dict_is_pickled_as_plain_dtensors() -> None:
    run(saved_and_loaded, 4)


def load_other_values() -> None:
    pair = Pair(plan())
    saved = copy.deepcopy(pair.model.state_dict()), copy.deepcopy(pair.reference.state_dict())
    optimizers = pair.optimizers()
    pair.micro_batch()
    for optimizer in optimizers:
        optimizer.step()
    pair.check_outputs()
    for model, state in zip(pair.both, saved, strict=True):
        model.load_state_dict(state)
    pair.check_outputs()


def test_forward_sees_what_load_state_dict_loaded() -> None:
    run(load_other_values, 4)


def double_unseen(pair: Pair) -> None:
    """In local tensors, of which the model has to be told."""
    for p in pair.model.parameters():
        p._local_tensor.mul_(2)
    with torch.no_grad():
        for q in pair.reference.parameters():
            q.mul_(2)
    pair.model.refresh()


def change_local_tensors() -> None:
    pair = Pair(plan())
    pair.check_outputs()
    double_unseen(pair)
    pair.check_outputs()


def test_refresh_tells_of_changes_that_nothing_else_shows() -> None:
    run(change_local_tensors, 4)


# Forwards that are begun ahead


def flying(pair: Pair) -> set[str]:
    """Purposes of hops that are under way before the forward is called."""
    begun = pair.model._shardc.begun
    values = begun.running.gi_frame.f_locals.values() if begun else []
    return {value.hop.purpose for value in values if isinstance(value, Flying)}


def begin_ahead() -> None:
    pair = Pair(plan())
    optimizers = pair.optimizers()
    pair.model.prefetch()
    assert not flying(pair), "there was no forward yet"
    for _ in range(3):
        pair.micro_batch()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.model.prefetch()
        assert "refresh" in flying(pair)
    begun = pair.model._shardc.begun
    pair.micro_batch()
    assert begun.running.gi_frame is None, "the forward went on with it"
    pair.check_grads()


def test_a_forward_is_begun_before_its_batch_is_there() -> None:
    run(begin_ahead, 4)


def change_what_was_begun_with() -> None:
    pair = Pair(plan())
    pair.micro_batch()
    for change in (lambda p: p.mul_(2), lambda p: torch._foreach_mul_([p], 0.5), lambda p: p.data.add_(1)):
        pair.model.prefetch()
        begun = pair.model._shardc.begun
        with torch.no_grad():
            for model in pair.both:
                change(next(model.parameters()))
        pair.micro_batch()
        assert begun.running.gi_frame is None and pair.model._shardc.begun is None
    pair.model.prefetch()
    double_unseen(pair)
    pair.micro_batch()


def test_what_was_begun_does_not_count_when_a_parameter_has_changed() -> None:
    run(change_what_was_begun_with, 4)


def begin_whole() -> None:
    model = shardc.compile(Model(), plan(), backend="inductor-whole", progress=lambda line: None)
    loss_of(model, data(0, 0)).backward()
    with pytest.raises(shardc.Error, match="cannot be begun ahead(.|\n)*backend='inductor'"):
        model.prefetch()


@pytest.mark.slow
def test_a_forward_that_is_compiled_as_a_whole_cannot_be_begun() -> None:
    run(begin_whole, 4)


# Micro-batches

ACCUMULATING = ["NNN", "III", "IIG", "GIG", "NGG", "GGG"]


@contextmanager
def unsynced(model: nn.Module, how: str) -> Iterator[None]:
    if how == "no_sync":
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def accumulate(letters: list[str]) -> None:
    for how, letter in zip(["no_sync", "switch"] * 3, letters, strict=False):
        pair = Pair(plan(letter))
        optimizers = pair.optimizers()
        for _ in range(2):
            for _ in range(2):
                with unsynced(pair.model, how):
                    pair.micro_batch(1 / 3)
            pair.micro_batch(1 / 3)
            pair.check_grads()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        pair.check_params()


@pytest.mark.parametrize("letters", [ACCUMULATING[:3], ACCUMULATING[3:]], ids=" ".join)
def test_micro_batches_sum_in_no_sync_and_by_the_switch(letters: list[str]) -> None:
    run(accumulate, 4, letters)


def sync_again(letters: str) -> None:
    pair = Pair(plan(letters))
    pair.micro_batch()
    pair.micro_batch()
    pair.check_grads()
    with pair.model.no_sync():
        pair.micro_batch()
        pair.micro_batch()
    pair.micro_batch()
    pair.check_grads()


@pytest.mark.parametrize("letters", ["IIG", "III", "GGG"])
def test_what_was_synced_is_not_reduced_again(letters: str) -> None:
    """Two synced backwards, then unsynced ones, then a synced one, all without zero_grad."""
    run(sync_again, 4, letters)


# Clearing


def clear_after(letters: str, clear: str, set_to_none: bool, accumulating: bool) -> None:
    pair = Pair(plan(letters))
    optimizers = pair.optimizers()
    pair.micro_batch()
    if accumulating:
        with pair.model.no_sync():
            pair.micro_batch()
    for model, optimizer in zip(pair.both, optimizers, strict=True):
        (model if clear == "model" else optimizer).zero_grad(set_to_none=set_to_none)
    with pair.model.no_sync():
        pair.micro_batch()
    pair.micro_batch()
    pair.check_grads()


def clear(letters: str) -> None:
    for who in ("model", "optimizer"):
        for set_to_none in (True, False):
            for accumulating in (False, True):
                clear_after(letters, who, set_to_none, accumulating)


@pytest.mark.parametrize("letters", ["IIG", "III"])
def test_zero_grad_of_model_or_optimizer_clears_all_also_in_the_middle(letters: str) -> None:
    run(clear, 4, letters)


# Clipping


def clip(letters: str) -> None:
    pair = Pair(plan(letters))
    optimizers = pair.optimizers()
    with pair.model.no_sync():
        pair.micro_batch()
    pair.micro_batch()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in pair.both]
    assert error(norms[0].full_tensor(), norms[1]) < LIMIT
    pair.check_grads()
    for optimizer in optimizers:
        optimizer.step()
    pair.check_params()


@pytest.mark.parametrize("letters", ["IIG", "NNN"])
def test_clipping_sees_the_norm_of_one_process(letters: str) -> None:
    run(clip, 4, letters)


def use_too_early(letters: str) -> None:
    pair = Pair(plan(letters))
    with pair.model.no_sync():
        pair.micro_batch()
    before = copy.deepcopy(pair.model.state_dict())
    uses = [lambda: nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)]
    uses += [pair.optimizers(kind, **options)[0].step for kind, options in OPTIMIZERS]
    for use in uses:
        with pytest.raises(shardc.Error, match="is not synced yet"):
            use()
    for name, value in pair.model.state_dict().items():
        assert torch.equal(value.full_tensor(), before[name].full_tensor()), name
    pair.micro_batch()
    pair.check_grads()


@pytest.mark.parametrize("letters", ["IIG", "III"])
def test_clip_and_step_on_unsynced_gradients_are_errors_that_change_nothing(letters: str) -> None:
    run(use_too_early, 4, letters)


# Forwards in other modes and other orders


def freeze_some() -> None:
    def freeze(model: nn.Module) -> None:
        model.up.weight.requires_grad_(False)
        model.down.bias.requires_grad_(False)

    pair = Pair(plan(), freeze)
    optimizers = pair.optimizers(torch.optim.AdamW, eps=1e-3)
    for _ in range(2):
        with pair.model.no_sync():
            pair.micro_batch()
        pair.micro_batch()
        pair.check_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pair.check_params()
    frozen = pair.sharded["up.weight"]
    assert frozen.copy is None
    assert frozen.tensor.grad is None


def test_frozen_parameters_rest_once_and_stay() -> None:
    run(freeze_some, 4)


def freeze_and_thaw() -> None:
    pair = Pair(plan())
    for trained in (True, False, True, False):
        for model in pair.both:
            model.get_parameter("up.weight").requires_grad_(trained)
        pair.micro_batch()
        pair.check_grads()
        for model in pair.both:
            model.zero_grad()
    assert len(shardc.programs(pair.model)) == 2


def test_a_parameter_that_freezes_and_thaws_has_one_program_for_either() -> None:
    run(freeze_and_thaw, 4)


def look_in_between() -> None:
    pair = Pair(plan())
    optimizers = pair.optimizers()
    for _ in range(2):
        with pair.model.no_sync():
            pair.micro_batch()
        pair.model.eval()
        pair.check_outputs()
        pair.model.train()
        pair.check_outputs()
        pair.micro_batch()
        pair.check_outputs()
        pair.check_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.check_outputs()


def test_forwards_without_gradients_in_between_change_nothing() -> None:
    run(look_in_between, 4)


def two_forwards_first(letters: str) -> None:
    pair = Pair(plan(letters))
    rank = dist.get_rank()
    losses = [loss_of(pair.model, data(i, rank)) for i in range(2)]
    for loss in losses:
        loss.backward()
    (sum(loss_of(pair.reference, data(i, r)) for i in range(2) for r in range(4)) / 4).backward()
    pair.check_grads()
    pair.model.zero_grad()
    pair.reference.zero_grad()
    sum(loss_of(pair.model, data(i, rank)) for i in range(2)).backward()
    (sum(loss_of(pair.reference, data(i, r)) for i in range(2) for r in range(4)) / 4).backward()
    pair.check_grads()


@pytest.mark.parametrize("letters", ["IIG", "GGG"])
def test_two_forwards_before_a_backward(letters: str) -> None:
    run(two_forwards_first, 4, letters)


def backward_twice() -> None:
    pair = Pair(plan())
    loss = loss_of(pair.model, data(0, dist.get_rank()))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_backward_twice_is_an_error() -> None:
    run(backward_twice, 4)


# Dtypes and the sum


def sum_instead() -> None:
    pair = Pair(plan(reduce="sum"))
    with pair.model.no_sync():
        pair.micro_batch()
    pair.micro_batch()
    for q in pair.reference.parameters():
        q.grad *= 4
    pair.check_grads()


def test_gradients_are_summed_on_request() -> None:
    run(sum_instead, 4)


def mixed(letters: str) -> None:
    """Against bf16 compute with fp32 gradients and an fp32 master."""
    mixed_plan = plan(letters, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pair = Pair(mixed_plan)
    ours, theirs = pair.optimizers(torch.optim.AdamW, eps=1e-3)
    rank, params = dist.get_rank(), list(pair.reference.parameters())
    for step in range(3):
        low = copy.deepcopy(pair.reference).bfloat16()
        for index in (2 * step, 2 * step + 1):
            with pair.model.no_sync() if index % 2 == 0 else nullcontext():
                loss_of(pair.model, data(index, rank).bfloat16()).backward()
            for r in range(4):
                part = loss_of(low, data(index, r).bfloat16())
                for p, grad in zip(params, torch.autograd.grad(part, list(low.parameters())), strict=True):
                    p.grad = grad.float() / 4 + (0 if p.grad is None else p.grad)
        for (name, p), q in zip(pair.model.named_parameters(), params, strict=True):
            assert p.dtype == torch.float32
            assert p.grad.dtype == torch.float32
            assert error(p.grad.full_tensor(), q.grad) < 0.02, (step, name)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(pair.model.parameters(), params, strict=True):
        assert error(p.detach().full_tensor(), q.detach()) < 2e-3


@pytest.mark.parametrize("letters", ["IIG", "GGG"])
def test_bf16_compute_with_fp32_reduction_trains_as_one_process(letters: str) -> None:
    run(mixed, 4, letters)


# Memory: copies and accumulators exist where the plan says, and nowhere else

SHAPES = {
    # letters: rows of `up.weight` (5; over all they travel as 8) in the copy, and in the accumulator
    "NNN": (None, 5),
    "III": (None, 3),
    "NNI": (5, 5),
    "IIG": (4, 4),
    "NGG": (5, None),
    "GNG": (None, 5),
    "GGG": (None, None),
}


def rows(value: Tensor | None) -> int | None:
    return None if value is None else len(value)


def hold_what_the_plan_says(letters: list[str]) -> None:
    for letter in letters:
        pair = Pair(plan(letter))
        up = pair.sharded["up.weight"]
        for _ in range(2):
            with pair.model.no_sync():
                pair.micro_batch()
                pair.micro_batch()
            assert (rows(up.copy), rows(up.accumulator)) == SHAPES[letter], letter
            pair.micro_batch()
            assert up.accumulator is None, letter
            assert up.tensor.grad.to_local().shape == up.tensor.to_local().shape
            pair.model.zero_grad()


@pytest.mark.parametrize("letters", [list(SHAPES)[:4], list(SHAPES)[4:]], ids=" ".join)
def test_copies_and_accumulators_exist_only_where_the_plan_says(letters: list[str]) -> None:
    run(hold_what_the_plan_says, 4, letters)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def less_ahead_where_gradients_lie() -> None:
    """On rank 0 there are some before the first micro-batch, too."""
    links = TOPOLOGY.with_links(Device("", 0.01, 1.0, 1.0), node=Link(0.05, 5.0), gpu=Link(0.5, 2.0))
    data = [torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    torch.manual_seed(0)
    reference = Layers()

    def compiled(**options: Any) -> nn.Module:
        of = shardc.Plan.zero3(links, **options)
        return shardc.compile(copy.deepcopy(reference), of, backend="eager", progress=lambda line: None)

    free = compiled()
    free(data[0])
    one, two = (shardc.simulate(shardc.programs(free)[0], micro_batches=n).peak_bytes for n in (1, 2))
    model = compiled(memory_limit=(one + two) // 2)
    if dist.get_rank() == 0:
        weight = next(model.parameters())
        weight.grad = torch.zeros_like(weight)
    for index, x in enumerate(data):
        model.set_requires_gradient_sync(index == 2)
        model(x).square().mean().backward()
        reference(x).square().mean().backward()
    made = {again: graph for (*_, again), graph in model._shardc.latest().backwards.items()}
    assert [*made] == ([False, True] if dist.get_rank() else [True])
    if dist.get_rank():
        assert to_text(made[False]) != to_text(made[True])
        assert collective_order(made[False]) == collective_order(made[True])
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < LIMIT


def test_where_gradients_lie_and_memory_is_limited_less_is_gathered_ahead() -> None:
    run(less_ahead_where_gradients_lie, 4)


# Several models


def two_models_in_turns() -> None:
    pairs, rank = [Pair(plan()), Pair(plan("GGG"))], dist.get_rank()
    one, other = (pair.model._shardc.lowering.lanes for pair in pairs)
    assert all(one[axis] is other[axis] for axis in ("gpu", "node"))
    optimizers = [optimizer for pair in pairs for optimizer in pair.optimizers()]
    for index in range(3):
        losses = [loss_of(pair.model, data(index, rank)) for pair in pairs]
        for loss in losses:
            loss.backward()
        for pair in pairs:
            (sum(loss_of(pair.reference, data(index, r)) for r in range(4)) / 4).backward()
            pair.check_grads()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for pair in pairs:
        pair.check_outputs()
        pair.check_params()


def test_models_of_one_job_have_process_groups_and_lanes_in_common() -> None:
    run(two_models_in_turns, 4)


# The end of a model


def trained_and_dropped(make: Callable[[], nn.Module]) -> tuple[weakref.ref[Any], weakref.ref[Any]]:
    model = shardc.compile(make(), plan(), backend="eager", progress=lambda line: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        loss_of(model, data(index, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()  # what ranks share was read by all
    return weakref.ref(model), weakref.ref(model._shardc)


def drop_models() -> None:
    for make in (Model, lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))):
        model_left, runtime_left = trained_and_dropped(make)
        gc.collect()  # the model, with its code that of Dynamo, and with this the programs
        gc.collect()  # what these have compiled
        assert model_left() is None
        assert runtime_left() is None
        assert near.held_bytes() <= 8 * mmap.PAGESIZE * len(near._NEAR)  # tables of arenas


def test_a_model_that_nobody_has_any_more_is_gone_whatever_dynamo_keeps() -> None:
    run(drop_models, 4)
