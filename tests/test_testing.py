"""shardc.testing: assertions on collectives, and a graph run for all ranks in one process."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from passes.layout import Layout
from passes.parse import parse
from shardc.testing import assert_collectives, run_ranks

TWO_BLOCKS = """\
def forward(blocks_0_w: f32[4, 4], blocks_1_w: f32[2, 4], x: f32[2, 8]):
    a = all_gather(blocks_0_w, 'gpu', 2, purpose='gather', params=['blocks.0.w'])
    f = wait(a)
    b = all_gather(blocks_1_w, 'node', 2, purpose='gather', params=['blocks.1.w'])
    y = mm(x, f)
    c = wait(b)
    d = all_gather(c, 'gpu', 2, purpose='gather', params=['blocks.1.w'], again=True)
    g = wait(d)
    h = view(g, [8, 4])
    z = mm(x, h)
    return ([y, z], [])
"""


def test_what_holds_can_be_chained() -> None:
    it = assert_collectives(parse(TWO_BLOCKS))
    it.none("reduce").none("all_gather", "blocks.0.*", axis="node").count(3).count(2, "gather", "blocks.1.*")
    it.count(1, "gather", axis="gpu", per="blocks.*")
    it.starts_before("gather", "blocks.1.*", axis="node", end_of="blocks.0")
    it.waits_after("gather", "blocks.1.*", start_of="blocks.0")


def test_failure_shows_the_collectives() -> None:
    with pytest.raises(AssertionError) as error:
        assert_collectives(parse(TWO_BLOCKS)).none("all_gather", axis="node")
    expected = """\
expected no all_gather over node; found 1
   at   start -> wait  kind        axis  purpose       params
   3-4  a -> f         all_gather  gpu   gather        blocks.0.w
>  5-7  b -> c         all_gather  node  gather        blocks.1.w
   8-9  d -> g         all_gather  gpu   gather again  blocks.1.w"""
    assert str(error.value) == expected


FAILURES = {
    "expected 2 gather of blocks.0.*; found 1": lambda it: it.count(2, "gather", "blocks.0.*"),
    "expected 1 gather in blocks.1; found 2": lambda it: it.count(1, "gather", per="blocks.*"),
    "expected modules layers.*; found none": lambda it: it.count(1, "gather", per="layers.*"),
    "expected compute of layers.0; found none": lambda it: it.starts_before("gather", end_of="layers.0"),
    "expected some reduce; found none": lambda it: it.waits_after("reduce", start_of="blocks.0"),
    "expected gather over gpu to start before the end of blocks.0 (y at 6); found 1 later": lambda it: it.starts_before(
        "gather", axis="gpu", end_of="blocks.0"
    ),
    "expected gather to be waited for after the start of blocks.1 (z at 11); found 3 earlier": lambda it: (
        it.waits_after("gather", start_of="blocks.1")
    ),
}


@pytest.mark.parametrize("message", FAILURES)
def test_failures_say_what_was_wanted_and_found(message: str) -> None:
    with pytest.raises(AssertionError) as error:
        FAILURES[message](assert_collectives(parse(TWO_BLOCKS)))
    assert str(error.value).splitlines()[0] == message


def test_modules_as_traced_come_before_parameters() -> None:
    graph = parse(TWO_BLOCKS)
    z = next(node for node in graph.nodes if node.name == "z")
    z.meta["fwd_nn_module_stack"] = OrderedDict(a=("L['self']", object), b=("L['self'].blocks.0.norm", object))
    assert_collectives(graph).starts_before("gather", end_of="blocks.0")


def ranks(*values: float) -> list[list[Tensor]]:
    return [[torch.tensor([value])] for value in values]


def results(text: str, inputs: list[list[Tensor]], **axes: int) -> list[list[float]]:
    return [out[0].flatten().tolist() for out in run_ranks(parse(text), inputs, **axes)]


@pytest.mark.parametrize(
    ("axis", "size", "expected"),
    [
        ("gpu", 2, [[1, 2], [1, 2], [3, 4], [3, 4]]),
        ("node", 2, [[1, 3], [2, 4], [1, 3], [2, 4]]),
        ("gpu+node", 4, [[1, 2, 3, 4]] * 4),
    ],
)
def test_gather(axis: str, size: int, expected: list[list[float]]) -> None:
    text = f"""\
def forward(x: f32[1]):
    a = all_gather(x, '{axis}', {size}, purpose='gather', params=['w'])
    f = wait(a)
    return [f]
"""
    assert results(text, ranks(1, 2, 3, 4), node=2, gpu=2) == expected


def test_reduce_scatter_and_all_reduce() -> None:
    text = """\
def forward(x: f32[2]):
    r = reduce_scatter(x, 'gpu', 2, purpose='reduce', params=['w'])
    s = wait(r)
    a = all_reduce(s, 'node', 2, purpose='sync', params=['w'])
    f = wait(a)
    return [f]
"""
    inputs = [[torch.tensor([1.0, 10.0]) * (rank + 1)] for rank in range(4)]
    assert results(text, inputs, node=2, gpu=2) == [[10], [100], [10], [100]]


def test_three_axes() -> None:
    text = """\
def forward(x: f32[1]):
    a = all_gather(x, 'gpu', 3, purpose='gather', params=['w'])
    f = wait(a)
    return [f]
"""
    found = results(text, ranks(*range(12)), node=2, gpu=3, gcd=2)
    assert found[0] == [0, 2, 4]
    assert found[7] == [7, 9, 11]


def test_uneven_shards_come_together_and_apart() -> None:
    layout = Layout("w", (5, 1), (("gpu", 2), ("node", 2)), params=2, after_forward=2, grads=2, optim=2)
    text = """\
def forward(w: f32[2, 1], x: f32[5, 1]):
    a = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b = wait(a)
    c = all_gather(b, 'gpu', 2, purpose='gather', params=['w'])
    d = wait(c)
    f = compact(d, 5, [2, 2])
    g = mul.Tensor(f, x)
    e = shardc.expand(g, 5, [2, 2])
    r = reduce_scatter(e, 'gpu', 2, purpose='reduce', params=['w'])
    s = wait(r)
    t = reduce_scatter(s, 'node', 2, purpose='reduce', params=['w'])
    u = wait(t)
    return ([f], {'w': u})
"""
    full, x = torch.arange(5.0).view(5, 1), torch.full((5, 1), 0.25)
    # Ranks count along the innermost axis, the last of the mesh.
    coordinates = [(gpu, node) for node in range(2) for gpu in range(2)]
    pieces = [full[layout.local_start(at) :][: layout.local_rows(at)] for at in coordinates]
    padded = [torch.cat([piece, piece.new_zeros(layout.piece_rows - len(piece), 1)]) for piece in pieces]
    outs = run_ranks(parse(text), [[piece, x] for piece in padded], node=2, gpu=2)
    assert all(torch.equal(out[0][0], full) for out in outs)
    assert all(torch.equal(out[1]["w"], piece) for out, piece in zip(outs, padded, strict=True))


def test_wrong_meshes_are_refused() -> None:
    graph = parse(TWO_BLOCKS)
    inputs = [[torch.zeros(4, 4), torch.zeros(2, 4), torch.zeros(2, 8)]] * 3
    with pytest.raises(ValueError, match="the mesh has 3"):
        run_ranks(graph, inputs, gpu=3)
    with pytest.raises(ValueError, match="inputs of 3 ranks for a mesh of 4"):
        run_ranks(graph, inputs, gpu=4)
    with pytest.raises(ValueError, match=r"over \['gpu'\], the mesh has \['node'\]"):
        run_ranks(graph, inputs, node=3)
