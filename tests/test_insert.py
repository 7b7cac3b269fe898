"""Where insert puts hops, and where it puts none."""

from __future__ import annotations

from expecttest import assert_expected_inline
from torch import bfloat16, dtype, float32

from passes.insert import Param, insert
from passes.layout import Layout
from passes.parse import parse
from passes.text import to_text

MESH = (("gpu", 2), ("node", 2))
USED = """\
def joint(w: {0}[{1}], x: {0}[2, {2}], tangents_1: {0}[2, 4]):
    ''
    y: {0}[2, 4] = mm(x, w)
    t: {0}[{2}, 2] = permute(x, [1, 0])
    g: {0}[{1}] = mm(t, tangents_1)
    return ([y], {{'w': g}})
"""


def param(
    shape: tuple[int, ...] = (8, 4),
    rungs: tuple[int, int, int, int] = (2, 2, 2, 2),
    *,
    name: str = "w",
    mesh: tuple[tuple[str, int], ...] = MESH,
    rest: dtype = float32,
    reduce: dtype = float32,
    scale: float = 1,
) -> Param:
    """`rungs`: params, after_forward, grads, optim."""
    return Param(Layout(name, shape, mesh, *rungs), rest, reduce, float32, scale)


def used(shape: tuple[int, int] = (8, 4), dtype: str = "f32") -> str:
    return USED.format(dtype, ", ".join(map(str, shape)), shape[0])


def inserted(text: str, *params: Param) -> str:
    return to_text(insert(parse(text), {p.layout.name: p for p in params}), "joint")


def test_casts_go_before_the_first_hop() -> None:
    after = inserted(used(dtype="bf16"), param(rungs=(1, 1, 1, 1), reduce=bfloat16))
    assert_expected_inline(
        after,
        """\
def joint(w: f32[4, 4], x: bf16[2, 8], tangents_1: bf16[2, 4]):
    ''
    convert_element_type: bf16[4, 4] = prims.convert_element_type(w, bf16)
    all_gather: bf16[8, 4] = all_gather(convert_element_type, 'gpu', 2, purpose='gather', params=['w'], again=True)
    wait: bf16[8, 4] = wait(all_gather)
    y: bf16[2, 4] = mm(x, wait)
    t: bf16[8, 2] = permute(x, [1, 0])
    g: bf16[8, 4] = mm(t, tangents_1)
    reduce_scatter: bf16[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
    wait_1: bf16[4, 4] = wait(reduce_scatter)
    return ([y], {'w': wait_1})
""",
    )


def test_gradients_are_cast_and_then_scaled_before_the_first_hop() -> None:
    after = inserted(used(dtype="bf16"), param(rungs=(0, 0, 1, 1), rest=bfloat16, scale=0.25))
    assert_expected_inline(
        after,
        """\
def joint(w: bf16[8, 4], x: bf16[2, 8], tangents_1: bf16[2, 4]):
    ''
    y: bf16[2, 4] = mm(x, w)
    t: bf16[8, 2] = permute(x, [1, 0])
    g: bf16[8, 4] = mm(t, tangents_1)
    convert_element_type: f32[8, 4] = prims.convert_element_type(g, f32)
    mul: f32[8, 4] = mul.Tensor(convert_element_type, 0.25)
    reduce_scatter: f32[4, 4] = reduce_scatter(mul, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[4, 4] = wait(reduce_scatter)
    return ([y], {'w': wait})
""",
    )


def test_rows_that_do_not_divide_are_compacted_and_expanded() -> None:
    assert_expected_inline(
        inserted(used((5, 4)), param((5, 4))),
        """\
def joint(w: f32[2, 4], x: f32[2, 5], tangents_1: f32[2, 4]):
    ''
    all_gather: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=True)
    wait: f32[4, 4] = wait(all_gather)
    all_gather_1: f32[8, 4] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], again=True)
    wait_1: f32[8, 4] = wait(all_gather_1)
    compact: f32[5, 4] = compact(wait_1, 5, [2, 2])
    y: f32[2, 4] = mm(x, compact)
    t: f32[5, 2] = permute(x, [1, 0])
    g: f32[5, 4] = mm(t, tangents_1)
    expand: f32[8, 4] = shardc.expand(g, 5, [2, 2])
    reduce_scatter: f32[4, 4] = reduce_scatter(expand, 'gpu', 2, purpose='reduce', params=['w'])
    wait_2: f32[4, 4] = wait(reduce_scatter)
    reduce_scatter_1: f32[2, 4] = reduce_scatter(wait_2, 'node', 2, purpose='reduce', params=['w'])
    wait_3: f32[2, 4] = wait(reduce_scatter_1)
    return ([y], {'w': wait_3})
""",
    )


def test_padded_rows_that_come_in_full_are_expanded_only() -> None:
    assert_expected_inline(
        inserted(used((5, 4)), param((5, 4), (0, 0, 1, 2))),
        """\
def joint(w: f32[5, 4], x: f32[2, 5], tangents_1: f32[2, 4]):
    ''
    y: f32[2, 4] = mm(x, w)
    t: f32[5, 2] = permute(x, [1, 0])
    g: f32[5, 4] = mm(t, tangents_1)
    expand: f32[8, 4] = shardc.expand(g, 5, [2, 2])
    reduce_scatter: f32[4, 4] = reduce_scatter(expand, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[4, 4] = wait(reduce_scatter)
    return ([y], {'w': wait})
""",
    )


def test_after_forward_between_marks_the_hops_above_it() -> None:
    assert_expected_inline(
        inserted(used(), param(rungs=(2, 1, 0, 2))),
        """\
def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    ''
    all_gather: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=False)
    wait: f32[4, 4] = wait(all_gather)
    all_gather_1: f32[8, 4] = all_gather(wait, 'gpu', 2, purpose='gather', params=['w'], again=True)
    wait_1: f32[8, 4] = wait(all_gather_1)
    y: f32[2, 4] = mm(x, wait_1)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    return ([y], {'w': g})
""",
    )


def test_an_axis_of_size_one_has_no_hop() -> None:
    assert_expected_inline(
        inserted(used(), param(mesh=(("gpu", 2), ("node", 1)))),
        """\
def joint(w: f32[4, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    ''
    all_gather: f32[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    wait: f32[8, 4] = wait(all_gather)
    y: f32[2, 4] = mm(x, wait)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    reduce_scatter: f32[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
    wait_1: f32[4, 4] = wait(reduce_scatter)
    return ([y], {'w': wait_1})
""",
    )


def test_replicated_everywhere_moves_nothing() -> None:
    assert inserted(used(), param(rungs=(0, 0, 0, 0))) == used()


def test_a_0_dim_parameter_moves_nothing() -> None:
    text = """\
def joint(w: f32, x: f32[2], tangents_1: f32[2]):
    ''
    y: f32[2] = mul.Tensor(x, w)
    p: f32[2] = mul.Tensor(x, tangents_1)
    g: f32 = sum(p)
    return ([y], {'w': g})
"""
    assert inserted(text, param((), (0, 0, 0, 0))) == text


def test_an_unused_parameter_comes_in_as_a_shard_and_is_not_gathered() -> None:
    text = """\
def joint(w: f32[8, 4], x: f32[2, 4]):
    y: f32[2, 4] = relu(x)
    return ([y], {})
"""
    assert inserted(text, param()) == text.replace("f32[8, 4]", "f32[2, 4]")


def test_a_gradient_shared_by_two_parameters_is_reduced_for_each() -> None:
    text = """\
def joint(w: f32[4], v: f32[4], x: f32[4], tangents_1: f32[4]):
    ''
    a: f32[4] = add.Tensor(w, v)
    y: f32[4] = mul.Tensor(a, x)
    g: f32[4] = mul.Tensor(x, tangents_1)
    return ([y], {'w': g, 'v': g})
"""
    pair = [param((4,), (0, 0, 1, 1), name=name) for name in ("w", "v")]
    assert_expected_inline(
        inserted(text, *pair),
        """\
def joint(w: f32[4], v: f32[4], x: f32[4], tangents_1: f32[4]):
    ''
    a: f32[4] = add.Tensor(w, v)
    y: f32[4] = mul.Tensor(a, x)
    g: f32[4] = mul.Tensor(x, tangents_1)
    reduce_scatter_1: f32[2] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['v'])
    wait_1: f32[2] = wait(reduce_scatter_1)
    reduce_scatter: f32[2] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[2] = wait(reduce_scatter)
    return ([y], {'w': wait, 'v': wait_1})
""",
    )


def test_a_gradient_that_is_a_tangent_is_reduced_behind_all_inputs() -> None:
    text = """\
def joint(w: f32[4], v: f32[4], tangents_1: f32[4], tangents_2: f32[4]):
    ''
    y: f32[4] = neg(w)
    return ([y, v], {'w': tangents_1, 'v': tangents_2})
"""
    pair = {name: param((4,), (0, 0, 1, 1), name=name) for name in ("w", "v")}
    graph = insert(parse(text), pair)
    assert [node.op for node in graph.nodes][:4] == ["placeholder"] * 4
    assert_expected_inline(
        to_text(graph, "joint"),
        """\
def joint(w: f32[4], v: f32[4], tangents_1: f32[4], tangents_2: f32[4]):
    ''
    reduce_scatter_1: f32[2] = reduce_scatter(tangents_2, 'gpu', 2, purpose='reduce', params=['v'])
    wait_1: f32[2] = wait(reduce_scatter_1)
    reduce_scatter: f32[2] = reduce_scatter(tangents_1, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[2] = wait(reduce_scatter)
    y: f32[4] = neg(w)
    return ([y, v], {'w': wait, 'v': wait_1})
""",
    )


def test_a_gradient_that_is_not_dense_is_copied_before_its_first_hop() -> None:
    text = """\
def joint(w: f32[4, 2], x: f32[2, 4], tangents_1: f32[2, 2]):
    ''
    y: f32[2, 2] = mm(x, w)
    t: f32[2, 2] = permute(tangents_1, [1, 0])
    p: f32[2, 4] = mm(t, x)
    g: f32[4, 2] = permute(p, [1, 0])
    return ([y], {'w': g})
"""
    assert_expected_inline(
        inserted(text, param((4, 2), (0, 0, 1, 1))),
        """\
def joint(w: f32[4, 2], x: f32[2, 4], tangents_1: f32[2, 2]):
    ''
    y: f32[2, 2] = mm(x, w)
    t: f32[2, 2] = permute(tangents_1, [1, 0])
    p: f32[2, 4] = mm(t, x)
    g: f32[4, 2] = permute(p, [1, 0])
    clone: f32[4, 2] = clone(g, memory_format=contiguous_format)
    reduce_scatter: f32[2, 2] = reduce_scatter(clone, 'gpu', 2, purpose='reduce', params=['w'])
    wait: f32[2, 2] = wait(reduce_scatter)
    return ([y], {'w': wait})
""",
    )


def test_the_gather_stands_before_the_first_of_several_uses() -> None:
    text = """\
def joint(w: f32[4, 4], x: f32[2, 4]):
    ''
    r: f32[2, 4] = relu(x)
    y: f32[2, 4] = mm(r, w)
    z: f32[2, 4] = mm(y, w)
    return ([z], {})
"""
    assert_expected_inline(
        inserted(text, param((4, 4), (1, 1, 1, 1))),
        """\
def joint(w: f32[2, 4], x: f32[2, 4]):
    ''
    r: f32[2, 4] = relu(x)
    all_gather: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    wait: f32[4, 4] = wait(all_gather)
    y: f32[2, 4] = mm(r, wait)
    z: f32[2, 4] = mm(y, wait)
    return ([z], {})
""",
    )


def test_hops_belong_to_the_module_of_their_parameter_and_of_their_gradient() -> None:
    text = used().replace("''", "'body'")
    owner = param(rungs=(1, 1, 1, 1), name="layers.0.w")
    after = to_text(insert(parse(text.replace("'w'", "'layers.0.w'")), {"w": owner}), "joint")
    assert_expected_inline(
        after,
        """\
def joint(w: f32[4, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    'layers.0'
    all_gather: f32[8, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['layers.0.w'], again=True)
    wait: f32[8, 4] = wait(all_gather)
    'body'
    y: f32[2, 4] = mm(x, wait)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    reduce_scatter: f32[4, 4] = reduce_scatter(g, 'gpu', 2, purpose='reduce', params=['layers.0.w'])
    wait_1: f32[4, 4] = wait(reduce_scatter)
    return ([y], {'layers.0.w': wait_1})
""",
    )


def test_gradients_of_inputs_stay_as_they_are() -> None:
    text = """\
def joint(w: f32[4], x: f32[4], tangents_1: f32[4]):
    ''
    y: f32[4] = mul.Tensor(x, w)
    g: f32[4] = mul.Tensor(w, tangents_1)
    return ([y], {'x': g})
"""
    assert inserted(text, param((4,), (0, 0, 1, 1))) == text
