"""The order of collectives that ranks agreed on, brought to a graph."""

from __future__ import annotations

import pytest

from passes.errors import Error
from passes.order import align, collective_order
from passes.parse import parse
from passes.text import to_text

TWO = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    r: f32[4, 4] = relu(x)
    a: f32[4, 4] = all_gather(w, 'gpu', 2, purpose='gather', params=['w'], again=True)
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(r, f)
    b: f32[4, 4] = all_gather(v, 'gpu', 2, purpose='gather', params=['v'], again=True)
    g: f32[4, 4] = wait(b)
    z: f32[4, 4] = mm(y, g)
    return [z]
"""
CHAIN = """\
def forward(w: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'node', 2, purpose='gather', params=['w'], again=False)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'], again=False)
    d: f32[8, 4] = wait(c)
    return [d]
"""


def lines(text: str) -> list[str]:
    """Names in order."""
    return [line.split(":")[0].strip() for line in text.splitlines() if " = " in line]


def test_starts_come_in_the_agreed_order_and_the_rest_stays_in_its_own() -> None:
    graph = parse(TWO)
    aligned = align(graph, collective_order(graph)[::-1])
    aligned.lint()
    assert lines(to_text(aligned)) == ["r", "b", "a", "f", "y", "g", "z"]


def test_a_graph_in_the_agreed_order_is_left_alone() -> None:
    graph = parse(TWO)
    assert to_text(align(graph, collective_order(graph))) == TWO


def test_equal_collectives_keep_their_own_order() -> None:
    graph = parse(TWO.replace("['v']", "['w']"))
    assert align(graph, collective_order(graph)[::-1]) is graph
    assert lines(to_text(graph)) == lines(TWO)


def test_an_order_against_the_dependencies_is_an_error_that_names_the_hop() -> None:
    graph = parse(CHAIN)
    with pytest.raises(Error) as error:
        align(graph, collective_order(graph)[::-1])
    assert str(error.value) == (
        "The order of collectives that the ranks agreed on contradicts this graph's data dependencies.\n"
        "  at: a: gather all_gather over node of w\n"
        "  fix: Feed batches for which the model uses its parameters in the same order on every rank."
    )


def test_other_collectives_than_the_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match="not a permutation"):
        align(parse(TWO), collective_order(parse(CHAIN)))
