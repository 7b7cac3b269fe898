"""The order of collectives that ranks agreed on, brought to a graph."""

from __future__ import annotations

import json

import pytest

from passes import ops
from passes.errors import Error
from passes.order import Orders, align, collective_order
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


# What ranks agreed on, for graphs that have less


def hop(*params: str, purpose: str = "gather") -> ops.Hop:
    return ops.Hop("all_gather", "gpu", 2, purpose, params, again=True)


def test_a_graph_with_fewer_collectives_follows_the_order_of_one_that_has_them_all() -> None:
    orders = Orders()
    orders.decide("forward", [hop("w", purpose="refresh"), hop("u", "v"), hop("w")])
    assert orders.find("forward", parse(TWO)) == [hop("v"), hop("w")]


def test_a_backward_does_not_follow_a_forward() -> None:
    orders = Orders()
    orders.decide("forward", [hop("v"), hop("w")])
    assert orders.find("backward", parse(TWO)) is None


def test_a_graph_with_a_collective_of_its_own_has_no_order_yet() -> None:
    orders = Orders()
    orders.decide("forward", [hop("v")])
    assert orders.find("forward", parse(TWO)) is None


def test_what_rank_0_offers_is_what_all_follow() -> None:
    compared: list[list[str]] = []

    def rank_0(collectives: list[str], order: list[str]) -> list[str]:
        compared.append(collectives)
        return order[::-1]

    orders = Orders(rank_0)
    assert orders.decide("forward", [hop("w", "v"), hop("u")]) == [hop("u"), hop("w", "v")]
    assert [json.loads(line)["params"] for line in compared[0]] == [["u"], ["v"], ["w"]]
    assert orders.find("forward", parse(TWO)) == [hop("w", "v")]
