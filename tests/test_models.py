"""Models that people train: equal to one process on real ranks, started on the meta device, traced for any world."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
import shardc
from matrix import Case, errors_of, mean, plans_of, quietly, table, too_far
from models import MODELS, Call
from passes.build import outputs
from passes.regions import Region, regions
from passes.turn import from_params
from shardc import near
from shardc.testing import assert_collectives
from training import LIMIT, batch, error
from world import pages_return_when_freed, run

TOPOLOGY = shardc.Topology(node=2, gpu=2)
PLANS = plans_of(TOPOLOGY)
ZERO3 = PLANS["zero3"]


def mib() -> int:
    """The most memory that this process has had so far."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10


# Training


@pytest.mark.slow
def test_every_model_trains_as_in_one_process(record_property: Callable[[str, object], None]) -> None:
    """Each under one plan, with one and two micro-batches; `examples/bench/models.py` has all."""
    topology = shardc.Topology(node=2, gpu=1)
    plans = list(plans_of(topology))
    cases = [Case(model, plans[i % len(plans)], "eager", 1 + i // 4 % 2) for i, model in enumerate(MODELS)]
    errors = run(errors_of, 2, cases, topology)[0]
    record_property("matrix", table(errors))
    assert too_far(errors) == {}


@pytest.mark.slow
def test_compiled_model_trains_as_in_one_process() -> None:
    cases = [Case("checkpointed gpt", "IIG", "inductor", 2)]
    assert too_far(run(errors_of, 4, cases, TOPOLOGY)[0]) == {}


# Dropout


@pytest.mark.slow
def test_dropout_has_one_mask_for_forward_and_backward() -> None:
    cases = [("eager", False), ("eager", True)]
    assert max(e for errors in run(dropout_errors, 4, cases) for e in errors) < LIMIT


@pytest.mark.slow
def test_compiled_dropout_has_one_mask_for_forward_and_backward() -> None:
    cases = [("inductor", False), ("inductor", True)]
    assert max(e for errors in run(dropout_errors, 4, cases) for e in errors) < LIMIT


def dropout_errors(cases: list[tuple[str, bool]]) -> list[float]:
    return [dropout_error(backend, checkpointed) for backend, checkpointed in cases]


def dropout_error(backend: str, checkpointed: bool) -> float:
    """The gradient against that of the mask that the output shows. The mask comes from the seed and from nothing
    else."""
    model, reference = quietly(models.Dropping(checkpointed=checkpointed), ZERO3, backend), models.Dropping()
    rank = dist.get_rank()
    x = torch.randn(40, 10, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(rank)
    y, other = model(x), model(x)
    y.sum().backward()
    torch.manual_seed(rank)
    again = model(x)
    assert torch.equal(y, again)
    assert not torch.equal(y, other)
    mask = (y != 0).float()
    assert 0.3 < float(mask.mean()) < 0.7
    reference.masked(x, mask).sum().backward()
    return max(
        error(y.detach(), reference.masked(x, mask).detach()),
        error(model.weight.grad.full_tensor(), mean(reference.weight.grad)),
    )


def masks() -> list[bytes]:
    """Of two forwards on a rank; all ranks are seeded alike."""
    model = quietly(models.Dropping(), ZERO3)
    torch.manual_seed(0)
    first, second = model(torch.ones(40, 10)), model(torch.ones(40, 10))
    after = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(model(torch.ones(40, 10)), first)
    model(torch.ones(40, 10))
    assert torch.equal(torch.rand(()), after)
    return [(y != 0).numpy().tobytes() for y in (first, second)]


def test_dropout_differs_by_rank_and_call_and_repeats_with_the_seed() -> None:
    found = [mask for of_rank in run(masks, 4) for mask in of_rank]
    assert len(set(found)) == len(found)


def test_dropout_seeds_are_saved_and_masks_computed_again() -> None:
    program = traced(models.DroppingStack(checkpointed=True))
    assert not [n for n in program.backward.nodes if n.target is torch.ops.prims.inductor_seeds.default]
    assert [n for n in program.backward.nodes if n.target is torch.ops.prims.inductor_random.default]


def test_what_only_a_generator_can_repeat_is_saved() -> None:
    program = shardc.trace(models.Choosing(), ZERO3, torch.randn(2, 4))
    assert [n.name for n in saved(program) if "multinomial" in n.name]
    assert not [n for n in program.backward.nodes if n.target is torch.ops.aten.multinomial.default]


# A start on the meta device


@pytest.mark.slow
def test_start_on_meta_has_the_same_values_on_every_mesh() -> None:
    run(start_on_meta, 4)


def start_on_meta() -> None:
    meshes = [ZERO3, PLANS["zero1"], shardc.Plan.zero3(shardc.Topology(gpu=4)), shardc.Plan.ddp(TOPOLOGY)]
    for make in (models.gpt, models.tied_llama, models.Convolutional):
        started = [values(quietly(on_meta(make), plan)) for plan in meshes]
        for other in started[1:]:
            assert all(torch.equal(other[name], value) for name, value in started[0].items())
        assert all(v.isfinite().all() for v in started[0].values())
        assert float(max(v.abs().max() for v in started[0].values())) > 0
    buffers_are_right()
    init_is_used()
    training_goes_on()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    with torch.device("meta"):
        return make()


def values(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return parameters | {name: b for name, b in model.named_buffers() if b.is_floating_point()}


def buffers_are_right() -> None:
    model, real = quietly(on_meta(models.llama), ZERO3), models.llama()
    for (name, found), (_, expected) in zip(model.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(found, expected), name


def init_is_used() -> None:
    model = quietly(on_meta(models.Bare), ZERO3, init=lambda module: nn.init.constant_(module.weight, 0.25))
    assert torch.equal(model.weight.detach().full_tensor(), torch.full((5, 3), 0.25))
    for init, says in ((None, "no way to initialise"), (lambda module: None, "weight' without a value")):
        with pytest.raises(shardc.Error, match=says):
            quietly(on_meta(models.Bare), ZERO3, init=init)


def training_goes_on() -> None:
    model = quietly(on_meta(models.tied_llama), ZERO3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(*batch(0, 0, dist.get_rank())).logits.square().mean().backward()
    assert all(p.grad.full_tensor().isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_nothing_of_full_size_is_ever_allocated() -> None:
    assert max(run(growth_mib, 4)) < 400


def growth_mib() -> int:
    """How much the peak grows with a model of 400 MiB: 100 of parameters, 100 of gradients; and of layers of 16 one
    that computes, two that are gathered ahead, the gradients of two, and what is on its way to ranks beside this one:
    320 to 360, by how far these are. All parameters or all gradients at full size would be 500 and more. What others
    have for this one is theirs, though it is mapped here."""
    step(quietly(on_meta(lambda: models.Wide(32, 3)), ZERO3), 32)
    pages_return_when_freed()
    before = mib()
    step(quietly(on_meta(lambda: models.Wide(2048, 25)), ZERO3), 2048)
    return mib() - before - (near.held_bytes() >> 20)  # others have as much


def step(model: nn.Module, width: int) -> None:
    model(torch.ones(1, width)).backward()


# What the graphs hold


def traced(model: nn.Module, plan: shardc.Plan = ZERO3, call: Call = models.plain) -> shardc.Program:
    """The program of a language model."""
    if call is models.plain:
        return shardc.trace(model, plan, *batch(0, 0, 0))
    ids, labels = batch(0, 0, 0)
    return shardc.trace(model, plan, ids, labels=labels)


def saved(program: shardc.Program) -> list[torch.fx.Node]:
    return outputs(program.forward)[1]


def shapes_of_weights(model: nn.Module) -> set[tuple[int, ...]]:
    """Full shapes with at least two dims, as they are and transposed; no activation of the models has one of them."""
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    return shapes | {shape[::-1] for shape in shapes}


# Those that take ids and labels, and none of whose activations has the shape of a weight.
TELLING = ["gpt", "checkpointed gpt", "uneven, tied, frozen, 0-dim, unused", "batch norm", "derived weights", "lstm"]
TELLING += ["oddly named", "llama", "tied llama", "checkpointed llama", "qwen3", "gpt2", "bert"]


@pytest.mark.parametrize("name", TELLING)
def test_zero3_saves_nothing_of_full_size_but_what_turns(name: str) -> None:
    make, call = MODELS[name]
    model = make()
    program = traced(model, ZERO3, call)
    forward = program.halves[0]
    turned = {node for node, layout in program.layouts.items() if not layout.after_forward}
    turns = {node for node, names in from_params(forward, program.layouts).items() if names <= turned}
    kept = [n for n in outputs(forward)[1] if n.name not in program.params and n not in turns]
    found = {n.name: tuple(n.meta["val"].shape) for n in kept}
    full = shapes_of_weights(model) | {(6, 10), (10, 6)}
    assert {n: shape for n, shape in found.items() if shape in full} == {}


def test_derived_weights_are_gathered_again() -> None:
    program = traced(models.Derived())
    for name in ("left", "right", "head"):
        assert_collectives(program.backward).count(1, "gather", name, axis="gpu").count(1, "gather", name, axis="node")
    assert [n for n in program.backward.nodes if n.target is torch.ops.aten.cat.default]


def test_tied_weight_is_gathered_once_for_both_uses() -> None:
    program = traced(models.tied_llama(), ZERO3, models.as_transformers)
    for graph in (program.forward, program.backward):
        assert_collectives(graph).count(1, "gather", "model.embed_tokens.weight", axis="gpu")
    assert_collectives(program.backward).count(1, "reduce", "model.embed_tokens.weight", axis="gpu")


def test_backward_gathers_only_what_it_uses() -> None:
    backward = assert_collectives(traced(models.gpt()).backward)
    backward.none("gather", "embed.weight").none("gather", "head.weight").none("gather", "norm.weight")
    backward.count(1, "gather", "blocks.1.mlp.up.weight", axis="gpu")
    wide = assert_collectives(shardc.trace(models.Wide(6, 3), ZERO3, torch.ones(1, 6)).backward)
    wide.none("gather", "layers.0.weight").count(1, "gather", "layers.1.weight", axis="gpu")


def test_without_reshard_the_backward_gathers_nothing() -> None:
    program = traced(models.gpt(), shardc.Plan.zero3(TOPOLOGY, reshard=False))
    assert_collectives(program.forward).count(1, "gather", "head.weight", axis="node")
    assert_collectives(program.backward).none("gather")


def test_hpz_backward_gathers_inside_the_node() -> None:
    program = traced(models.gpt(), PLANS["hpz"])
    assert_collectives(program.forward).count(1, "gather", "head.weight", axis="node")
    backward = assert_collectives(program.backward).none("gather", axis="node")
    backward.count(1, "gather", "blocks.1.mlp.up.weight", axis="gpu")


# Trace


def test_trace_needs_neither_values_nor_a_process_group() -> None:
    model, ids = on_meta(models.llama), torch.zeros(2, 4, dtype=torch.long, device="meta")
    program = shardc.trace(model, shardc.Plan.zero3(shardc.Topology(node=128, gpu=8)), ids, labels=ids)
    assert not dist.is_initialized()
    assert_collectives(program.forward).count(1, "gather", "lm_head.weight", axis="node")


def test_trace_leaves_the_model_as_it_was() -> None:
    model = models.tied_llama()
    state = [*model.named_parameters(), *model.named_buffers()]
    before = [(name, id(value), value.detach().clone()) for name, value in state]
    shardc.trace(model, ZERO3, *batch(0, 0, 0))
    state = [*model.named_parameters(), *model.named_buffers()]
    for (name, identity, value), (same_name, found) in zip(before, state, strict=True):
        assert (name, identity) == (same_name, id(found))
        assert torch.equal(value, found)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_trace_of_a_70b_layer_takes_little_memory() -> None:
    gc.collect()
    before = mib()
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    model = on_meta(lambda: models.llama(vocab_size=128256, hidden_size=8192, intermediate_size=28672, **heads))
    ids = torch.zeros(1, 4096, dtype=torch.long, device="meta")
    program = shardc.trace(model, shardc.Plan.hpz(shardc.Topology(node=128, gpu=8)), ids, labels=ids)
    assert_collectives(program.backward).none("gather", axis="node")
    assert mib() - before < 1024


# Distinct regions


@pytest.mark.parametrize("plan", [ZERO3, shardc.Plan.ddp(TOPOLOGY)], ids=["zero3", "ddp"])
@pytest.mark.parametrize("make", [models.gpt, models.DroppingStack, models.checkpointed_gpt])
def test_deeper_models_have_no_more_distinct_regions(make: Callable[[int], nn.Module], plan: shardc.Plan) -> None:
    assert distinct(make(4), plan) == distinct(make(6), plan)


def distinct(model: nn.Module, plan: shardc.Plan) -> set[str]:
    """Keys of the regions of a forward that refreshes and of a backward that syncs."""
    known: dict[str, Region] = {}
    program = traced(model, plan)
    for graph in (program.refreshed(), program.variation(synced=True)):
        regions(graph, known)
    return set(known)
