"""What becomes a region, which regions are the same one, and what stays outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from torch import fx
from torch.utils._pytree import tree_leaves

from passes.parse import parse
from passes.regions import Region, block_of, regions
from passes.schedule import schedule
from passes.text import to_text
from shardc.testing import run_ranks
from test_schedule import layered


def cut(text: str) -> str:
    return to_text(regions(parse(text)))


def called(text: str) -> list[str]:
    """Names of the regions in the order in which they are called."""
    return [node.target.name for node in regions(parse(text)).nodes if isinstance(node.target, Region)]


def two_layers(first: str, second: str, inputs: str = "x: f32[4, 4]", head: str = "") -> str:
    """A layer that computes y, another that computes z."""
    lines = ["'layers.0'", *first.split("; "), "'layers.1'", *second.split("; "), "return [y, z]"]
    return f"{head}def forward({inputs}):\n" + "".join(f"    {line}\n" for line in lines)


def test_equal_layers_are_one_region() -> None:
    text = two_layers("y = relu(x); a = neg(y)", "z = relu(y); b = neg(z)")
    assert called(text) == ["region_0", "region_0"]


def test_known_regions_are_used_by_other_graphs() -> None:
    known: dict[str, Region] = {}
    for _ in range(2):
        regions(parse(two_layers("y = relu(x)", "z = neg(y)")), known)
    assert [region.name for region in known.values()] == ["region_0", "region_1"]
    assert [region.modules for region in known.values()] == [["layers.0", "layers.0"], ["layers.1", "layers.1"]]


DIFFERENT = {
    "ops": two_layers("y = relu(x)", "z = neg(y)"),
    "arguments": two_layers("y = mul.Tensor(x, 0.5)", "z = mul.Tensor(y, 0.25)"),
    "keyword arguments": two_layers("y = add.Tensor(x, x)", "z = add.Tensor(y, y, alpha=2)"),
    "dtypes": two_layers("y = relu(x)", "z = relu(v)", "x: f32[4], v: bf16[4]"),
    "shapes": two_layers("y = relu(x)", "z = relu(v)", "x: f32[4], v: f32[8]"),
    "strides": two_layers("y = relu(x)", "z = relu(v)", "x: f32[4, 4], v: f32[4, 4] @ [1, 4]"),
    "devices": two_layers("y = relu(x)", "z = relu(v)", "x: f32[4], v: f32[4] @ 'meta'"),
    "which input is which": two_layers("y = sub.Tensor(x, v)", "z = sub.Tensor(v, v)", "x: f32[4], v: f32[4]"),
    "which results are used": two_layers("y = relu(x); k = neg(y)", "z = relu(y); m = neg(z); n = neg(m)").replace(
        "return [y, z]", "return [y, z, m]"
    ),
}


@pytest.mark.parametrize("text", DIFFERENT.values(), ids=DIFFERENT)
def test_regions_that_differ_are_two(text: str) -> None:
    assert called(text) == ["region_0", "region_1"]


def test_seeds_stay_outside_so_that_layers_with_dropout_are_one_region() -> None:
    text = """\
def forward(x: f32[4]):
    ''
    s: i64[2] = prims.inductor_seeds(2, device('cpu'))
    'layers.0.drop'
    a: i64 = prims.inductor_lookup_seed(s, 0)
    r: f32[4] = prims.inductor_random([4], a, 'rand')
    y: f32[4] = mul.Tensor(x, r)
    'layers.1.drop'
    b: i64 = prims.inductor_lookup_seed(s, 1)
    q: f32[4] = prims.inductor_random([4], b, 'rand')
    z: f32[4] = mul.Tensor(y, q)
    return [z]
"""
    assert_expected_inline(
        cut(text),
        """\
def region_0(x0: i64, x1: f32[4]):
    r: f32[4] = prims.inductor_random([4], x0, 'rand')
    y: f32[4] = mul.Tensor(x1, r)
    return (y,)

def forward(x: f32[4]):
    ''
    s: i64[2] = prims.inductor_seeds(2, device('cpu'))
    'layers.0.drop'
    a: i64 = prims.inductor_lookup_seed(s, 0)
    'layers.1.drop'
    b: i64 = prims.inductor_lookup_seed(s, 1)
    'layers.0.drop'
    region_0 = region_0(a, x)
    y: f32[4] = region_0[0]
    'layers.1.drop'
    region_1 = region_0(b, y)
    z: f32[4] = region_1[0]
    return [z]
""",
    )


def test_constants_come_in_as_inputs_so_that_none_is_taken_for_another() -> None:
    head = "one: f32[2] = tensor([1.0, 1.0])\ntwo: f32[2] = tensor([2.0, 2.0])\n"
    text = two_layers("one = one; y = add.Tensor(x, one)", "two = two; z = add.Tensor(y, two)", "x: f32[2]", head)
    assert_expected_inline(
        cut(text),
        """\
one: f32[2] = tensor([1.0, 1.0])
two: f32[2] = tensor([2.0, 2.0])

def region_0(x0: f32[2], x1: f32[2]):
    y: f32[2] = add.Tensor(x0, x1)
    return (y,)

def forward(x: f32[2]):
    one: f32[2] = one
    two: f32[2] = two
    'layers.0'
    region_0 = region_0(x, one)
    y: f32[2] = region_0[0]
    'layers.1'
    region_1 = region_0(y, two)
    z: f32[2] = region_1[0]
    return [y, z]
""",
    )
    outer = regions(parse(text))
    owner: Any = outer.owning_module
    y, z = fx.GraphModule(owner, outer)(torch.zeros(2))
    assert (y.tolist(), z.tolist()) == ([1, 1], [3, 3])


CONDITION = """\
{0}def yes(x: f32[2]):
    {1}
    return (y,)

def no(x: f32[2]):
    y: f32[2] = neg(x)
    return (y,)

def also(x: f32[2]):
    {2}
    return (y,)

def forward(p: b8, x: f32[2]):
    'layers.0'
    yes = yes
    no = no
    c = higher_order.cond(p, yes, no, (x,))
    y: f32[2] = c[0]
    'layers.1'
    also = also
    d = higher_order.cond(p, also, no, (y,))
    z: f32[2] = d[0]
    return [z]
"""


def test_bodies_of_higher_order_ops_travel_with_their_region() -> None:
    text = CONDITION.format("", "y = relu(x)", "y = relu(x)")
    assert_expected_inline(
        cut(text),
        """\
def yes(x: f32[2]):
    y: f32[2] = relu(x)
    return (y,)

def no(x: f32[2]):
    y: f32[2] = neg(x)
    return (y,)

def region_0(x0: b8, x1: f32[2]):
    yes = yes
    no = no
    c = higher_order.cond(x0, yes, no, (x1,))
    y: f32[2] = c[0]
    return (y,)

def forward(p: b8, x: f32[2]):
    'layers.0'
    region_0 = region_0(p, x)
    y: f32[2] = region_0[0]
    'layers.1'
    region_1 = region_0(p, y)
    z: f32[2] = region_1[0]
    return [z]
""",
    )


def test_different_bodies_make_different_regions() -> None:
    assert called(CONDITION.format("", "y = relu(x)", "y = sin(x)")) == ["region_0", "region_1"]


def test_constants_in_bodies_tell_regions_apart() -> None:
    head = "one: f32[2] = tensor([1.0, 1.0])\ntwo: f32[2] = tensor([2.0, 2.0])\n\n"
    bodies = [f"k = {name}\n    y = mul.Tensor(x, k)" for name in ("one", "two")]
    text = CONDITION.format(head, *bodies)
    # Both bodies read as `self.k`: only what stands behind the name differs.
    graph = parse(text)
    for body, value in (("yes", 1.0), ("also", 2.0)):
        module = getattr(graph.owning_module, body)
        node = module.graph.find_nodes(op="get_attr")[0]
        node.target, module.k = "k", torch.full((2,), value)
        module.recompile()
    assert [node.target.name for node in regions(graph).nodes if isinstance(node.target, Region)] == [
        "region_0",
        "region_1",
    ]


def test_views_alone_make_no_region() -> None:
    text = """\
def forward(x: f32[4, 2], w: f32[2, 4]):
    'layers.0'
    t: f32[2, 4] = permute(x, [1, 0])
    v: f32[8] = view(x, [8])
    a: f32[8, 2] = all_gather(x, 'gpu', 2, params=['w'])
    f: f32[8, 2] = wait(a)
    return [t, v, f]
"""
    assert called(text) == []


def test_results_of_several_values_do_not_cross_a_border() -> None:
    text = """\
def forward(x: f32[4, 8]):
    'layers.0'
    t = topk(x, 2)
    'layers.1'
    u: f32[4, 2] = t[0]
    y: f32[4, 2] = relu(u)
    return [y]
"""
    assert_expected_inline(
        cut(text),
        """\
def region_0(x0: f32[4, 8]):
    t = topk(x0, 2)
    u: f32[4, 2] = t[0]
    return (u,)

def region_1(x0: f32[4, 2]):
    y: f32[4, 2] = relu(x0)
    return (y,)

def forward(x: f32[4, 8]):
    'layers.1'
    region_0 = region_0(x)
    u: f32[4, 2] = region_0[0]
    region_1 = region_1(u)
    y: f32[4, 2] = region_1[0]
    return [y]
""",
    )


def test_hops_cut() -> None:
    text = """\
def forward(w: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    y: f32[4, 4] = relu(x)
    n: f32[4, 4] = neg(x)
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    f: f32[4, 4] = wait(a)
    z: f32[4, 4] = mm(y, f)
    return [z]
"""
    assert_expected_inline(
        cut(text),
        """\
def region_0(x0: f32[4, 4]):
    y: f32[4, 4] = relu(x0)
    n: f32[4, 4] = neg(x0)
    return (y,)

def region_1(x0: f32[4, 4], x1: f32[4, 4]):
    z: f32[4, 4] = mm(x0, x1)
    return (z,)

def forward(w: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    region_0 = region_0(x)
    y: f32[4, 4] = region_0[0]
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    f: f32[4, 4] = wait(a)
    region_1 = region_1(y, f)
    z: f32[4, 4] = region_1[0]
    return [z]
""",
    )


@pytest.mark.parametrize(
    ("module", "block"),
    [("layers.3.attn.q", "layers.3"), ("layers.3", "layers.3"), ("a.1.b.2.c", "a.1"), ("head", ""), ("", "")],
)
def test_a_block_is_the_outermost_numbered_module(module: str, block: str) -> None:
    assert block_of(module) == block


@settings(max_examples=25, deadline=None)
@given(layered())
def test_regions_compute_what_the_graph_computes(text: str) -> None:
    graph = schedule(parse(text))
    outer = regions(graph)
    assert to_text(parse(to_text(outer))) == to_text(outer)
    torch.manual_seed(0)
    shapes = [node.meta["val"].shape for node in graph.find_nodes(op="placeholder")]
    inputs = [[torch.randn(shape) for shape in shapes] for _ in range(4)]
    both = [tree_leaves(run_ranks(it, inputs, node=2, gpu=2)) for it in (graph, outer)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
