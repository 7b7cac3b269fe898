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
    assert_expected_inline(after, "")


def test_gradients_are_cast_and_then_scaled_before_the_first_hop() -> None:
    after = inserted(used(dtype="bf16"), param(rungs=(0, 0, 1, 1), rest=bfloat16, scale=0.25))
    assert_expected_inline(after, "")


def test_rows_that_do_not_divide_are_compacted_and_expanded() -> None:
    assert_expected_inline(inserted(used((5, 4)), param((5, 4))), "")


def test_padded_rows_that_come_in_full_are_expanded_only() -> None:
    assert_expected_inline(inserted(used((5, 4)), param((5, 4), (0, 0, 1, 2))), "")


def test_after_forward_between_marks_the_hops_above_it() -> None:
    assert_expected_inline(inserted(used(), param(rungs=(2, 1, 0, 2))), "")


def test_an_axis_of_size_one_has_no_hop() -> None:
    assert_expected_inline(inserted(used(), param(mesh=(("gpu", 2), ("node", 1)))), "")


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
    assert_expected_inline(inserted(text, *pair), "")


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
    assert_expected_inline(inserted(text, param((4, 2), (0, 0, 1, 1))), "")


def test_the_gather_stands_before_the_first_of_several_uses() -> None:
    text = """\
def joint(w: f32[4, 4], x: f32[2, 4]):
    ''
    r: f32[2, 4] = relu(x)
    y: f32[2, 4] = mm(r, w)
    z: f32[2, 4] = mm(y, w)
    return ([z], {})
"""
    assert_expected_inline(inserted(text, param((4, 4), (1, 1, 1, 1))), "")


def test_hops_belong_to_the_module_of_their_parameter_and_of_their_gradient() -> None:
    text = used().replace("''", "'body'")
    owner = param(rungs=(1, 1, 1, 1), name="layers.0.w")
    after = to_text(insert(parse(text.replace("'w'", "'layers.0.w'")), {"w": owner}), "joint")
    assert_expected_inline(after, "")


def test_gradients_of_inputs_stay_as_they_are() -> None:
    text = """\
def joint(w: f32[4], x: f32[4], tangents_1: f32[4]):
    ''
    y: f32[4] = mul.Tensor(x, w)
    g: f32[4] = mul.Tensor(w, tangents_1)
    return ([y], {'x': g})
"""
    assert inserted(text, param((4,), (0, 0, 1, 1))) == text
