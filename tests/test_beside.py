"""What hops of CPUs take of memory beside their values: for ranks that may be behind, and from other hosts."""

from __future__ import annotations

from collections import Counter

from passes.parse import parse
from shardc.beside import SEGMENT, Flights, arena_bytes, in_arena, received, rooms_bytes, scratch_bytes
from shardc.links import Device, Link
from shardc.topology import Topology

DEVICE = Device("even", tflops=1.0, memory_gb_per_s=1.0, memory_gb=1.0, efficiency=1.0, slower_fp32=2.0)
LINKS = {"node": Link(1.0, 5.0), "gpu": Link(10.0, 1.0, near=True)}
HOSTS = Topology(node=2, gpu=2).with_links(DEVICE, **LINKS)
WHOLE = 64 * 1024 * 4
SMALL = WHOLE // 8

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

ONE = """\
def forward(u: f32[32, 1024], x: f32[64, 64]):
    a: f32[64, 1024] = all_gather(u, 'gpu', 2, params=['u'])
    d: f32[64, 1024] = wait(a)
    i: f32[64, 1024] = mm(x, d)
    return [i]
"""

GAPS = """\
def forward(t: f32[4, 1024], u: f32[4, 1024], v: f32[4, 1024], w: f32[4, 1024], z: f32[32, 1024], x: f32[8, 8]):
    a: f32[8, 1024] = all_gather(t, 'gpu', 2, params=['t'])
    b: f32[8, 1024] = all_gather(u, 'gpu', 2, params=['u'])
    c: f32[8, 1024] = all_gather(v, 'gpu', 2, params=['v'])
    d: f32[8, 1024] = wait(a)
    e: f32[8, 1024] = wait(b)
    f: f32[8, 1024] = wait(c)
    g: f32[8, 1024] = mm(x, d)
    h: f32[8, 1024] = mm(x, f)
    i: f32[8, 1024] = all_gather(w, 'gpu', 2, params=['w'])
    j: f32[8, 1024] = wait(i)
    k: f32[8, 1024] = mm(x, j)
    l: f32[64, 1024] = all_gather(z, 'gpu', 2, params=['z'])
    m: f32[8, 1024] = mm(x, e)
    n: f32[64, 1024] = wait(l)
    o: f32[64, 1024] = mul.Tensor(n, 2)
    return [g, h, k, m, o]
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


def test_ranks_that_are_behind_may_need_something_until_they_must_have_started_the_next_hop() -> None:
    graph = parse(GATHERS)
    flights, nodes = Flights([graph, graph]), [node.name for node in graph.nodes] * 2

    def until(name: str, axis: str = "gpu") -> int:
        return flights.until_others(nodes.index(name), axis)

    first = {name: nodes.index(name) for name in nodes}
    again = {name: len(nodes) // 2 + i for name, i in first.items()}
    assert until("i") == until("j") == first["f"]  # nobody waits for c before others have started it
    assert until("a") == first["e"] and until("k") == again["d"]  # in the next call
    assert flights.until_others(again["k"], "gpu") == until("b", "node") == len(nodes)


def test_an_arena_has_a_share_of_all_that_one_of_its_ranks_may_need() -> None:
    graph = parse(GATHERS)
    assert set(in_arena(graph, HOSTS, {}).values()) == {"gpu"}
    assert arena_bytes([graph], HOSTS) == [Counter(gpu=3 * WHOLE // 2)]
    far = Topology(node=2, gpu=2).with_links(DEVICE, **LINKS | {"gpu": Link(10.0, 1.0)})
    assert in_arena(graph, far, {}) == {} and arena_bytes([graph], far) == [Counter()]


def test_what_ranks_that_are_behind_need_of_a_step_lies_beside_what_the_next_gathers_first() -> None:
    assert arena_bytes([parse(ONE)], HOSTS) == [Counter(gpu=2 * WHOLE // 2)]


def test_an_arena_reaches_past_gaps_that_are_too_small() -> None:
    """When l comes, those of a and c are free, but that of b lies between them."""
    assert arena_bytes([parse(GAPS)], HOSTS) == [Counter(gpu=(4 * SMALL + WHOLE) // 2)]


def test_a_room_is_used_again_when_others_must_have_read_it() -> None:
    graph = parse(REDUCTIONS.replace("AXIS", "gpu"))
    sent = WHOLE // 2  # to the one other rank; of w half as much, which has a room of its own
    assert rooms_bytes([graph], HOSTS) == 2 * sent + sent // 2  # b is sent when a may not have been read
    assert rooms_bytes([graph, graph], HOSTS) == 2 * sent + sent // 2
    like = REDUCTIONS.replace("AXIS", "gpu").replace("w: f32[32", "w: f32[64").replace("c: f32[16", "c: f32[32")
    assert rooms_bytes([parse(like.replace("f: f32[16", "f: f32[32"))], HOSTS) == 2 * sent  # c is where a was


IN_TURN = """\
def backward(u: f32[64, 1024], v: f32[56, 1024], w: f32[8, 1024]):
    a: f32[32, 1024] = reduce_scatter(u, 'gpu', 2, purpose='reduce', params=['a'])
    b: f32[32, 1024] = wait(a)
    c: f32[28, 1024] = reduce_scatter(v, 'gpu', 2, purpose='reduce', params=['c'])
    d: f32[28, 1024] = wait(c)
    e: f32[4, 1024] = reduce_scatter(w, 'gpu', 2, purpose='reduce', params=['e'])
    f: f32[4, 1024] = wait(e)
    g: f32[28, 1024] = reduce_scatter(v, 'gpu', 2, purpose='reduce', params=['g'])
    h: f32[32, 1024] = reduce_scatter(u, 'gpu', 2, purpose='reduce', params=['h'])
    i: f32[28, 1024] = wait(g)
    j: f32[32, 1024] = wait(h)
    k: f32[4, 1024] = reduce_scatter(w, 'gpu', 2, purpose='reduce', params=['k'])
    l: f32[4, 1024] = wait(k)
    return [b, d, f, i, j, l]
"""


def test_a_value_lies_in_the_smallest_room_that_is_free() -> None:
    """g where c was, though a's would do: h needs that."""
    assert rooms_bytes([parse(IN_TURN)], HOSTS) == (32 + 28 + 4) * 1024 * 4


ALL_REDUCES = """\
def backward(u: f32[64, 1024], v: f32[1024, 1024], w: f32[1024, 1024]):
    a: f32[64, 1024] = all_reduce(u, 'node', 2, purpose='reduce', params=['u'])
    b: f32[1024, 1024] = all_reduce(v, 'node', 2, purpose='reduce', params=['v'])
    c: f32[1024, 1024] = all_reduce(w, 'AXIS', 2, purpose='reduce', params=['w'])
    d: f32[64, 1024] = wait(a)
    e: f32[1024, 1024] = wait(b)
    f: f32[1024, 1024] = wait(c)
    return [d, e, f]
"""


def test_all_reduces_have_scratch_for_two_segments_of_each_of_two_along_an_axis() -> None:
    one = parse(ALL_REDUCES.replace("AXIS", "node"))
    assert scratch_bytes([one]) == scratch_bytes([one, one]) == 2 * 2 * SEGMENT
    two = parse(ALL_REDUCES.replace("AXIS", "gpu"))
    assert scratch_bytes([two]) == 2 * (SEGMENT + WHOLE // 4) + 2 * SEGMENT
    assert scratch_bytes([parse(GATHERS)]) == 0


def test_what_comes_from_other_hosts_to_be_summed_is_there_from_start_to_wait() -> None:
    graph = parse(REDUCTIONS.replace("AXIS", "node"))
    assert [life.bytes for life in received(graph, HOSTS)] == [WHOLE // 2, WHOLE // 2, WHOLE // 4]
    assert rooms_bytes([graph], HOSTS) == 0
    assert list(received(parse(REDUCTIONS.replace("AXIS", "gpu")), HOSTS)) == []
