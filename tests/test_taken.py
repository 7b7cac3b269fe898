"""What a region may write over: values that it reads last, alone in memory that nobody else holds."""

from __future__ import annotations

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import shardc
from passes.accumulate import accumulate
from passes.memory import last_readers
from passes.parse import parse
from passes.partition import partition
from passes.regions import Region, regions
from passes.text import to_text
from shardc._torch import compile_graph
from shardc.links import Device, Link
from shardc.lower import Lowering, in_aten

TWO_BLOCKS = """
def forward(x: f32[4, 4], w: f32[4, 4]):
    'layers.0'
    a = mm(x, w)
    b = relu(a)
    'layers.1'
    c = mm(b, a)
    d = mul.Tensor(b, c)
    'layers.2'
    e = add.Tensor(d, c)
    return [e]
"""


def read_last(text: str) -> dict[str, str]:
    return {value.name: reader.name for value, reader in last_readers(parse(text)).items()}


def test_what_is_computed_may_be_written_over_by_whoever_reads_it_last() -> None:
    assert read_last(TWO_BLOCKS) == {"a": "c", "b": "d", "c": "e", "d": "e", "e": "output"}


def test_views_of_a_value_are_readers_of_it() -> None:
    text = TWO_BLOCKS.replace("    c = mm(b, a)", "    v = view(a, [16])\n    c = mm(b, a)").replace("[e]", "[e, v]")
    assert read_last(text)["a"] == "output"


def test_neither_what_a_hop_sends_nor_what_it_brings_is_written_over() -> None:
    text = """
def forward(x: f32[4, 4]):
    a = relu(x)
    g: f32[8, 4] = all_gather(a, 'gpu', 2, purpose='gather', params=['w'], again=True)
    b = neg(a)
    f: f32[8, 4] = wait(g)
    c = relu(f)
    return [b, c]
"""
    assert read_last(text) == {"a": "f", "b": "output", "c": "output"}


def test_inputs_are_the_callers_unless_it_has_given_them_up() -> None:
    graph = parse(TWO_BLOCKS)
    (x, w) = graph.find_nodes(op="placeholder")
    assert not {x, w} & last_readers(graph).keys()
    x.meta["given_up"] = True
    assert last_readers(graph)[x].name == "a"


def test_a_region_takes_what_all_its_calls_read_last() -> None:
    graph = parse(TWO_BLOCKS)
    assert_expected_inline(
        to_text(regions(graph, readers=last_readers(graph))),
        """\
def region_0(x0: f32[4, 4], x1: f32[4, 4]):
    a: f32[4, 4] = mm(x0, x1)
    b: f32[4, 4] = relu(a)
    return (a, b)

def region_1(taken0: f32[4, 4], taken1: f32[4, 4]):
    c: f32[4, 4] = mm(taken0, taken1)
    d: f32[4, 4] = mul.Tensor(taken0, c)
    return (c, d)

def region_2(taken0: f32[4, 4], taken1: f32[4, 4]):
    e: f32[4, 4] = add.Tensor(taken0, taken1)
    return (e,)

def forward(x: f32[4, 4], w: f32[4, 4]):
    'layers.0'
    region_0 = region_0(x, w)
    a: f32[4, 4] = region_0[0]
    b: f32[4, 4] = region_0[1]
    'layers.1'
    region_1 = region_1(b, a)
    c: f32[4, 4] = region_1[0]
    d: f32[4, 4] = region_1[1]
    'layers.2'
    region_2 = region_2(d, c)
    e: f32[4, 4] = region_2[0]
    return [e]
""",
    )


def test_layers_stay_one_region_where_a_value_of_all_is_read_last_by_one() -> None:
    graph = parse("""
def forward(x: f32[4], cos: f32[4]):
    t = neg(cos)
    'layers.0'
    a = mul.Tensor(x, t)
    'layers.1'
    b = mul.Tensor(a, t)
    'layers.2'
    c = mul.Tensor(b, t)
    return [c]
""")
    called = [node.target for node in regions(graph, readers=last_readers(graph)).nodes if node.name.startswith("reg")]
    assert [(region.name, region.taken) for region in called] == [("region_0", ()), *[("region_1", ())] * 3]


def given_up(joint: str) -> list[str]:
    _, backward = partition(parse(joint), ["w"])
    return [node.name for node in backward.nodes if node.meta.get("given_up")]


def test_a_backward_may_write_over_what_only_it_holds() -> None:
    joint = """
def joint(w: f32[4, 4], x: f32[4, 4], tangents_1: f32[4, 4]):
    y = mm(x, w)
    z = tanh(y)
    k = neg(z)
    s = mul.Tensor(z, z)
    g = mul.Tensor(tangents_1, s)
    h = mm(x, g)
    return ([{0}], {{'w': h}})
"""
    assert given_up(joint.format("k")) == ["y"]
    assert given_up(joint.format("y")) == [], "the caller has it as a result"


def test_sums_are_written_over_accumulators_unless_gradients_share_their_memory() -> None:
    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Parameter(torch.ones(4)) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.a * self.b + self.c + self.d) * x

    params = shardc.trace(Four(), shardc.Plan.ddp(shardc.Topology(gpu=2)), torch.ones(4), keep=False).params
    graph = parse("""
def backward(x: f32[4], tangents_1: f32[4]):
    g = mul.Tensor(tangents_1, x)
    h = mul.Tensor(g, x)
    return {'a': g, 'b': h, 'c': g, 'd': tangents_1}
""")
    accumulate(graph, params)
    given_up = {node.name for node in graph.nodes if node.meta.get("given_up")}
    assert given_up == {"accumulator_b"}, "a and c have one gradient, d has the caller's own"


@pytest.mark.slow
def test_inductor_writes_into_what_is_taken() -> None:
    graph = parse(TWO_BLOCKS)
    run = Lowering("inductor", {})(graph, "forward")
    x, w = torch.randn(2, 4, 4)
    a = x @ w
    b = a.relu()
    c = b @ a
    (found,) = run([x, w])
    torch.testing.assert_close(found, b * c + c)
    known: dict[str, Region] = {}
    regions(graph, known, last_readers(graph))
    (last,) = (region for region in known.values() if region.name == "region_2")
    lowering = Lowering("inductor", {})
    lowering.outer(graph, "forward")
    d, c = torch.randn(2, 4, 4)
    (e,) = lowering.compiled[last.key]([d, c])
    assert e.data_ptr() in (d.data_ptr(), c.data_ptr())


@pytest.mark.slow
def test_inductors_cache_tells_apart_what_may_be_written_over() -> None:
    graph = parse(TWO_BLOCKS)
    for name in ("d", "c", "d", "c"):
        known: dict[str, Region] = {}
        regions(graph, known, {n: reader for n, reader in last_readers(graph).items() if n.name == name})
        (last,) = (region for region in known.values() if region.name == "region_2")
        d, c = torch.randn(2, 4, 4)
        (e,) = compile_graph(in_aten(last.graph), last.taken)([d, c])
        assert e.data_ptr() == {"d": d, "c": c}[name].data_ptr()


@pytest.mark.slow
def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)))
    x = torch.randn(4, 8)
    topology = shardc.Topology(gpu=1).with_links(Device("a CPU", 1.0, 1.0, 1.0), gpu=Link(1.0, 1.0))
    with shardc.emulate(topology) as world:
        model = shardc.compile(copy.deepcopy(reference), shardc.Plan.zero3(world.topology), progress=lambda text: None)
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        once = [p.grad.full_tensor().clone() for p in model.parameters()]
        loss.backward()
        twice = [p.grad.full_tensor() for p in model.parameters()]
    torch.testing.assert_close(twice, [2 * grad for grad in once])
