"""Where partition cuts: what is saved, what the backward gathers and computes again."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.parse import parse
from passes.partition import partition, recomputed
from passes.text import to_text

GATHERED = """\
def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again={0})
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again={1})
    f: f32[8, 4] = wait(c)
    y: f32[2, 4] = mm(x, f)
    h: f32[4, 8] = permute(f, [1, 0])
    g: f32[2, 8] = mm(tangents_1, h)
    return ([y], {{'x': g}})
"""
WEIGHTS = """\
def joint(w: f32[2, 4], v: f32[2, 4], x: f32[2, {0}], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    e: f32[4, 4] = wait(b)
    c: f32[{0}, 4] = {1}
    y: f32[2, 4] = mm(x, c)
    h: f32[4, {0}] = permute(c, [1, 0])
    g: f32[2, {0}] = mm(tangents_1, h)
    return ([y], {{'x': g}})
"""


def halves(text: str, *params: str) -> str:
    forward, backward = partition(parse(text), params)
    return to_text(forward, "forward") + "\n" + to_text(backward, "backward")


def test_replicated_after_forward_saves_the_full_value() -> None:
    assert_expected_inline(
        halves(GATHERED.format(False, False), "w"),
        """\
def forward(w: f32[2, 4], x: f32[2, 8]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=False)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=False)
    f: f32[8, 4] = wait(c)
    y: f32[2, 4] = mm(x, f)
    h: f32[4, 8] = permute(f, [1, 0])
    return ([y], [h])

def backward(h: f32[4, 8] @ [1, 4], tangents_1: f32[2, 4]):
    g: f32[2, 8] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_after_forward_as_params_saves_the_shard() -> None:
    assert_expected_inline(
        halves(GATHERED.format(True, True), "w"),
        """\
def forward(w: f32[2, 4], x: f32[2, 8]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[8, 4] = wait(c)
    y: f32[2, 4] = mm(x, f)
    return ([y], [w])

def backward(w: f32[2, 4], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[8, 4] = wait(c)
    h: f32[4, 8] = permute(f, [1, 0])
    g: f32[2, 8] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_after_forward_between_saves_what_lies_on_it() -> None:
    assert_expected_inline(
        halves(GATHERED.format(False, True), "w"),
        """\
def forward(w: f32[2, 4], x: f32[2, 8]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=False)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[8, 4] = wait(c)
    y: f32[2, 4] = mm(x, f)
    return ([y], [b])

def backward(b: f32[4, 4], tangents_1: f32[2, 4]):
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[8, 4] = wait(c)
    h: f32[4, 8] = permute(f, [1, 0])
    g: f32[2, 8] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_a_concatenation_of_two_weights_is_computed_again() -> None:
    assert_expected_inline(
        halves(WEIGHTS.format(8, "cat([f, e])"), "w", "v"),
        """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[2, 8]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    e: f32[4, 4] = wait(b)
    c: f32[8, 4] = cat([f, e])
    y: f32[2, 4] = mm(x, c)
    return ([y], [w, v])

def backward(w: f32[2, 4], v: f32[2, 4], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    e: f32[4, 4] = wait(b)
    c: f32[8, 4] = cat([f, e])
    h: f32[4, 8] = permute(c, [1, 0])
    g: f32[2, 8] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_a_product_of_two_weights_is_computed_again() -> None:
    assert_expected_inline(
        halves(WEIGHTS.format(4, "mul.Tensor(f, e)"), "w", "v"),
        """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    e: f32[4, 4] = wait(b)
    c: f32[4, 4] = mul.Tensor(f, e)
    y: f32[2, 4] = mm(x, c)
    return ([y], [w, v])

def backward(w: f32[2, 4], v: f32[2, 4], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    e: f32[4, 4] = wait(b)
    c: f32[4, 4] = mul.Tensor(f, e)
    h: f32[4, 4] = permute(c, [1, 0])
    g: f32[2, 4] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_the_cast_of_a_shard_is_computed_again() -> None:
    text = """\
def joint(w: f32[4, 4], x: bf16[2, 8], tangents_1: bf16[2, 4]):
    s: bf16[4, 4] = prims.convert_element_type(w, bf16)
    a: bf16[8, 4] = all_gather(s, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: bf16[8, 4] = wait(a)
    y: bf16[2, 4] = mm(x, f)
    h: bf16[4, 8] = permute(f, [1, 0])
    g: bf16[2, 8] = mm(tangents_1, h)
    return ([y], {'x': g})
"""
    assert_expected_inline(
        halves(text, "w"),
        """\
def forward(w: f32[4, 4], x: bf16[2, 8]):
    s: bf16[4, 4] = prims.convert_element_type(w, bf16)
    a: bf16[8, 4] = all_gather(s, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: bf16[8, 4] = wait(a)
    y: bf16[2, 4] = mm(x, f)
    return ([y], [w])

def backward(w: f32[4, 4], tangents_1: bf16[2, 4]):
    s: bf16[4, 4] = prims.convert_element_type(w, bf16)
    a: bf16[8, 4] = all_gather(s, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: bf16[8, 4] = wait(a)
    h: bf16[4, 8] = permute(f, [1, 0])
    g: bf16[2, 8] = mm(tangents_1, h)
    return {'x': g}
""",
    )


def test_what_the_backward_does_not_use_is_not_saved() -> None:
    text = """\
def joint(w: f32[4, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    a: f32[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'])
    f: f32[8, 4] = wait(a)
    y: f32[2, 4] = mm(x, f)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
    s: f32[4, 4] = wait(r)
    return ([y], {'w': s})
"""
    assert_expected_inline(
        halves(text, "w"),
        """\
def forward(w: f32[4, 4], x: f32[2, 8]):
    a: f32[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'])
    f: f32[8, 4] = wait(a)
    y: f32[2, 4] = mm(x, f)
    t: f32[8, 2] = permute(x, [1, 0])
    return ([y], [t])

def backward(t: f32[8, 2] @ [1, 8], tangents_1: f32[2, 4]):
    g: f32[8, 4] = mm(t, tangents_1)
    r: f32[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
    s: f32[4, 4] = wait(r)
    return {'w': s}
""",
    )


def test_saved_values_are_in_the_order_in_which_the_backward_takes_them() -> None:
    text = """\
def joint(w: f32[4], v: f32[4], x: f32[4], tangents_1: f32[4]):
    p: f32[4] = mul.Tensor(x, v)
    y: f32[4] = mul.Tensor(p, w)
    g: f32[4] = mul.Tensor(x, tangents_1)
    h: f32[4] = mul.Tensor(w, v)
    i: f32[4] = mul.Tensor(h, tangents_1)
    return ([y], {'w': g, 'x': i})
"""
    forward, backward = partition(parse(text), ["w", "v"])
    saved = [node.name for node in forward.output_node().args[0][1]]
    taken = [node.name for node in backward.find_nodes(op="placeholder")]
    assert taken == [*saved, "tangents_1"]


def test_a_random_function_of_a_weight_is_not_computed_again() -> None:
    text = """\
def joint(w: f32[2, 4], x: f32[4, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    n: f32[4, 4] = neg(f)
    r: f32[4, 4] = bernoulli.p(f, 0.5)
    c: f32[4, 4] = mul.Tensor(r, f)
    k: f32[4] = full([4], 2.0)
    m: f32[4, 4] = mul.Tensor(n, k)
    y: f32[4, 4] = mul.Tensor(m, x)
    return ([y, c], {})
"""
    assert [node.name for node in recomputed(parse(text), {"w"})] == ["a", "f", "n", "m"]
