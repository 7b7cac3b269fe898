"""Buckets: what becomes one collective, what does not, and where copies are left out."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from expecttest import assert_expected_inline
from torch import fx

from passes import ops
from passes.bucket import bucket, choose_buckets
from passes.build import copy
from passes.parse import parse
from passes.refresh import refresh
from passes.sync import sync
from passes.text import to_text
from test_goldens import PLANS, trace

NAMES = ["w", "v", "u"]


def bucketed(text: str) -> str:
    return to_text(bucket(parse(text), NAMES))


def groups(text: str) -> list[list[str]]:
    return [[start.name for start in group] for group in choose_buckets(parse(text), NAMES)]


# What is together


def test_one_stretch_of_a_block_is_a_bucket_in_the_order_of_registration() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], u: f32[2, 4], x: f32[4, 4]):
    'layers.0.first'
    a = all_gather(v, 'gpu', 2, params=['v'])
    f = wait(a)
    y = mm(x, f)
    'layers.0.second'
    b = all_gather(w, 'gpu', 2, params=['w'])
    g = wait(b)
    z = mm(y, g)
    'layers.1'
    c = all_gather(u, 'gpu', 2, params=['u'])
    h = wait(c)
    o = mm(z, h)
    return [o]
"""
    assert groups(text) == [["b", "a"]]


@pytest.mark.parametrize(
    ("hop", "rest"),
    [
        ("all_gather(v, 'node', 2, params=['v'])", "f32[2, 4]"),
        ("all_gather(v, 'gpu', 2, params=['v'], again=True)", "f32[2, 4]"),
        ("all_gather(v, 'gpu', 2, purpose='refresh', params=['v'])", "f32[2, 4]"),
        ("all_gather(v, 'gpu', 2, params=['v'])", "bf16[2, 4]"),
    ],
    ids=["axis", "again", "purpose", "dtype"],
)
def test_hops_that_differ_stay_apart(hop: str, rest: str) -> None:
    text = f"""\
def forward(w: f32[2, 4], v: {rest}, x: f32[4, 4]):
    'layers.0'
    a = all_gather(w, 'gpu', 2, params=['w'])
    f = wait(a)
    b = {hop}
    g = wait(b)
    y = mm(x, f)
    z = relu(g)
    return [y, z]
"""
    assert groups(text) == []


def test_a_gather_belongs_to_its_first_use_wherever_it_stands() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a = all_gather(w, 'gpu', 2, params=['w'])
    f = wait(a)
    b = all_gather(v, 'gpu', 2, params=['v'])
    g = wait(b)
    y = mm(x, f)
    'layers.1'
    z = mm(y, g)
    o = mm(z, f)
    return [o]
"""
    assert groups(text) == []


def test_casts_of_shards_break_no_stretch() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: bf16[4, 4]):
    'layers.0'
    c = prims.convert_element_type(w, bf16)
    a = all_gather(c, 'gpu', 2, params=['w'])
    f = wait(a)
    y = mm(x, f)
    'elsewhere'
    d = prims.convert_element_type(v, bf16)
    'layers.0'
    b = all_gather(d, 'gpu', 2, params=['v'])
    g = wait(b)
    z = mm(y, g)
    return [z]
"""
    assert groups(text) == [["a", "b"]]


# How it is packed


def test_a_reduce_waits_for_the_last_gradient_and_its_sums_need_no_copy() -> None:
    text = """\
def backward(x: f32[2, 8], t: f32[8, 2], accumulator_w: f32[4, 4]):
    'layers.0'
    p: f32[8, 8] = mm(t, x)
    r: f32[4, 8] = reduce_scatter(p, 'gpu', 2, params=['v'])
    s: f32[4, 8] = wait(r)
    q: f32[8, 4] = slice.Tensor(p, 1, 0, 4)
    c: f32[8, 4] = clone(q, memory_format=contiguous_format)
    d: f32[4, 4] = reduce_scatter(c, 'gpu', 2, params=['w'])
    e: f32[4, 4] = wait(d)
    a: f32[4, 4] = add.Tensor(accumulator_w, e)
    return {'w': a, 'v': s}
"""
    assert_expected_inline(
        bucketed(text),
        """\
def forward(x: f32[2, 8], t: f32[8, 2], accumulator_w: f32[4, 4]):
    'layers.0'
    p: f32[8, 8] = mm(t, x)
    view_1: f32[2, 32] = view(p, [2, 32])
    q: f32[8, 4] = slice.Tensor(p, 1, 0, 4)
    c: f32[8, 4] = clone(q, memory_format=contiguous_format)
    view: f32[2, 16] = view(c, [2, 16])
    cat: f32[2, 48] = cat([view, view_1], 1)
    reduce_scatter: f32[1, 48] = reduce_scatter(cat, 'gpu', 2, params=['w', 'v'])
    wait: f32[1, 48] = wait(reduce_scatter)
    split_with_sizes = split_with_sizes(wait, [16, 32], 1)
    getitem: f32[1, 16] = split_with_sizes[0]
    view_2: f32[4, 4] = view(getitem, [4, 4])
    a: f32[4, 4] = add.Tensor(accumulator_w, view_2)
    getitem_1: f32[1, 32] = split_with_sizes[1]
    view_3: f32[4, 8] = view(getitem_1, [4, 8])
    return {'w': a, 'v': view_3}
""",
    )


CHAINS = """\
def backward(p: f32[8, 4], q: f32[4, 8]):
    'layers.0'
    a: f32[4, 4] = reduce_scatter(p, 'gpu', 2, params=['w'])
    b: f32[4, 4] = wait(a)
    c: f32[2, 4] = reduce_scatter(b, 'node', 2, params=['w'])
    d: f32[2, 4] = wait(c)
    e: f32[2, 8] = reduce_scatter(q, 'gpu', 2, params=['v'])
    f: f32[2, 8] = wait(e)
    g: f32[1, 8] = reduce_scatter(f, 'node', 2, params=['v'])
    h: f32[1, 8] = wait(g)
    i: f32[2, 4] = all_reduce(d, 'rack', 2, params=['w'])
    j: f32[2, 4] = wait(i)
    k: f32[1, 8] = all_reduce(h, 'rack', 2, params=['v'])
    l: f32[1, 8] = wait(k)
    return {'w': j, 'v': l}
"""


def test_a_chain_passes_the_bucket_on_without_a_copy() -> None:
    assert_expected_inline(
        bucketed(CHAINS),
        """\
def forward(p: f32[8, 4], q: f32[4, 8]):
    'layers.0'
    view: f32[4, 8] = view(p, [4, 8])
    view_1: f32[4, 8] = view(q, [4, 8])
    cat: f32[4, 16] = cat([view, view_1], 1)
    reduce_scatter: f32[2, 16] = reduce_scatter(cat, 'gpu', 2, params=['w', 'v'])
    wait: f32[2, 16] = wait(reduce_scatter)
    reduce_scatter_1: f32[1, 16] = reduce_scatter(wait, 'node', 2, params=['w', 'v'])
    wait_1: f32[1, 16] = wait(reduce_scatter_1)
    all_reduce: f32[1, 16] = all_reduce(wait_1, 'rack', 2, params=['w', 'v'])
    wait_2: f32[1, 16] = wait(all_reduce)
    split_with_sizes_2 = split_with_sizes(wait_2, [8, 8], 1)
    getitem_4: f32[1, 8] = split_with_sizes_2[0]
    view_6: f32[2, 4] = view(getitem_4, [2, 4])
    getitem_5: f32[1, 8] = split_with_sizes_2[1]
    view_7: f32[1, 8] = view(getitem_5, [1, 8])
    return {'w': view_6, 'v': view_7}
""",
    )


def test_what_leaves_a_chain_on_the_way_is_copied_out_and_packed_again() -> None:
    alone = CHAINS.replace(
        "    i: f32[2, 4] = all_reduce(d, 'rack', 2, params=['w'])\n    j: f32[2, 4] = wait(i)\n", ""
    )
    text = bucketed(alone.replace("'w': j", "'w': d"))
    assert_expected_inline(
        text.partition("wait_1: ")[2],
        """\
f32[1, 16] = wait(reduce_scatter_1)
    split_with_sizes_1 = split_with_sizes(wait_1, [8, 8], 1)
    getitem_3: f32[1, 8] = split_with_sizes_1[1]
    view_5: f32[1, 8] = view(getitem_3, [1, 8])
    k: f32[1, 8] = all_reduce(view_5, 'rack', 2, params=['v'])
    l: f32[1, 8] = wait(k)
    getitem_2: f32[1, 8] = split_with_sizes_1[0]
    view_4: f32[2, 4] = view(getitem_2, [2, 4])
    return {'w': view_4, 'v': l}
""",
    )


def test_chains_of_unequal_length_are_packed_again_at_each_hop() -> None:
    longer = CHAINS.replace("all_reduce(d, 'rack', 2, params=['w'])", "reduce_scatter(d, 'rack', 2, params=['w'])")
    text = bucketed(longer.replace("i: f32[2, 4]", "i: f32[1, 4]").replace("j: f32[2, 4]", "j: f32[1, 4]"))
    assert re.findall(r"cat.*?= cat\(\[(\w+), (\w+)\]", text) == [("view", "view_1"), ("view_4", "view_5")]


def test_a_parameter_without_dims_is_one_column() -> None:
    text = """\
def backward(p: f32, q: f32[3]):
    ''
    a: f32 = all_reduce(p, 'gpu', 2, params=['w'])
    b: f32 = wait(a)
    c: f32[3] = all_reduce(q, 'gpu', 2, params=['v'])
    d: f32[3] = wait(c)
    return {'w': b, 'v': d}
"""
    assert "all_reduce: f32[1, 4] = all_reduce(cat, 'gpu', 2, params=['w', 'v'])" in bucketed(text)


# Properties


def whole(name: str) -> list[str]:
    """Both halves of a plan with all its moves, as text."""
    program = trace(name)
    by_name = {param.layout.name: param for param in program.params.values()}
    copies = {place for place, param in program.params.items() if param.has_copy}
    forward, backward = program.after("partition")
    return [to_text(refresh(copy(forward), program.params, copies)), to_text(sync(copy(backward), by_name))]


def counted(graph: fx.Graph) -> Counter[tuple[str, str, str]]:
    """Bytes by kind, purpose and axis."""
    total: Counter[tuple[str, str, str]] = Counter()
    for start in ops.hops(graph):
        hop = ops.hop(start)
        total[hop.kind, hop.purpose, hop.axis] += ops.moved_bytes(start)
    return total


@pytest.mark.parametrize("name", PLANS)
def test_buckets_move_the_same_bytes_and_a_second_time_changes_nothing(name: str) -> None:
    for text in whole(name):
        before, once = parse(text), bucket(parse(text), list(trace(name).registered))
        assert counted(once) == counted(before)
        assert len(ops.hops(once)) < len(ops.hops(before)) or not ops.hops(before)
        printed = to_text(once)
        assert to_text(bucket(once, list(trace(name).registered))) == printed
