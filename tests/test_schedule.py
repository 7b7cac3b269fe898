"""The schedule: which hop goes on its lane when, what is waited for where, and what stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
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


def test_a_gather_starts_before_the_block_in_front_and_is_waited_for_behind_it() -> None:
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
    'layers.1.norm'
    z: f32[4, 4] = relu(y)
    'layers.1'
    g: f32[4, 4] = wait(b)
    o: f32[4, 4] = mm(z, g)
    return [o]
""",
    )


def test_chains_go_hop_by_hop_side_by_side() -> None:
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
    d: f32[8, 4] = wait(c)
    e: f32[5, 4] = compact(d, 5, [2, 2])
    y: f32[4, 4] = mm(x, e)
    g: bf16[4, 4] = wait(f)
    z: f32[4, 4] = mul.Tensor(y, g)
    return [z]
""",
    )


def test_a_reduce_starts_behind_the_block_of_its_gradient_and_is_waited_for_at_the_next_border() -> None:
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
    r: f32[2, 4] = reduce_scatter(m, 'gpu', 2, params=['layers.1.w'])
    h: f32[4, 4] = mm(tangents_1, x)
    s: f32[2, 4] = wait(r)
    n: f32[2, 4] = all_reduce(s, 'node', 2, params=['layers.1.w'])
    'layers.0'
    i: f32[4, 4] = mm(y, h)
    'layers.1'
    o: f32[2, 4] = wait(n)
    'layers.0'
    t: f32[2, 4] = reduce_scatter(i, 'gpu', 2, params=['layers.0.w'])
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
    y: f32[4, 4] = relu(x)
    f: f32[4, 4] = wait(a)
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


# Lanes


FIVE = [f"w{i}" for i in range(5)]
FORWARD = "\n".join(
    [
        f"def forward({', '.join(f'{w}: f32[2, 4]' for w in FIVE)}, y: f32[4, 4]):",
        *(
            f"    'layers.{i}'\n    a{i} = all_gather({w}, 'gpu', 2, params=['{w}'])\n"
            f"    f{i} = wait(a{i})\n    y{i} = mm({f'y{i - 1}' if i else 'y'}, f{i})"
            for i, w in enumerate(FIVE)
        ),
        "    return [y4]\n",
    ]
)
FULL_BYTES = 4 * 4 * 4


def events(graph: fx.Graph) -> str:
    """Starts, waits and products by name."""
    return " ".join(node.name for node in graph.nodes if ops.is_hop(node) or node.name[0] in "ygm")


def takes(**us: float) -> Callable[[fx.Node], float]:
    """Microseconds by the first letter of a name."""
    return lambda node: us.get(node.name[0], 0.0)


def test_nothing_is_gathered_ahead_where_the_window_is_nothing() -> None:
    found = events(schedule(parse(FORWARD), takes(a=1, y=1), window_bytes=0))
    assert found == "y a0 f0 y0 a1 f1 y1 a2 f2 y2 a3 f3 y3 a4 f4 y4"


def test_a_lane_that_would_be_idle_gets_the_next_gather() -> None:
    found = events(schedule(parse(FORWARD), takes(a=1, y=1), window_bytes=FULL_BYTES))
    assert found == "y a0 a1 f0 y0 a2 f1 y1 a3 f2 y2 a4 f3 y3 f4 y4"


def test_a_lane_would_not_be_idle_if_a_block_took_a_little_longer() -> None:
    found = events(schedule(parse(FORWARD), takes(a=1, y=1), window_bytes=3 * FULL_BYTES))
    assert found == "y a0 a1 a2 f0 y0 a3 f1 y1 a4 f2 y2 f3 y3 f4 y4"


def test_short_gathers_go_as_far_ahead_as_the_window_lets_them() -> None:
    found = events(schedule(parse(FORWARD), takes(a=0.1, y=1), window_bytes=3 * FULL_BYTES))
    assert found == "y a0 a1 a2 a3 f0 y0 a4 f1 y1 f2 y2 f3 y3 f4 y4"


def test_a_long_gather_fills_its_lane_and_the_others_wait_on_the_ground() -> None:
    found = events(schedule(parse(FORWARD), takes(a=10, y=1), window_bytes=3 * FULL_BYTES))
    assert found == "y a0 a1 f0 y0 a2 f1 y1 a3 f2 y2 a4 f3 y3 f4 y4"


def test_what_is_small_does_not_take_the_place_of_what_is_needed_before() -> None:
    text = """\
def forward(w0: f32[2, 4], w1: f32[2, 4], w2: f32[4, 4], w3: f32[2, 4], y: f32[4, 4]):
    'layers.0'
    a0 = all_gather(w0, 'gpu', 2, params=['w0'])
    f0 = wait(a0)
    y0 = mm(y, f0)
    'layers.1'
    a1 = all_gather(w1, 'gpu', 2, params=['w1'])
    f1 = wait(a1)
    y1 = mm(y0, f1)
    'layers.2'
    a2 = all_gather(w2, 'gpu', 2, params=['w2'])
    f2 = wait(a2)
    y2 = mm(f2, y1)
    'layers.3'
    a3 = all_gather(w3, 'gpu', 2, params=['w3'])
    f3 = wait(a3)
    y3 = mm(y2, f3)
    return ([y3], [])
"""
    found = events(schedule(parse(text), takes(a=1, y=4), window_bytes=2 * FULL_BYTES))
    assert found == "y a0 a1 f0 y0 a2 f1 y1 a3 f2 y2 f3 y3"


BACKWARD = """\
def backward(v: f32[2, 4], t: f32[4, 4]):
    'layers.2'
    g2 = mm(t, t)
    r2 = reduce_scatter(g2, 'gpu', 2, params=['w2'])
    s2 = wait(r2)
    'layers.1'
    g1 = mm(g2, t)
    r1 = reduce_scatter(g1, 'gpu', 2, params=['w1'])
    s1 = wait(r1)
    'layers.0'
    a = all_gather(v, 'gpu', 2, params=['v'])
    f = wait(a)
    g0 = mm(g1, f)
    r0 = reduce_scatter(g0, 'gpu', 2, params=['w0'])
    s0 = wait(r0)
    return {'w2': s2, 'w1': s1, 'w0': s0}
"""


SLOW_REDUCES = """\
def backward(t: f32[4, 4]):
    'layers.2'
    g2 = mm(t, t)
    r2 = reduce_scatter(g2, 'gpu', 2, params=['w2'])
    s2 = wait(r2)
    'layers.1'
    g1 = mm(t, t)
    r1 = reduce_scatter(g1, 'gpu', 2, params=['w1'])
    s1 = wait(r1)
    'layers.0'
    g0 = mm(t, t)
    r0 = reduce_scatter(g0, 'gpu', 2, params=['w0'])
    s0 = wait(r0)
    return {'w2': s2, 'w1': s1, 'w0': s0}
"""


def test_gradients_wait_for_their_lane_while_compute_goes_on() -> None:
    assert events(schedule(parse(SLOW_REDUCES), takes(g=1, r=10))) == "g2 r2 g1 g0 r1 r0 s2 s1 s0"


@pytest.mark.parametrize(("window_bytes", "pile"), [(2 * FULL_BYTES, 1), (0, 2)])
def test_compute_waits_where_more_gradients_would_wait_than_the_window_or_the_pile_holds(
    window_bytes: int, pile: int
) -> None:
    found = events(schedule(parse(SLOW_REDUCES), takes(g=1, r=10), window_bytes=window_bytes, pile=pile))
    assert found == "g2 r2 g1 s2 r1 g0 r0 s1 s0"


def test_compute_waits_for_each_reduce_where_one_gradient_may_wait_and_nothing_is_gathered_ahead() -> None:
    found = events(schedule(parse(SLOW_REDUCES), takes(g=1, r=10), window_bytes=0, pile=1))
    assert found == "g2 r2 s2 g1 r1 s1 g0 r0 s0"


def test_without_a_window_no_more_gradients_wait_than_eight_stretches_make() -> None:
    layer = """\
    'layers.{i}'
    g{i} = mm(t, t)
    r{i} = reduce_scatter(g{i}, 'gpu', 2, params=['w{i}'])
    s{i} = wait(r{i})
"""
    layers = "".join(layer.format(i=i) for i in reversed(range(11)))
    returned = ", ".join(f"'w{i}': s{i}" for i in range(11))
    text = f"def backward(t: f32[4, 4]):\n{layers}    return {{{returned}}}\n"
    found = events(schedule(parse(text), takes(g=1, r=100)))
    assert found.startswith("g10 r10 g9 g8 g7 g6 g5 g4 g3 s10 r9 g2 s9 r8 g1 s8 r7 g0")


def test_gradients_are_there_until_their_last_hop_has_come() -> None:
    text = SLOW_REDUCES.replace("s2 = wait(r2)", "q2 = reduce_scatter(r2, 'node', 2, params=['w2'])\n    s2 = wait(q2)")
    found = events(schedule(parse(text), takes(g=4, r=1, q=100), window_bytes=2 * FULL_BYTES, pile=1))
    assert found == "g2 r2 q2 g1 r1 s1 g0 r0 s0 s2"


def test_a_reduce_goes_before_a_gather_that_has_time() -> None:
    found = events(schedule(parse(BACKWARD), takes(g=4, r=1, a=1), window_bytes=0, pile=1))
    assert found == "g2 r2 s2 g1 r1 a s1 f g0 r0 s0"


def test_a_gather_that_has_none_goes_before_a_reduce() -> None:
    graph = schedule(parse(BACKWARD.replace("g2 = mm(t, t)", "g2 = mm(t, t)\n    m = relu(t)")), takes(g=1, r=5, a=1))
    assert events(graph).startswith("a g2")


def test_a_lane_stays_idle_for_a_gather_that_will_be_there_soon_rather_than_begin_a_long_reduce() -> None:
    text = """\
def backward(v: f32[1, 4], t: f32[4, 4]):
    'layers.2'
    g2 = mm(t, t)
    r2 = reduce_scatter(g2, 'gpu', 2, params=['w2'])
    s2 = wait(r2)
    'layers.1'
    y1 = relu(t)
    'layers.0'
    b0 = all_gather(v, 'node', 2, params=['v'])
    a0 = all_gather(b0, 'gpu', 2, params=['v'])
    f0 = wait(a0)
    g0 = mm(y1, f0)
    return {'w2': s2, 'v': g0}
"""
    found = events(schedule(parse(text), takes(g=4, b=5, r=10, a=2, y=1)))
    assert found == "b0 g2 a0 y1 r2 f0 g0 s2"
    found = events(schedule(parse(text), takes(g=4, b=5, r=1, a=2, y=1)))
    assert found == "b0 g2 r2 a0 y1 f0 s2 g0"


def test_a_reduce_may_take_twice_as_long_before_compute_stands_still_for_it() -> None:
    text = """\
def backward(t: f32[4, 4]):
    'layers.2'
    g2 = mm(t, t)
    r2 = reduce_scatter(g2, 'gpu', 2, params=['w2'])
    s2 = wait(r2)
    'layers.1'
    y1 = relu(t)
    'layers.0'
    y0 = relu(y1)
    'layers.1'
    y3 = relu(y0)
    return {'w2': s2, 'x': y3}
"""
    assert events(schedule(parse(text), takes(g=1, r=1, y=1))) == "g2 r2 y1 y0 s2 y3"


@pytest.mark.parametrize("us", [0.1, 1.0, 3.0])
def test_a_schedule_with_costs_is_a_permutation_too(us: float) -> None:
    for text in (FORWARD, BACKWARD):
        graph = schedule(parse(text), takes(a=us, r=us, y=1, g=1))
        graph.lint()
        assert Counter(n.name for n in graph.nodes) == Counter(n.name for n in parse(text).nodes)


def test_copies_that_only_leave_the_graph_are_made_at_the_wait_and_keep_no_hop_back() -> None:
    text = """\
def forward(w: f32[2, 4], v: f32[1, 4], y: f32[4, 4]):
    'layers.0'
    a0 = all_gather(w, 'gpu', 2, params=['w'])
    f0 = wait(a0)
    y0 = mm(y, f0)
    'layers.1'
    a1 = all_gather(v, 'node', 2, purpose='refresh', params=['v'])
    f1 = wait(a1)
    a2 = all_gather(f1, 'gpu', 2, params=['v'])
    f2 = wait(a2)
    y1 = mm(y0, f2)
    c = clone(f1)
    return ([y1], [], {'v': c})
"""
    assert_expected_inline(
        " ".join(node.name for node in schedule(parse(text)).nodes),
        """w v y a0 a1 f0 y0 f1 a2 c f2 y1 output""",
    )


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
