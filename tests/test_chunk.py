"""Chunks: what travels in pieces, how a chain hands them on, and what stays whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import shardc
from passes import ops
from passes.chunk import chunk
from passes.order import Orders, collective_order, drafted
from passes.parse import parse
from passes.relay import relay
from passes.schedule import schedule
from passes.text import to_text
from shardc import Topology, simulate
from shardc.links import Device, Link
from shardc.simulate import Clock
from shardc.times import PIECES, pieces_of
from test_bucket import counted
from test_goldens import Tiny

BACKWARD = """\
def backward(g: f32[4, 5]):
    a: f32[2, 5] = reduce_scatter(g, 'gpu', 2, params=['w'])
    b: f32[2, 5] = wait(a)
    c: f32[1, 5] = reduce_scatter(b, 'node', 2, params=['w'])
    d: f32[1, 5] = wait(c)
    return {'w': d}
"""
FORWARD = """\
def forward(w: f32[1, 4], x: f32[4, 4]):
    a: f32[2, 4] = all_gather(w, 'node', 2, purpose='refresh', params=['w'])
    b: f32[2, 4] = wait(a)
    c: f32[4, 4] = all_gather(b, 'gpu', 2, params=['w'])
    d: f32[4, 4] = wait(c)
    y: f32[4, 4] = mm(x, d)
    return ([y], [x], {'w': b})
"""


def cut(text: str, count: int = 2) -> str:
    return to_text(chunk(parse(text), lambda chain: count))


# What comes of it


def test_a_gradient_goes_down_in_pieces_of_its_rows_and_columns_need_not_divide() -> None:
    assert_expected_inline(
        cut(BACKWARD),
        """\
def forward(g: f32[4, 5]):
    ''
    view: f32[4, 5] = view(g, [4, 5])
    split_with_sizes = split_with_sizes(view, [2, 3], 1)
    getitem: f32[4, 2] = split_with_sizes[0]
    clone: f32[4, 2] = clone(getitem, memory_format=contiguous_format)
    view_1: f32[4, 5] = view(g, [4, 5])
    split_with_sizes_1 = split_with_sizes(view_1, [2, 3], 1)
    getitem_1: f32[4, 3] = split_with_sizes_1[1]
    clone_1: f32[4, 3] = clone(getitem_1, memory_format=contiguous_format)
    reduce_scatter: f32[2, 2] = reduce_scatter(clone, 'gpu', 2, params=['w'], piece=[0, 2])
    reduce_scatter_1: f32[2, 3] = reduce_scatter(clone_1, 'gpu', 2, params=['w'], piece=[1, 2])
    wait: f32[2, 2] = wait(reduce_scatter)
    wait_1: f32[2, 3] = wait(reduce_scatter_1)
    reduce_scatter_2: f32[1, 2] = reduce_scatter(wait, 'node', 2, params=['w'], piece=[0, 2])
    reduce_scatter_3: f32[1, 3] = reduce_scatter(wait_1, 'node', 2, params=['w'], piece=[1, 2])
    wait_2: f32[1, 2] = wait(reduce_scatter_2)
    wait_3: f32[1, 3] = wait(reduce_scatter_3)
    cat: f32[1, 5] = cat([wait_2, wait_3], 1)
    view_2: f32[1, 5] = view(cat, [1, 5])
    return {'w': view_2}
""",
    )


def test_a_copy_to_keep_is_put_together_from_the_pieces_on_the_way() -> None:
    assert_expected_inline(
        cut(FORWARD),
        """\
def forward(w: f32[1, 4], x: f32[4, 4]):
    ''
    view: f32[1, 4] = view(w, [1, 4])
    split_with_sizes = split_with_sizes(view, [2, 2], 1)
    getitem: f32[1, 2] = split_with_sizes[0]
    view_1: f32[1, 4] = view(w, [1, 4])
    split_with_sizes_1 = split_with_sizes(view_1, [2, 2], 1)
    getitem_1: f32[1, 2] = split_with_sizes_1[1]
    all_gather: f32[2, 2] = all_gather(getitem, 'node', 2, purpose='refresh', params=['w'], piece=[0, 2])
    all_gather_1: f32[2, 2] = all_gather(getitem_1, 'node', 2, purpose='refresh', params=['w'], piece=[1, 2])
    wait: f32[2, 2] = wait(all_gather)
    wait_1: f32[2, 2] = wait(all_gather_1)
    all_gather_2: f32[4, 2] = all_gather(wait, 'gpu', 2, params=['w'], piece=[0, 2])
    all_gather_3: f32[4, 2] = all_gather(wait_1, 'gpu', 2, params=['w'], piece=[1, 2])
    wait_2: f32[4, 2] = wait(all_gather_2)
    wait_3: f32[4, 2] = wait(all_gather_3)
    cat_1: f32[4, 4] = cat([wait_2, wait_3], 1)
    view_3: f32[4, 4] = view(cat_1, [4, 4])
    None
    y: f32[4, 4] = mm(x, view_3)
    ''
    cat: f32[2, 4] = cat([wait, wait_1], 1)
    view_2: f32[2, 4] = view(cat, [2, 4])
    return ([y], [x], {'w': view_2})
""",
    )


def test_no_piece_is_empty() -> None:
    assert "piece=[4, 5]" in cut(BACKWARD, 100)
    assert "piece=[5" not in cut(BACKWARD, 100)


# What is cut


def pieces(graph: fx.Graph) -> Counter[tuple[str, str]]:
    """How many hops there are, by parameters and purpose."""
    return Counter((",".join(ops.hop(start).params), ops.hop(start).purpose) for start in ops.hops(graph))


def test_hops_that_follow_no_other_stay_whole() -> None:
    text = """\
def forward(w: f32[2, 4], x: f32[4, 4]):
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['w'])
    b: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(x, b)
    return [y]
"""
    assert pieces(chunk(parse(text), lambda chain: 4)) == {("w", "gather"): 1}


def test_buckets_stay_whole() -> None:
    text = BACKWARD.replace("['w']", "['w', 'v']")
    assert pieces(chunk(parse(text), lambda chain: 4)) == {("w,v", "reduce"): 2}


def test_the_first_and_the_last_stretch_are_cut_and_what_lies_between_is_not() -> None:
    lines = ["def forward(" + ", ".join(f"w{i}: f32[1, 4]" for i in range(4)) + ", y: f32[4, 4]):"]
    for i in range(4):
        lines += [
            f"    'layers.{i}'",
            f"    a{i} = all_gather(w{i}, 'node', 2, params=['w{i}'])",
            f"    b{i} = wait(a{i})",
            f"    c{i} = all_gather(b{i}, 'gpu', 2, params=['w{i}'])",
            f"    d{i} = wait(c{i})",
            f"    y{i} = mm({f'y{i - 1}' if i else 'y'}, d{i})",
        ]
    found = pieces(chunk(parse("\n".join([*lines, "    return [y3]", ""])), lambda chain: 3))
    assert found == {("w0", "gather"): 6, ("w1", "gather"): 2, ("w2", "gather"): 2, ("w3", "gather"): 6}


DEVICE = Device("device", tflops=1.0, memory_gb_per_s=1.0, memory_gb=1.0)


def chain_on(node: Link, gpu: Link) -> int:
    topology = shardc.Topology(node=2, gpu=2).with_links(DEVICE, node=node, gpu=gpu)
    return pieces_of(ops.hops(parse(FORWARD)), topology)


def test_pieces_are_long_against_their_latencies_and_a_few_at_most() -> None:
    assert chain_on(Link(1.0, 0.0), Link(1.0, 0.0)) == PIECES
    assert chain_on(Link(1e-6, 1.0), Link(1e-6, 1.0)) == PIECES
    assert chain_on(Link(1e-3, 0.5), Link(1e-3, 0.5)) == 4
    assert chain_on(Link(1.0, 1.0), Link(1.0, 1.0)) == 1


# Over ranks


def test_all_ranks_cut_as_the_one_whose_order_it_is() -> None:
    order = collective_order(chunk(parse(FORWARD), lambda chain: 2))
    graph = chunk(parse(FORWARD), lambda chain: 1, order)
    assert collective_order(graph) == order
    assert Counter(drafted(order)) == Counter(collective_order(parse(FORWARD)))


def test_a_micro_batch_without_a_refresh_gathers_whole_values() -> None:
    later = """\
def forward(b: f32[2, 4], x: f32[4, 4]):
    c: f32[4, 4] = all_gather(b, 'gpu', 2, params=['w'])
    d: f32[4, 4] = wait(c)
    y: f32[4, 4] = mm(x, d)
    return ([y], [x])
"""
    assert order_of(later, "forward", FORWARD) == [("gather", (0, 1))]


def test_a_sum_in_an_accumulator_takes_the_whole_gradient_and_is_synced_whole() -> None:
    synced = BACKWARD.replace("reduce_scatter(b, 'node', 2, ", "reduce_scatter(b, 'node', 2, purpose='sync', ")
    assert order_of(synced, "backward", synced) == [
        ("reduce", (0, 2)),
        ("reduce", (1, 2)),
        ("sync", (0, 2)),
        ("sync", (1, 2)),
    ]
    accumulated = synced.replace("(g: f32[4, 5])", "(g: f32[4, 5], accumulator_w: f32[2, 5])")
    accumulated = accumulated.replace("(b, 'node'", "(s, 'node'").replace(
        "    c: f32", "    s: f32[2, 5] = add.Tensor(b, accumulator_w)\n    c: f32"
    )
    assert order_of(accumulated, "backward", synced) == [("reduce", (0, 2)), ("reduce", (1, 2)), ("sync", (0, 1))]


def order_of(text: str, half: str, first: str) -> list[tuple[str, tuple[int, int]]]:
    """Purposes and pieces of a graph's hops, where the ranks agreed on the order of another one in two pieces."""
    orders = Orders()
    orders.decide(half, collective_order(chunk(parse(first), lambda chain: 2)))
    followed = orders.find(half, parse(text))
    assert followed is not None
    graph = chunk(parse(text), lambda chain: 1, followed)
    assert collective_order(graph) == followed
    return [(hop.purpose, hop.piece) for hop in followed]


# On real graphs


@pytest.mark.parametrize("name", ["zero3", "IIG", "hpz"])
def test_pieces_move_the_same_bytes_and_obey_every_law(name: str) -> None:
    shape = shardc.Topology(node=2, gpu=2)
    topology = shape.with_links(DEVICE, node=Link(1.0, 0.0), gpu=Link(1.0, 0.0))
    plan = shardc.Plan.paro(topology, name) if name == "IIG" else getattr(shardc.Plan, name)(topology)
    program = shardc.trace(Tiny(), plan, torch.zeros(3, 4))
    for variant in program.step(2):
        graph = program.graph(variant)
        assert counted(graph) == counted(program.draft(variant))
    graphs = [program.graph(variant) for variant in program.step(1)]
    assert any(ops.hop(start).piece != ops.WHOLE for graph in graphs for start in ops.hops(graph))


# HO-Ring (PaRO, arXiv 2310.06003): hops between hosts beside hops inside them

GATHER = """\
def forward(w: f32[1, 6], x: f32[4, 4]):
    a: f32[2, 6] = all_gather(w, 'node', 2, purpose='gather', params=['w'])
    b: f32[2, 6] = wait(a)
    c: f32[4, 6] = all_gather(b, 'gpu', 2, purpose='gather', params=['w'])
    d: f32[4, 6] = wait(c)
    y: f32[4, 6] = mm(x, d)
    return ([y], [])
"""


def flights(text: str, count: int) -> list[str]:
    """Of hops that take 1 us for each column: where and when each is under way."""
    graph = relay(chunk(parse(text), lambda chain: count))

    def us(node: fx.Node) -> float:
        return float(node.meta["val"].shape[1]) if ops.is_start(node) else 0.0

    clock = Clock()
    clock.run(schedule(graph, us), {node: us(node) for node in graph.nodes}, "forward")
    return sorted(f"{e.lane} {e.start_us:g}-{e.end_us:g}" for e in clock.events if e.hop)


def test_a_chain_that_is_whole_goes_one_hop_after_the_other() -> None:
    assert flights(GATHER, 1) == ["gpu 6-12", "node 0-6"]


def test_the_hop_between_hosts_of_one_piece_runs_beside_the_hop_inside_them_of_the_piece_before() -> None:
    assert flights(GATHER, 3) == ["gpu 2-4", "gpu 4-6", "gpu 6-8", "node 0-2", "node 2-4", "node 4-6"]


def test_gradients_go_down_the_same_way_inside_first() -> None:
    text = BACKWARD.replace("4, 5]", "4, 6]").replace("2, 5]", "2, 6]").replace("1, 5]", "1, 6]")
    assert flights(text, 3) == ["gpu 0-2", "gpu 2-4", "gpu 4-6", "node 2-4", "node 4-6", "node 6-8"]


def test_ho_ring_beats_the_flat_ring_by_more_than_the_paper_reports() -> None:
    """8 hosts of 8 A100 with 100 Gb/s each: a weight of 4 MiB that nothing hides."""
    topology = Topology.preset("dgx-a100", nodes=8)
    node = Link(12.5 / 8, topology.link("node").latency_us)
    topology = topology.with_links(topology.computes, node=node, gpu=topology.link("gpu"))
    waits_us = {}
    for chain in ("flat", "hop"):
        plan = shardc.Plan.zero3(topology, chain=chain)
        program = shardc.trace(torch.nn.Linear(1024, 1024, bias=False), plan, torch.zeros(1, 1024))
        waits_us[chain] = simulate(program).exposed_us
    assert waits_us["flat"] / waits_us["hop"] > 1.365, waits_us
