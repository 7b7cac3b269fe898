"""The clock, the bound, memory, and the files that people look at."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import fx, nn

import shardc
from passes import ops
from passes.errors import Error
from passes.order import Order
from passes.parse import parse
from shardc.footprint import ARENA, GATHERED, ROOMS, Footprint, Peak, footprint
from shardc.links import Device, Link
from shardc.program import MOST, Program, Variant
from shardc.simulate import Clock, simulate
from shardc.timeline import COMPUTE, Timeline, duration, label, size

TEXT = """\
def forward(w: f32[2, 4], v: f32[2, 4], x: f32[4, 4]):
    'layers.0'
    a: f32[4, 4] = all_gather(w, 'gpu', 2, params=['layers.0.w'])
    b: f32[4, 4] = all_gather(v, 'gpu', 2, params=['layers.1.v'])
    f: f32[4, 4] = wait(a)
    y: f32[4, 4] = mm(x, f)
    'layers.1'
    g: f32[4, 4] = wait(b)
    z: f32[4, 4] = mm(y, g)
    return [z]
"""


def run(text: str, hop_us: float, compute_us: float, launch_us: float = 0.0) -> Clock:
    graph = parse(text)
    clock = Clock()
    us = {n: hop_us if ops.is_start(n) else compute_us if n.op == "call_function" else 0.0 for n in graph.nodes}
    clock.run(graph, {n: launch_us if ops.is_wait(n) else t for n, t in us.items()}, "forward")
    return clock


def test_a_hop_waits_for_the_one_before_it_on_its_lane_and_compute_for_what_it_needs() -> None:
    clock = run(TEXT, hop_us=3.0, compute_us=2.0)
    found = [(e.lane, e.name, e.start_us, e.end_us, e.exposed_us) for e in clock.events]
    assert found == [
        ("gpu", "gather layers.0.w", 0.0, 3.0, 3.0),
        ("gpu", "gather layers.1.v", 3.0, 6.0, 1.0),
        (COMPUTE, "layers.0", 3.0, 5.0, 0.0),
        (COMPUTE, "layers.1", 6.0, 8.0, 0.0),
    ]
    assert clock.now_us == 8.0


def test_what_a_launch_takes_of_compute_holds_it_up_behind_the_wait() -> None:
    clock = run(TEXT, hop_us=3.0, compute_us=2.0, launch_us=0.5)
    found = [(e.name, e.start_us, e.end_us, e.exposed_us) for e in clock.events]
    assert found == [
        ("gather layers.0.w", 0.0, 3.0, 3.0),
        ("gather layers.1.v", 3.0, 6.0, 0.5),
        ("model", 3.0, 3.5, 0.0),
        ("layers.0", 3.5, 5.5, 0.0),
        ("layers.0", 6.0, 6.5, 0.0),
        ("layers.1", 6.5, 8.5, 0.0),
    ]


def test_what_bytes_take_of_compute_they_take_while_it_goes_on_beside_their_hop() -> None:
    graph, clock = parse(TEXT), Clock(bytes_us=lambda start: 1.5)
    us = {n: 0.0 if ops.is_wait(n) else 3.0 if ops.is_start(n) else 2.0 for n in graph.nodes if n.op == "call_function"}
    clock.run(graph, {n: us.get(n, 0.0) for n in graph.nodes}, "forward")
    found = [(e.name, e.start_us, e.end_us, e.exposed_us) for e in clock.events]
    assert found == [
        ("gather layers.0.w", 0.0, 3.0, 3.0),  # compute waits: nothing
        ("gather layers.1.v", 3.0, 6.0, 0.0),
        ("layers.0", 3.0, 6.0, 0.0),  # in 3 us 1 us of 1.5
        ("layers.1", 6.0, 8.0, 0.0),
    ]


def test_compute_goes_on_as_alone_when_a_hop_beside_it_is_over() -> None:
    graph, clock = parse(TEXT), Clock(bytes_us=lambda start: 1.0)
    clock.run(graph, {n: {"a": 1.0, "b": 1.0, "y": 2.0, "z": 2.0}.get(n.name, 0.0) for n in graph.nodes}, "forward")
    assert [(e.start_us, e.end_us) for e in clock.events if e.lane == COMPUTE] == [(1.0, 3.5), (3.5, 5.5)]


def test_hops_of_two_axes_run_side_by_side() -> None:
    clock = run(TEXT.replace("all_gather(v, 'gpu'", "all_gather(v, 'node'"), hop_us=3.0, compute_us=2.0)
    assert [e.exposed_us for e in clock.events if e.hop] == [3.0, 0.0]
    assert clock.now_us == 7.0


def test_parameters_of_a_bucket_are_named_by_what_they_share() -> None:
    assert label(["layers.3.norm.weight"]) == "layers.3.norm.weight"
    assert label(["layers.3.norm.weight", "layers.3.mlp.up"]) == "layers.3 (2)"
    assert label(["embed", "head"]) == "model (2)"


# Whole steps


class Blocks(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


TOPOLOGY = shardc.Topology(node=2, gpu=4).with_links(
    Device("device", tflops=0.01, memory_gb_per_s=1.0, memory_gb=1.0), node=Link(0.05, 5.0), gpu=Link(0.5, 2.0)
)
PLANS = {
    "zero3": shardc.Plan.zero3(TOPOLOGY),
    "ddp": shardc.Plan.ddp(TOPOLOGY),
    "hpz": shardc.Plan.hpz(TOPOLOGY, param_dtype=torch.bfloat16),
    "IIG": shardc.Plan.paro(TOPOLOGY, "IIG"),
    "ING": shardc.Plan.paro(TOPOLOGY, "ING"),
}


@cache
def traced(plan: str) -> Program:
    return shardc.trace(Blocks(), PLANS[plan], torch.empty(32, 64, dtype=PLANS[plan].param_dtype), keep=False)


@cache
def timeline(plan: str, micro_batches: int = 1) -> Timeline:
    return simulate(traced(plan), micro_batches=micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_no_step_beats_its_bound_and_time_adds_up(plan: str, micro_batches: int) -> None:
    it = timeline(plan, micro_batches)
    assert 0 < it.bound.us <= it.step_us
    assert it.step_us == pytest.approx(it.busy_us[COMPUTE] + it.exposed_us)
    assert sum(it.exposed.values()) == pytest.approx(it.exposed_us)
    assert all(0 < part <= 1 + 1e-9 for part in it.utilisation.values())


def test_each_micro_batch_makes_a_bound_longer_by_its_compute_though_hops_take_much_longer() -> None:
    slow = TOPOLOGY.with_links(TOPOLOGY.computes, node=Link(1e-3, 5.0), gpu=Link(1e-2, 2.0))
    steps = [simulate(traced("ddp"), slow, micro_batches=n) for n in (1, 2, 3)]
    between_us = sum(e.us for e in steps[2].events if e.graph in ("forward 1", "backward 1"))
    bounds_us = [it.bound.us for it in steps]
    assert bounds_us[0] > 10 * between_us
    assert bounds_us[1] - bounds_us[0] == pytest.approx(between_us, rel=0.1)  # that has no gradients to add to
    assert bounds_us[2] - bounds_us[1] == pytest.approx(between_us)


@pytest.mark.parametrize("plan", PLANS)
def test_lanes_do_one_thing_after_the_other(plan: str) -> None:
    it = timeline(plan, 3)
    for lane in it.lanes:
        events = [e for e in it.events if e.lane == lane]
        assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(events))


@pytest.mark.parametrize("plan", PLANS)
def test_a_timeline_has_every_hop_of_the_graphs_with_its_bytes(plan: str) -> None:
    program = traced(plan)
    starts = [n for variant in program.step(2) for n in ops.hops(program.graph(variant))]
    found = [(e.hop, e.sent_bytes) for e in sorted(timeline(plan, 2).events, key=lambda e: e.issued_us) if e.hop]
    assert len(found) == len(starts)
    assert sum(sent for _, sent in found) == sum(map(ops.moved_bytes, starts))


def test_refresh_is_in_the_first_micro_batch_and_sync_in_the_last() -> None:
    purposes = {(e.graph, e.hop.purpose) for e in timeline("IIG", 2).events if e.hop}
    assert {graph for graph, purpose in purposes if purpose == "refresh"} == {"forward 0"}
    assert {graph for graph, purpose in purposes if purpose == "sync"} == {"backward 1"}


def test_faster_links_take_less_time_down_to_compute_alone() -> None:
    fast = shardc.Topology(node=2, gpu=4).with_links(TOPOLOGY.computes, node=Link(1e6, 0.0), gpu=Link(1e6, 0.0))
    it = simulate(traced("zero3"), fast)
    assert it.step_us < timeline("zero3").step_us
    assert it.exposed_us == pytest.approx(0, abs=1.0)
    assert it.step_us / it.bound.us < 1.2  # what is left are copies into buckets and out of them


def test_memory_starts_and_ends_with_what_rests_and_peaks_above_it() -> None:
    it = timeline("zero3")
    piece = sum(p.numel() for p in Blocks().parameters()) * 4 // 8
    assert it.rest_bytes == 3 * piece
    assert it.memory[0][1] >= it.rest_bytes
    assert it.memory[-1][1] == it.rest_bytes + piece  # the gradients
    assert it.peak_bytes == max(b for _, b in it.memory) == sum(it.peak.by_kind.values()) > it.rest_bytes + piece
    assert "layers." in it.peak.where


def test_unsynced_micro_batches_keep_their_sums() -> None:
    full = sum(p.numel() for p in Blocks().parameters()) * 4
    it = timeline("ddp", 2)
    second_us = min(e.start_us for e in it.events if e.graph == "forward 1")
    assert min(held for us, held in it.memory if us >= second_us) >= it.rest_bytes + full


def test_what_is_on_its_way_has_room_that_is_kept() -> None:
    program = traced("zero3")
    calls = [(variant, program.graph(variant)) for variant in program.step()]
    plain, sent = footprint(program, calls), footprint(replace(program, library="gloo"), calls)
    layer = 64 * 65 * 4
    rooms = sent.peak.by_kind[ROOMS]
    assert layer <= rooms <= 8 * layer  # along two axes, in whole pages
    assert sent.peak.bytes == plain.peak.bytes + rooms
    assert sent.end_bytes == plain.end_bytes + rooms


def test_the_gradient_of_an_embedding_is_all_there_before_it_is_scaled() -> None:
    model = nn.Embedding(4096, 64)
    program = shardc.trace(model, shardc.Plan.ddp(TOPOLOGY), torch.zeros(4, 8, dtype=torch.long))
    peak = footprint(program, [(variant, program.graph(variant)) for variant in program.step()]).peak
    sums = [value for value in peak.largest if "index_put" in value or "embedding" in value]
    assert [value.split(" ", 1)[1] for value in sums] == ["1.0 MiB"]


def test_what_ranks_of_one_host_gather_is_there_once_for_all_of_them() -> None:
    links = {"node": Link(1.0, 1.0), "gpu": Link(1.0, 1.0)}
    near = {axis: replace(link, near=True) for axis, link in links.items()}

    def gathered_bytes(links: dict[str, Link]) -> tuple[int, int, int]:
        topology = shardc.Topology(node=2, gpu=2).with_links(TOPOLOGY.computes, **links)
        program = replace(shardc.trace(Blocks(), shardc.Plan.zero3(topology), torch.ones(4, 64)), library="gloo")
        peak = footprint(program, [(variant, program.graph(variant)) for variant in program.step()]).peak
        return tuple(peak.by_kind.get(kind, 0) for kind in (GATHERED, ARENA, ROOMS))  # type: ignore[return-value]

    apart, nothing, sent = gathered_bytes(links)
    still_apart, shared, scattered = gathered_bytes(near)
    full = sum(p.numel() for p in Blocks().parameters()) * 4
    once = full // 2 + full // 4  # for two ranks: all, and halves of all
    assert nothing == 0 and once < shared <= 2 * once  # of the forward, too, for a rank that is behind
    assert still_apart < apart and 0 < scattered <= sent


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


@pytest.mark.parametrize("factors", [(2, 2, 8), (4, 4, 4)])
def test_a_sum_between_two_hops_of_a_gradient_holds_up_compute_no_more_than_none(factors: tuple[int, int, int]) -> None:
    """An order made for hops that follow each other at once would have compute wait for each, to add it."""
    slow = shardc.Topology(node=4, gpu=2).with_links(TOPOLOGY.computes, node=Link(0.3, 1.0), gpu=Link(1.5, 1.0))
    program = shardc.trace(Deep(), shardc.Plan.amsp(slow, *factors), torch.empty(64, 64), keep=False)
    waits_us = []
    for micro_batches in (1, 2):
        events = simulate(program, micro_batches=micro_batches).events
        last = [e.graph for e in events if e.graph.startswith("backward")][-1]
        waits_us.append(sum(e.exposed_us for e in events if e.graph == last))
    assert waits_us[1] <= waits_us[0]


# A limit of memory


def limited(plan: str, limit: int | str) -> Program:
    it = PLANS[plan]
    tight = shardc.Plan(it.topology, params=it.params, grads=it.grads, optim=it.optim, memory_limit=limit)
    return shardc.trace(Blocks(), tight, torch.empty(32, 64), keep=False)


def test_with_room_to_spare_a_limit_changes_nothing() -> None:
    assert set(limited("zero3", "1GB").allowances.values()) == {MOST}


def test_less_is_gathered_ahead_to_stay_below_a_limit() -> None:
    free = timeline("zero3").peak_bytes
    program = limited("zero3", free - 1)
    assert min(allowed.window for allowed in program.allowances.values()) < 1.0
    assert simulate(program).peak_bytes < free


def test_compute_does_not_stand_still_for_each_reduce_as_soon_as_there_is_a_limit() -> None:
    batch = torch.empty(64, 64)
    free = simulate(shardc.trace(Deep(), PLANS["ddp"], batch, keep=False))
    plan = replace(PLANS["ddp"], memory_limit=free.peak_bytes - 1)
    tight = simulate(shardc.trace(Deep(), plan, batch, keep=False))
    assert tight.peak_bytes < free.peak_bytes
    assert tight.step_us == free.step_us


def test_of_calls_that_need_too_much_the_one_has_to_do_with_less_whose_arena_they_keep() -> None:
    forward, backward = Variant("forward"), Variant("backward")
    levels, peak = [[50, 70], [90, 80]], Peak(90, "", {}, ())
    for arenas, above in (([30, 20], [forward, backward]), ([20, 30], [backward]), ([], [backward])):
        found = Footprint(0, levels, peak, arenas)
        assert found.above(85, [forward, backward]) == above
        assert found.above(90, [forward, backward]) == []


@pytest.mark.parametrize("plan", ["IIG", "zero3"])
def test_a_call_has_what_it_needs_though_another_has_to_do_with_less(plan: str) -> None:
    """Several micro-batches hold gradients more, in the calls of all but the first: their sums, or those of ZeRO-3."""
    alone, several = timeline(plan).peak_bytes, timeline(plan, 2).peak_bytes
    program = limited(plan, (alone + several) // 2)
    first, others = program.step(1), {*program.step(3)} - {*program.step(1)}
    assert {program.allowances[variant] for variant in first} == {MOST}
    assert min(program.allowances[variant].window for variant in others) < 1.0
    assert simulate(program).step_us == timeline(plan).step_us


def least_of_zero3() -> int:
    """The lowest memory limit under which it can be trained."""
    least = timeline("zero3").peak_bytes
    with suppress(Error):
        while True:
            least = simulate(limited("zero3", least - 1)).peak_bytes
    return least


def test_where_there_is_no_room_for_earlier_gradients_a_backward_says_so_and_no_forward() -> None:
    """They may be zeroed between the two."""
    program = limited("zero3", least_of_zero3())
    assert program.plain(again=True) is program.forward
    with pytest.raises(Error, match="A step needs"):
        program.variation(synced=True, accumulated={}, again=True)


def test_while_less_and_less_is_gathered_ahead_no_graph_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, made, scheduled = least_of_zero3(), [], Program.scheduled

    def noted(program: Program, graph: fx.Graph, variant: Variant, order: Order | None = None) -> fx.Graph:
        made.append((variant, program.allowances.get(variant), str(order)))
        return scheduled(program, graph, variant, order)

    monkeypatch.setattr(Program, "scheduled", noted)
    assert limited("zero3", limit).unfit
    assert len(made) == len({*made})


@pytest.mark.parametrize("letters", ["IIG", "GIG"])
def test_a_limit_holds_for_any_number_of_micro_batches(letters: str) -> None:
    """Those between the first and the last take more than either does."""
    batch = torch.empty(64, 64)
    free = shardc.trace(Deep(), shardc.Plan.paro(TOPOLOGY, letters), batch, keep=False)
    two, three, four = (simulate(free, micro_batches=n).peak_bytes for n in (2, 3, 4))
    assert two < three == four
    program = shardc.trace(Deep(), shardc.Plan.paro(TOPOLOGY, letters, memory_limit=two), batch, keep=False)
    for micro_batches in (1, 2, 3, 4):
        if not program.unfit.keys() & {*program.step(micro_batches)}:
            assert simulate(program, micro_batches=micro_batches).peak_bytes <= two
    assert not program.unfit.keys() & {*program.step(2)}


def test_calls_that_cannot_be_limited_are_an_error_when_they_are_made_and_others_go_on() -> None:
    least = simulate(limited("ddp", timeline("ddp").peak_bytes - 1)).peak_bytes
    program = limited("ddp", least)
    assert simulate(program).peak_bytes <= least
    with pytest.raises(Error, match=r"A step needs (.|\n)*Steps of fewer micro-batches fit"):
        simulate(program, micro_batches=2)


def test_a_limit_that_cannot_be_met_names_the_peak_what_lives_there_and_what_to_move() -> None:
    with pytest.raises(Error) as error:
        limited("ddp", "100KB")
    text = str(error.value)
    assert "memory_limit is 0.1 MiB" in text
    assert re.search(r"master parameters and optimizer state 0\.\d MiB", text)
    assert re.search(r"at: \w+ of the (forward|backward) \(", text)
    assert "fix: Most are master parameters and optimizer state: shard `optim` over more axes." in text


@pytest.mark.parametrize(
    ("limit", "size_bytes"), [(5, 5), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("10mb", 10**7), (None, None)]
)
def test_limits_are_bytes_or_texts(limit: int | str | None, size_bytes: int | None) -> None:
    plan = shardc.Plan(TOPOLOGY, memory_limit=limit)
    assert plan.memory_limit == size_bytes
    assert shardc.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("limit", ["80", "GB", 0, -1, 2.5, True])
def test_other_limits_are_refused(limit: object) -> None:
    with pytest.raises(Error, match="memory_limit is"):
        shardc.Plan(TOPOLOGY, memory_limit=limit)  # type: ignore[arg-type]


# What is written


def test_the_trace_is_json_with_a_slice_an_event(tmp_path: Path) -> None:
    it = timeline("hpz")
    it.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(it.events)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {COMPUTE, "gpu", "node"}
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")


def test_the_picture_is_svg_with_a_box_an_event(tmp_path: Path) -> None:
    it = timeline("hpz")
    it.svg(tmp_path / "timeline.svg")
    root = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    boxes = [e for e in root.iter() if e.tag.endswith("title")]
    assert len(boxes) == len(it.events)
    assert any("exposed" in str(box.text) for box in boxes)


def test_a_timeline_prints_what_one_asks_first() -> None:
    text = str(timeline("zero3"))
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["step", "bound", "lanes", "memory"]


@pytest.mark.parametrize(("us", "text"), [(3.25, "3.2 us"), (4500, "4.50 ms"), (2e6, "2.00 s")])
def test_durations_read_well(us: float, text: str) -> None:
    assert duration(us) == text


@pytest.mark.parametrize(("bytes_", "text"), [(12, "12 B"), (2048, "2.00 KiB"), (3 << 30, "3.00 GiB")])
def test_sizes_read_well(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


# Bad input


def test_a_topology_of_another_shape_is_refused() -> None:
    with pytest.raises(Error, match="The program is for"):
        simulate(traced("zero3"), shardc.Topology(node=4, gpu=2))


def test_a_topology_without_links_says_what_to_do() -> None:
    with pytest.raises(Error, match="with_links|preset"):
        simulate(traced("zero3"), shardc.Topology(node=2, gpu=4))
