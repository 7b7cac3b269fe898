"""Deep models from shallow ones: which layers are equal, and what a few of them foretell of many."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc.links import Device, Link
from shardc.predict import Prediction, Predictor, line_through, predicted
from shardc.stacks import shortened, stacks
from shardc.times import busy_us, load_of
from shardc.topology import Topology

TOPOLOGY = Topology(node=4, gpu=4).with_links(
    Device("a device", 100, 1000, 80), node=Link(5.0, 10.0), gpu=Link(50.0, 3.0)
)


class Layer(nn.Module):
    def __init__(self, number: int, width: int = 256, kind: str = "full"):
        super().__init__()
        self.number, self.kind = number, kind
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    """Tokens in, a loss out."""

    def __init__(self, layers: int, kinds: tuple[str, ...] = ("full",), width: int = 256):
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(Layer(i, width, kinds[i % len(kinds)]) for i in range(layers))
        self.head = nn.Linear(width, 1024)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


IDS = torch.zeros((8, 128), dtype=torch.long, device="meta")


def deep(layers: int, **options: object) -> Deep:
    with torch.device("meta"):
        return Deep(layers, **options)


def test_layers_that_differ_in_their_number_alone_are_equal() -> None:
    (found,) = stacks(deep(12))
    assert (found.name, found.period, found.front) == ("layers", 1, 0)


def test_kinds_of_layers_take_turns() -> None:
    (found,) = stacks(deep(12, kinds=("local", "local", "full")))
    assert (found.period, found.front) == (3, 0)


def test_a_first_layer_of_its_own_kind_stays_in_front() -> None:
    model = deep(12)
    model.layers[0].kind = "dense"
    assert [(s.period, s.front) for s in stacks(model)] == [(1, 1)]


def test_layers_of_other_shapes_are_not_equal() -> None:
    assert stacks(nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(12)))) == []


def test_a_model_is_shortened_for_a_while_only() -> None:
    model = deep(12)
    before = dict(model.named_parameters())
    with shortened(stacks(model), 3):
        assert len(model.layers) == 3
    assert dict(model.named_parameters()) == before


PLANS = {
    "ddp": shardc.Plan.ddp,
    "zero1": shardc.Plan.zero1,
    "zero3": shardc.Plan.zero3,
    "hpz": shardc.Plan.hpz,
    "hsdp": shardc.Plan.hsdp,
    "frontier": lambda topology, **options: shardc.Plan.amsp(topology, p=2, g=4, os=16, **options),
}


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(deep(16), shardc.Plan.zero3(TOPOLOGY, param_dtype=torch.bfloat16), IDS)


@pytest.mark.parametrize("name", PLANS)
def test_a_deep_model_takes_what_shallow_ones_foretell(name: str, predictor: Predictor) -> None:
    plan = PLANS[name](TOPOLOGY, param_dtype=torch.bfloat16)
    whole = predicted(shardc.trace(deep(16), plan, IDS, keep=False), 1)
    found = predictor(plan)
    assert found.step_us == pytest.approx(whole.step_us, rel=0.02)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)
    assert found.compute_us == pytest.approx(whole.compute_us, rel=0.01)
    assert {m: us for m, us in found.moves_us.items() if us} == pytest.approx(
        {m: us for m, us in whole.moves_us.items() if us}, rel=0.02
    )


def test_a_step_without_micro_batches_is_what_is_simulated(predictor: Predictor) -> None:
    program = next(iter(predictor.traced.values()))
    timeline = shardc.simulate(program)
    found = predicted(program, 1)
    assert found.step_us - found.update_us == pytest.approx(timeline.step_us)
    assert sum(found.exposed_us.values()) == pytest.approx(timeline.exposed_us)
    assert found.peak_bytes == timeline.peak_bytes


def test_many_micro_batches_take_as_long_as_if_all_were_simulated(predictor: Predictor) -> None:
    plan = shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16)
    program = predictor.program(plan, min(predictor.traced))
    found, timeline = predicted(program, 6), shardc.simulate(program, micro_batches=6)
    assert found.step_us - found.update_us == pytest.approx(timeline.step_us)
    assert sum(found.exposed_us.values()) == pytest.approx(timeline.exposed_us)
    assert found.peak_bytes == timeline.peak_bytes


def test_less_is_gathered_ahead_where_memory_is_short(predictor: Predictor) -> None:
    plan = shardc.Plan.zero3(TOPOLOGY, param_dtype=torch.bfloat16)
    free = predictor(plan)
    tight = predictor(plan, memory_bytes=int(free.peak_bytes) - 1)
    assert tight.peak_bytes < free.peak_bytes
    assert tight.step_us >= free.step_us


def test_less_is_gathered_ahead_in_the_calls_that_a_compiled_model_would_do_it_in(predictor: Predictor) -> None:
    free = shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16)
    alone, several = (predictor(free, n).peak_bytes for n in (1, 4))
    limit = int(alone + several) // 2
    tight = shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16, memory_limit=limit)
    whole = predicted(shardc.trace(deep(16), tight, IDS, keep=False), 4)
    found = predictor(free, 4, memory_bytes=limit)
    assert found.peak_bytes <= limit and whole.peak_bytes <= limit
    assert found.step_us == pytest.approx(whole.step_us, rel=0.02)


def of_layers(compute_us: float, waits_us: float) -> Prediction:
    plan, waits = shardc.Plan.zero3(TOPOLOGY), {("reduce", "gpu"): waits_us}
    return Prediction(plan, compute_us + waits_us + 5.0, compute_us, 5.0, {}, {}, waits, 100.0, {"activations": 100.0})


def test_waits_go_on_as_they_grow_but_do_not_shrink() -> None:
    growing = line_through([(-9.0, of_layers(60, 2)), (10.0, of_layers(90, 3))])
    assert (growing.compute_us, growing.step_us) == (360, 360 + 12 + 5)
    shrinking = line_through([(-9.0, of_layers(60, 12)), (10.0, of_layers(90, 4))])
    assert (shrinking.compute_us, shrinking.step_us) == (360, 360 + 4 + 5)
    assert shrinking.exposed_us == {("reduce", "gpu"): 4}


def test_what_pays_for_a_bucket_is_decided_by_the_load_of_the_whole_model(predictor: Predictor) -> None:
    plan = shardc.Plan.paro(TOPOLOGY, "IIG", param_dtype=torch.bfloat16)
    predictor(plan)
    whole = shardc.trace(deep(16), plan, IDS, keep=False)
    for variant in whole.step():
        us = whole.times_us(whole.draft(variant), variant.half)
        assert predictor.loads[plan][variant.half] == pytest.approx(load_of(busy_us(us, TOPOLOGY)), rel=0.01)
