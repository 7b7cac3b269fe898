"""Flat collectives: what becomes one, in which order its pieces are, what it holds, and that it trains the same."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

import shardc
from passes import ops
from passes.fuse import fuse
from passes.layout import Layout
from passes.parse import parse
from passes.schedule import schedule
from passes.text import to_text
from passes.verify import verify
from shardc.links import Device, Link
from shardc.simulate import Clock
from shardc.testing import run_ranks
from shardc.times import is_faster_flat
from test_numerics import AllRanks, all_ranks_error
from training import LIMIT, Trained, one_process, sharded, spelled, worst_error
from world import run

TWO_BY_TWO = shardc.Topology(node=2, gpu=2)
LAYOUT = Layout("w", (8, 4), (("gpu", 2), ("node", 2)), 2, 2, 2, 2)
JOINT = """\
def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    a: f32[4, 4] = all_gather(w, 'node', 2, params=['w'], again=True)
    b: f32[4, 4] = wait(a)
    c: f32[8, 4] = all_gather(b, 'gpu', 2, params=['w'], again=True)
    d: f32[8, 4] = wait(c)
    y: f32[2, 4] = mm(x, d)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    e: f32[4, 4] = reduce_scatter(g, 'gpu', 2, params=['w'])
    f: f32[4, 4] = wait(e)
    h: f32[2, 4] = reduce_scatter(f, 'node', 2, params=['w'])
    i: f32[2, 4] = wait(h)
    return ([y], {'w': i})
"""


def fused(text: str) -> str:
    return to_text(fuse(parse(text)), "joint")


def test_a_gather_and_a_reduce_over_neighbouring_axes_are_one_hop_each_way() -> None:
    graph = fuse(parse(JOINT))
    verify({"w": LAYOUT}, joint=graph)
    assert_expected_inline(
        to_text(graph, "joint"),
        """\
def joint(w: f32[2, 4], x: f32[2, 8], tangents_1: f32[2, 4]):
    ''
    all_gather: f32[8, 4] = all_gather(w, 'gpu+node', 4, params=['w'], again=True)
    wait: f32[8, 4] = wait(all_gather)
    interleave: f32[8, 4] = interleave(wait, [2, 2])
    None
    y: f32[2, 4] = mm(x, interleave)
    t: f32[8, 2] = permute(x, [1, 0])
    g: f32[8, 4] = mm(t, tangents_1)
    ''
    interleave_1: f32[8, 4] = interleave(g, [2, 2])
    reduce_scatter: f32[2, 4] = reduce_scatter(interleave_1, 'gpu+node', 4, params=['w'])
    wait_1: f32[2, 4] = wait(reduce_scatter)
    return ([y], {'w': wait_1})
""",
    )


def test_ranks_get_what_they_get_hop_by_hop() -> None:
    torch.manual_seed(0)
    sizes = {"node": 3, "gpu": 2}
    text = JOINT.replace("'node', 2", "'node', 3").replace("[8, 4]", "[12, 4]").replace("[4, 4]", "[6, 4]")
    text = text.replace("[2, 8]", "[2, 12]").replace("[8, 2]", "[12, 2]")
    inputs = [[torch.randn(2, 4), torch.randn(2, 12), torch.randn(2, 4)] for _ in range(6)]
    # On the way up a chain brings node inside gpu: its pieces in the order of the ladder.
    by_hop, flat = run_ranks(parse(text), inputs, **sizes), run_ranks(fuse(parse(text)), inputs, **sizes)
    for ours, theirs in zip(flat, by_hop, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("interleave(g, [2, 2])", "law 2, interleaved: the reduce reduce_scatter over gpu[+]node of w has its pieces"),
        ("interleave(wait, [2, 2])", "law 2, full when used: w is still in the order of ranks"),
    ],
)
def test_pieces_in_another_order_than_the_ranks_are_an_error(line: str, says: str) -> None:
    text = fused(JOINT)
    broken = text.replace(line, f"neg({line[11:].split(',')[0]})")
    assert broken != text
    with pytest.raises(shardc.Error, match=says):
        verify({"w": LAYOUT}, joint=parse(broken))


def test_what_is_used_in_between_or_is_another_move_stays() -> None:
    kept = JOINT.replace("again=True)\n    b:", "again=False)\n    b:")
    assert fused(kept).count("all_gather(") == 2
    used = JOINT.replace("return ([y]", "z: f32[4, 4] = neg(b)\n    return ([y, z]")
    assert fused(used).count("all_gather(") == 2
    synced = JOINT.replace("reduce_scatter(f, 'node', 2,", "reduce_scatter(f, 'node', 2, purpose='sync',")
    assert fused(synced).count("reduce_scatter(") == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mm(x, interleave)", "w is still in the order of ranks in `wait`"),
        ("interleave(wait, [2, 2])", "`interleave` mixes what a gather did not"),
        ("reduce_scatter(interleave_1,", "has its pieces in another order than its ranks"),
    ],
)
def test_pieces_in_the_order_of_ranks_are_no_value(line: str, says: str) -> None:
    instead = {"mm(x, interleave)": "mm(x, wait)", "interleave(wait, [2, 2])": "interleave(wait, [4])"}
    text = fused(JOINT)
    assert line in text
    with pytest.raises(shardc.Error, match=says):
        verify({"w": LAYOUT}, joint=parse(text.replace(line, instead.get(line, "reduce_scatter(g,"))))


# Lanes


def test_a_flat_hop_holds_the_lanes_of_all_its_axes() -> None:
    text = """\
def forward(w: f32[1, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'gpu+node', 4, params=['w'])
    b: f32[4, 4] = all_gather(v, 'gpu', 2, params=['v'])
    f: f32[4, 4] = wait(a)
    g: f32[4, 4] = wait(b)
    y: f32[4, 4] = mm(f, g)
    return [y]
"""
    graph = parse(text)
    clock = Clock()
    clock.run(graph, {node: 3.0 * ops.is_start(node) for node in graph.nodes}, "forward")
    assert [(e.lane, e.start_us, e.end_us) for e in clock.events] == [("gpu+node", 0, 3), ("gpu", 3, 6)]
    schedule(graph, lambda node: 3.0 * ops.is_start(node)).lint()


def linked(gb_per_s: float, latency_us: float) -> shardc.Topology:
    node, gpu = Link(gb_per_s, latency_us), Link(1.0, 0.0)
    return shardc.Topology(node=8, gpu=8).with_links(Device("device", 1.0, 1.0, 1.0), node=node, gpu=gpu)


def test_auto_is_flat_where_links_say_so() -> None:
    sizes, megabyte = {"node": 8, "gpu": 8}, 1 << 20
    assert is_faster_flat(linked(1 / 8, 0.0), "all_gather", sizes, megabyte)
    assert not is_faster_flat(linked(1 / 8, 100.0), "all_gather", sizes, megabyte)  # of 63 steps instead of 14
    with pytest.raises(shardc.Error, match="chain='auto' needs to know how fast axes are"):
        shardc.Plan.zero3(TWO_BY_TWO, chain="auto")
    with pytest.raises(shardc.Error, match="chain is 'ring'"):
        shardc.Plan.zero3(TWO_BY_TWO, chain="ring")
    plan = shardc.Plan.zero3(linked(1 / 8, 0.0), chain="auto")
    program = shardc.trace(torch.nn.Linear(64, 64, bias=False), plan, torch.ones(2, 64))
    assert [ops.hop(start).axis for start in ops.hops(program.forward)] == ["gpu+node"]
    assert shardc.Plan.from_json(plan.to_json()) == plan


# Numbers

FLAT = [
    shardc.Plan.zero3(TWO_BY_TWO, chain="flat"),
    shardc.Plan.ddp(TWO_BY_TWO, chain="flat"),
    shardc.Plan.zero1(shardc.Topology(node=3, gpu=2), chain="flat"),
    shardc.Plan.hpz(shardc.Topology(node=3, gpu=2, gcd=2), chain="flat"),
    shardc.Plan.paro(shardc.Topology(node=2, gpu=3), "ING", chain="flat"),
]


@pytest.mark.parametrize("plan", FLAT, ids=lambda plan: f"{spelled(plan)} {plan.topology}")
def test_a_flat_plan_trains_as_one_process(plan: shardc.Plan) -> None:
    assert all_ranks_error(plan, (1, 3)) < LIMIT


def test_flat_and_in_a_wire_trains_nearly_so() -> None:
    plan = shardc.Plan.zero3(TWO_BY_TWO, chain="flat", gather_wire={"node": "int8"}, wire_block=8)
    ranks = AllRanks(plan)
    assert {ops.hop(start).axis for start in ops.hops(ranks.program.backward)} == {"gpu+node"}
    expected = one_process(4, (1, 2))
    for step, count in enumerate((1, 2)):
        assert ranks.step(step, count) == pytest.approx(expected.losses[step], rel=0.02)
        ranks.update()


def trained(index: int, backend: str) -> Trained:
    return sharded(FLAT[index], (1, 3), backend)


@pytest.mark.slow
@pytest.mark.parametrize(("index", "backend"), [(0, "inductor"), (2, "eager")])
def test_on_real_processes_too(index: int, backend: str) -> None:
    world = FLAT[index].topology.world
    expected = one_process(world, (1, 3))
    assert all(worst_error(found, expected) < LIMIT for found in run(trained, world, index, backend))
