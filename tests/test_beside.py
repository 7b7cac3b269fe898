"""What hops of CPUs take of memory beside their values: for ranks that may be behind, and from other hosts."""

from __future__ import annotations

from dataclasses import replace

from passes import ops
from passes.parse import parse
from shardc.arena import pages
from shardc.beside import Flights, arena_bytes, in_arena, received, rooms_bytes
from shardc.links import Device, Link
from shardc.topology import Topology

DEVICE = Device("even", tflops=1.0, memory_gb_per_s=1.0, memory_gb=1.0, efficiency=1.0, slower_fp32=2.0)
LINKS = {"node": Link(1.0, 5.0), "gpu": Link(10.0, 1.0, near=True)}
HOSTS = Topology(node=2, gpu=2).with_links(DEVICE, **LINKS)
WHOLE = 64 * 1024 * 4

GATHERS = """\
def forward(u: f32[32, 1024], v: f32[32, 1024], w: f32[32, 1024], x: f32[64, 64]):
    a: f32[64, 1024] = all_gather(u, 'gpu', 2, params=['u'])
    b: f32[64, 1024] = all_gather(v, 'gpu', 2, params=['v'])
    d: f32[64, 1024] = wait(a)
    i: f32[64, 1024] = mm(x, d)
    e: f32[64, 1024] = wait(b)
    j: f32[64, 1024] = mm(x, e)
    c: f32[64, 1024] = all_gather(w, 'gpu', 2, params=['w'])
    f: f32[64, 1024] = wait(c)
    k: f32[64, 1024] = mm(x, f)
    return [i, j, k]
"""

REDUCTIONS = """\
def backward(u: f32[64, 1024], v: f32[64, 1024], w: f32[32, 1024]):
    a: f32[32, 1024] = reduce_scatter(u, 'AXIS', 2, purpose='reduce', params=['u'])
    d: f32[32, 1024] = wait(a)
    b: f32[32, 1024] = reduce_scatter(v, 'AXIS', 2, purpose='reduce', params=['v'])
    e: f32[32, 1024] = wait(b)
    c: f32[16, 1024] = reduce_scatter(w, 'AXIS', 2, purpose='reduce', params=['w'])
    f: f32[16, 1024] = wait(c)
    return [d, e, f]
"""


def test_what_is_gathered_stays_for_ranks_that_are_behind_until_they_must_have_started_the_next() -> None:
    graph = parse(GATHERS)
    flights, nodes = Flights(graph), [node.name for node in graph.nodes]
    a, b, _ = ops.hops(graph)
    over = {node: replace(flights.life(node, 1), death=nodes.index(last)) for node, last in ((a, "i"), (b, "j"))}
    assert nodes[flights.until_others(over[a], "gpu").death] == "f"  # nobody waits for c before others have started it
    assert nodes[flights.until_others(over[b], "gpu").death] == "f"
    assert nodes[flights.until_others(replace(over[b], death=nodes.index("b")), "node").death] == "output"


def test_an_arena_has_a_share_of_all_that_one_of_its_ranks_may_need() -> None:
    graph = parse(GATHERS)
    assert set(in_arena(graph, HOSTS, {}).values()) == {"gpu"}
    assert arena_bytes([graph], HOSTS) == [3 * WHOLE // 2]
    far = Topology(node=2, gpu=2).with_links(DEVICE, **LINKS | {"gpu": Link(10.0, 1.0)})
    assert in_arena(graph, far, {}) == {} and arena_bytes([graph], far) == [0]


def test_a_room_is_used_again_when_others_must_have_read_it() -> None:
    graph = parse(REDUCTIONS.replace("AXIS", "gpu"))
    sent = WHOLE // 2  # to the one other rank
    assert rooms_bytes([graph], HOSTS) == 2 * sent  # the second is sent when the first may not have been read
    assert rooms_bytes([graph, graph], HOSTS) == 2 * sent
    small = parse(REDUCTIONS.replace("AXIS", "gpu").replace("v: f32[64", "v: f32[8").replace("b: f32[32", "b: f32[4"))
    assert rooms_bytes([small], HOSTS) == sent + pages(sent // 8)


def test_what_comes_from_other_hosts_to_be_summed_is_there_from_start_to_wait() -> None:
    graph = parse(REDUCTIONS.replace("AXIS", "node"))
    assert [life.bytes for life in received(graph, HOSTS)] == [WHOLE // 2, WHOLE // 2, WHOLE // 4]
    assert rooms_bytes([graph], HOSTS) == 0
    assert list(received(parse(REDUCTIONS.replace("AXIS", "gpu")), HOSTS)) == []
