"""The plain schedule: what goes before a block's compute, what behind it, and what stays."""

from __future__ import annotations

from collections import Counter

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from passes import ops
from passes.parse import parse
from passes.schedule import schedule
from passes.text import to_text


def scheduled(text: str) -> str:
    return to_text(schedule(parse(text)))


def test_gathers_go_before_the_compute_of_their_block_and_no_further() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(x, f)
    'layers.1.norm'
    z: f32[4, 4] = relu(y)
    'layers.1'
    b: f32[4, 4] = all_gather(v, 'gpu', 2, params=['layers.1.v'])
    g: f32[4, 4] = wait(b)
    o: f32[4, 4] = mm(z, g)
    return [o]
"""
    assert_expected_inline(
        scheduled(text),
        """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    'layers.1'
    b: f32[4, 4] = all_gather(v, 'gpu', 2, params=['layers.1.v'])
    'layers.0'
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(x, f)
    'layers.1'
    g: f32[4, 4] = wait(b)
    'layers.1.norm'
    z: f32[4, 4] = relu(y)
    'layers.1'
    o: f32[4, 4] = mm(z, g)
    return [o]
""",
    )


def test_chains_go_hop_by_hop_starts_before_waits_and_copies_last() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 5]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'node', 2, params=['layers.0.w'])
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, params=['layers.0.w'])
    d: f32[8, 4] = wait(c)
    e: f32[5, 4] = compact(d, 5, [2, 2])
    y: f32[4, 4] = mm(x, e)
    s: bf16[2, 4] = prims.convert_element_type(v, bf16)
    f: bf16[4, 4] = all_gather(s, 'node', 2, purpose='refresh', params=['layers.0.v'])
    g: bf16[4, 4] = wait(f)
    z: f32[4, 4] = mul.Tensor(y, g)
    return [z]
"""
    assert_expected_inline(
        scheduled(text),
        """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 5]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'node', 2, params=['layers.0.w'])
    s: bf16[2, 4] = prims.convert_element_type(v, bf16)
    f: bf16[4, 4] = all_gather(s, 'node', 2, purpose='refresh', params=['layers.0.v'])
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, params=['layers.0.w'])
    g: bf16[4, 4] = wait(f)
    d: f32[8, 4] = wait(c)
    e: f32[5, 4] = compact(d, 5, [2, 2])
    y: f32[4, 4] = mm(x, e)
    z: f32[4, 4] = mul.Tensor(y, g)
    return [z]
""",
    )


def test_reduces_go_behind_the_compute_of_the_block_where_their_gradient_is() -> None:
    text = """\
def backward(x: f32[4, 4], y: f32[4, 4], tangents_1: f32[4, 4]):
    'layers.1'
    g: f32[4, 4] = mm(x, tangents_1)
    m: f32[4, 4] = mul.Tensor(g, 0.5)
    r: f32[2, 4] = reduce_scatter(m, 'gpu', 2, params=['layers.1.w'])
    s: f32[2, 4] = wait(r)
    n: f32[2, 4] = all_reduce(s, 'node', 2, params=['layers.1.w'])
    o: f32[2, 4] = wait(n)
    h: f32[4, 4] = mm(tangents_1, x)
    'layers.0'
    i: f32[4, 4] = mm(y, h)
    t: f32[2, 4] = reduce_scatter(i, 'gpu', 2, params=['layers.0.w'])
    u: f32[2, 4] = wait(t)
    return {'layers.1.w': o, 'layers.0.w': u}
"""
    assert_expected_inline(
        scheduled(text),
        """\
def forward(x: f32[4, 4], y: f32[4, 4], tangents_1: f32[4, 4]):
    'layers.1'
    g: f32[4, 4] = mm(x, tangents_1)
    m: f32[4, 4] = mul.Tensor(g, 0.5)
    h: f32[4, 4] = mm(tangents_1, x)
    r: f32[2, 4] = reduce_scatter(m, 'gpu', 2, params=['layers.1.w'])
    'layers.0'
    i: f32[4, 4] = mm(y, h)
    'layers.1'
    s: f32[2, 4] = wait(r)
    n: f32[2, 4] = all_reduce(s, 'node', 2, params=['layers.1.w'])
    'layers.0'
    t: f32[2, 4] = reduce_scatter(i, 'gpu', 2, params=['layers.0.w'])
    'layers.1'
    o: f32[2, 4] = wait(n)
    'layers.0'
    u: f32[2, 4] = wait(t)
    return {'layers.1.w': o, 'layers.0.w': u}
""",
    )


def test_a_graph_without_modules_is_one_stretch() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    y: f32[4, 4] = relu(x)
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['w'])
    f: f32[4, 4] = wait(a)
    z: f32[4, 4] = mm(y, f)
    return [z]
"""
    assert_expected_inline(
        scheduled(text),
        """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['w'])
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = relu(x)
    z: f32[4, 4] = mm(y, f)
    return [z]
""",
    )


def test_compute_keeps_its_order() -> None:
    text = """\
def forward(x: f32[4]):
    'layers.0'
    c: f32[4] = neg(x)
    b: f32[4] = relu(x)
    ''
    a: f32[4] = add.Tensor(b, c)
    return [a]
"""
    assert scheduled(text) == text


@st.composite
def layered(draw: st.DrawFn) -> str:
    """Layers of one to three weights, each gathered over up to two axes right before its use; gradients likewise."""
    weights = [(i, j) for i in range(draw(st.integers(1, 3))) for j in range(draw(st.integers(1, 3)))]
    chains = [draw(st.lists(st.sampled_from(["node", "gpu"]), unique=True)) for _ in weights]
    rows = [4 // 2 ** len(axes) for axes in chains]
    inputs = [f"w{i}{j}: f32[{r}, 4]" for (i, j), r in zip(weights, rows, strict=True)]
    lines, x, grads = [], "x", []
    for (i, j), axes in zip(weights, chains, strict=True):
        if draw(st.booleans()):
            lines.append(f"'{'' if draw(st.booleans()) else f'layers.{i}.mlp'}'")
        w = f"w{i}{j}"
        for axis in axes:
            lines += [f"a{w}{axis} = all_gather({w}, '{axis}', 2, params=['layers.{i}.{j}'])"]
            lines += [f"b{w}{axis} = wait(a{w}{axis})"]
            w = f"b{w}{axis}"
        lines.append(f"y{i}{j} = mm({x}, {w})")
        x = g = f"y{i}{j}"
        for axis in reversed(axes):
            lines += [f"r{g}{axis} = reduce_scatter({g}, '{axis}', 2, params=['layers.{i}.{j}'])"]
            lines += [f"s{g}{axis} = wait(r{g}{axis})"]
            g = f"s{g}{axis}"
        grads.append(f"'layers.{i}.{j}': {g}")
    body = "".join(f"    {line}\n" for line in lines)
    return f"def joint({', '.join(inputs)}, x: f32[4, 4]):\n{body}    return ([{x}], {{{', '.join(grads)}}})\n"


def keys(graph: fx.Graph) -> Counter[ops.Hop]:
    return Counter(map(ops.hop, ops.hops(graph)))


@settings(max_examples=25, deadline=None)
@given(layered())
def test_a_schedule_is_a_topological_permutation_and_twice_is_once(text: str) -> None:
    before = parse(text)
    graph = schedule(parse(text))
    graph.lint()
    lines = [node.format_node() for node in graph.nodes]
    assert Counter(lines) == Counter(node.format_node() for node in before.nodes)
    assert keys(graph) == keys(before)
    assert [node.format_node() for node in schedule(graph).nodes] == lines
