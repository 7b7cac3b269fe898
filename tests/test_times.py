"""How long nodes take: links in closed form and measured, a roofline for compute, and a schedule that uses both."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardc
from passes import ops
from passes.parse import parse
from shardc.gauge import Block
from shardc.links import MACHINES, Device, Link
from shardc.times import busy_us, collective_us, hop_us, overhead_us, times_us
from shardc.topology import Topology

DEVICE = Device("even", tflops=1.0, memory_gb_per_s=1.0, memory_gb=1.0, efficiency=1.0, slower_fp32=2.0)
SLOW = Topology(node=2, gpu=4).with_links(DEVICE, node=Link(1.0, 5.0), gpu=Link(10.0, 1.0))


def starts(text: str) -> list[float]:
    graph = parse(f"def forward(w: f32[250, 4], v: f32[2000]):\n    {text}\n    f = wait(a)\n    return [f]\n")
    return [hop_us(start, SLOW) for start in ops.hops(graph)]


# Links


def test_a_ring_takes_a_latency_a_step_and_the_bytes_that_a_rank_sends() -> None:
    kilobytes = 4 * 250 * 4 / 1e3
    assert starts("a = all_gather(w, 'gpu', 4, params=['w'])") == [3 * 1.0 + 3 * kilobytes / 10]
    assert starts("a = all_gather(w, 'node', 2, params=['w'])") == [5.0 + kilobytes]
    assert starts("a = reduce_scatter(v, 'gpu', 4, params=['v'])") == [3 * 1.0 + 0.75 * 8.0 / 10]
    assert starts("a = all_reduce(v, 'node', 2, params=['v'])") == [2 * 5.0 + 8.0]


def test_all_reduces_between_hosts_of_gpus_go_along_trees_and_nothing_else_does() -> None:
    link = Link(1.0, 10.0, trees=True)
    assert [link.us("all_reduce", 0.0, size) for size in (1, 2, 3, 8, 128)] == [0.0, 20.0, 40.0, 60.0, 140.0]
    assert link.us("all_gather", 0.0, 128) == link.us("reduce_scatter", 0.0, 128) == 1270.0
    assert Link.from_dict(link.to_dict()) == link
    flat = replace(SLOW.link("node"), trees=True)
    shape = SLOW.with_links(DEVICE, node=flat, gpu=SLOW.link("gpu"))
    assert collective_us(shape, "all_reduce", "gpu+node", 0.0, 8) == 6 * 5.0


def test_a_flat_ring_crosses_each_axis_at_as_many_places_as_there_are_ranks_inside() -> None:
    sent = 7 / 8 * 8 * 4.0
    assert starts("a = all_gather(w, 'gpu+node', 8, params=['w'])") == [max(sent / 10, sent / 4) + 7 * 5.0]


def test_what_was_measured_counts() -> None:
    link = Link(1.0, 1.0, {"all_gather": ((1000, 10.0), (4000, 20.0))})
    assert link.us("all_gather", 10, 2) == 10.0
    assert link.us("all_gather", 2000, 2) == pytest.approx(10 * 2**0.5)
    assert link.us("all_gather", 8000, 2) == 40.0
    assert link.us("reduce_scatter", 8000, 2) == 9.0
    assert Link.from_dict(link.to_dict()) == link


@pytest.mark.parametrize("table", [(), ((10, 1.0), (5, 2.0)), ((10, 2.0), (20, 1.0)), ((0, 1.0),)])
def test_a_table_that_does_not_rise_is_refused(table: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(shardc.Error, match="the table of all_gather does not rise"):
        Link(1.0, 1.0, {"all_gather": table})


def test_a_link_that_cannot_be_is_refused() -> None:
    with pytest.raises(shardc.Error, match=r"a link of 0 GB/s with 1.0 us cannot be"):
        Link(0, 1.0)


def test_of_a_device_too() -> None:
    device = replace(DEVICE, tables={"products32": ((10**6, 10.0), (10**9, 1000.0)), "memory": ((4096, 1.0),)})
    assert [device.product_us(n, 4) for n in (0, 10, 10**6, 2 * 10**9)] == [0.0, 10.0, 10.0, 2000.0]
    assert device.product_us(10**9, 2) == 1000.0, "16-bit products were not measured"
    assert [device.memory_us(n) for n in (0, 1, 8192)] == [0.0, 1.0, 2.0]
    assert Device.from_dict(device.to_dict()) == device


def test_attention_takes_what_was_measured_of_it() -> None:
    tables = {"attention32": ((10, 3000.0),), "attention backward32": ((10, 7000.0),)}
    device = replace(DEVICE, tables=tables)
    link = Link(1.0, 0.0)
    topology = Topology(node=1, gpu=1).with_links(device, node=link, gpu=link)
    program = shardc.trace(Block(8, 2), shardc.Plan.ddp(topology), torch.randn(1, 4, 8, requires_grad=True), keep=False)
    for variant, measured_us in zip(program.step(), (3000.0, 7000.0), strict=True):
        us = times_us(program.graph(variant), topology)
        (attends,) = [node for node in us if node.op == "call_function" and "scaled_dot" in node.name]
        operations = {"forward": 2, "backward": 5}[variant.half] * 2 * 2 * 4 * 4 * 4
        assert us[attends] == measured_us * operations / 10
        assert max(t for node, t in us.items() if node is not attends) < 10.0


def test_many_heads_do_not_attend_faster_as_long_sequences_do() -> None:
    device = replace(DEVICE, tables={"products16": ((10, 9.0),), "attention16": ((100, 10.0), (400, 20.0))})
    assert device.product_us(100, 2, "attention", 1) == 10.0
    assert device.product_us(400, 2, "attention", 1) == 20.0, "a longer sequence"
    assert device.product_us(400, 2, "attention", 4) == 40.0, "four"
    assert device.product_us(40, 2, "attention backward", 4) == 36.0, "not measured: a product like others"


# Topologies


@pytest.mark.parametrize("name", MACHINES)
def test_presets_say_everything_and_travel_as_json(name: str) -> None:
    topology = Topology.preset(name, nodes=3)
    assert topology.sizes[0] == 3
    assert all(topology.link(axis).gb_per_s > 0 for axis in topology.axes)
    assert topology.computes.tflops > 0
    plan = shardc.Plan.zero3(topology)
    assert shardc.Plan.from_json(plan.to_json()).topology == topology
    assert MACHINES[name].source


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(shardc.Error, match=r"there is no preset 'dgx-h10'; there are dgx-a100, dgx-h100.*") as error:
        Topology.preset("dgx-h10", nodes=1)
    assert "did you mean 'dgx-h100'?" in str(error.value)


def test_an_axis_without_a_link_and_a_topology_without_any() -> None:
    with pytest.raises(shardc.Error, match="axis 'node' of .* has no link"):
        Topology(node=2, gpu=2).with_links(DEVICE, gpu=Link(1.0, 1.0))
    with pytest.raises(shardc.Error, match="unknown axis 'gpus'"):
        Topology(node=2, gpu=2).with_links(DEVICE, gpus=Link(1.0, 1.0), node=Link(1.0, 1.0), gpu=Link(1.0, 1.0))
    with pytest.raises(shardc.Error, match="does not say what its devices are and how fast its axes"):
        Topology(gpu=2).link("gpu")


@pytest.mark.parametrize("change", [{"links": [{}]}, {"device": {"name": "x"}}, {"links": "fast"}])
def test_saved_links_that_do_not_read(change: dict[str, object]) -> None:
    saved = Topology(gpu=2).with_links(DEVICE, gpu=Link(1.0, 1.0)).to_dict() | change
    with pytest.raises(shardc.Error, match="the links and the device of a saved topology do not read"):
        Topology.from_dict(saved)


def test_a_saved_device_without_links_is_not_passed_over() -> None:
    saved = Topology(gpu=2).with_links(DEVICE, gpu=Link(1.0, 1.0)).to_dict()
    del saved["links"]
    with pytest.raises(shardc.Error, match="do not read: KeyError"):
        Topology.from_dict(saved)


# Compute


def us(text: str, device: Device = DEVICE) -> dict[str, float]:
    graph, topology = parse(text), SLOW.with_links(device, **dict(SLOW.links))
    return {node.name: time for node, time in times_us(graph, topology).items() if time}


def test_a_product_takes_its_operations_or_its_bytes() -> None:
    small = us("def forward(x: f32[10, 10], w: f32[10, 10]):\n    y = mm(x, w)\n    return [y]\n")
    assert small == {"y": 3 * 400 / 1e3}
    large = us("def forward(x: f32[4000, 4000], w: f32[4000, 4000]):\n    y = mm(x, w)\n    return [y]\n")
    assert large == {"y": 2 * 4000**3 / 1e6 * 2}
    half = us("def forward(x: bf16[4000, 4000], w: bf16[4000, 4000]):\n    y = mm(x, w)\n    return [y]\n")
    assert half == {"y": 2 * 4000**3 / 1e6}


def test_fused_ops_cost_what_enters_and_leaves_them() -> None:
    text = """\
def forward(x: f32[1000], w: f32[1000]):
    a = relu(x)
    v = view(a, [10, 100])
    b = neg(v)
    c = view(b, [1000])
    d = mul.Tensor(c, w)
    return [d]
"""
    assert us(text) == {"a": 4.0, "d": 8.0}


def test_copies_take_longer_than_what_computes() -> None:
    text = """\
def forward(x: f32[1000], w: f32[1000]):
    bucket = cat([x, w])
    y = relu(x)
    z = neg(y)
    return [bucket, z]
"""
    assert us(text, replace(DEVICE, value_ns=3.0, copied_gb_per_s=0.5)) == {"bucket": 2 * 16.0, "y": 4.0, "z": 4.0}


def test_calling_a_product_takes_a_host_time_and_what_is_fused_does_not() -> None:
    text = "def forward(x: f32[10, 10], w: f32[10, 10]):\n    y = mm(x, w)\n    z = relu(y)\n    return [z]\n"
    assert us(text, replace(DEVICE, launch_us=7.0)) == {"y": 3 * 400 / 1e3 + 7.0, "z": 2 * 400 / 1e3}


def test_a_product_takes_as_much_longer_as_its_matrices_have_numbers() -> None:
    text = "def forward(x: f32[10, 10], w: f32[10, 1]):\n    y = mm(x, w)\n    return [y]\n"
    numbers = 10 * 10 + 10 + 10
    assert us(text, replace(DEVICE, value_ns=3.0)) == {"y": pytest.approx(4 * numbers / 1e3 + 3 * numbers / 1e3)}


def test_an_optimizer_calls_a_step_for_each_parameter_and_reads_and_writes_it() -> None:
    device = replace(DEVICE, launch_us=7.0)
    assert device.updated_us(1000, optimizer_states=2) == 7.0 + (1 + 2 * 3) * 1000 / 1e3
    assert device.updated_us(0, optimizer_states=2) == 7.0, "other ranks have all of it"


def test_quantizing_takes_what_was_measured_of_it_beside_its_bytes() -> None:
    there = "def forward(x: f32[64, 64]):\n    m = quantize(x, 'int8', 64, 2)\n    return [m]\n"
    back = "def forward(m: u8[2, 2176]):\n    y = shardc.dequantize(m, 'int8', 64, [64, 64], f32)\n    return [y]\n"
    measured = replace(DEVICE, tables={"quantize int8": ((4096, 300.0),), "dequantize int8": ((4096, 200.0),)})
    moved_us = (4096 * 4 + 2 * 2176) / 1e3
    assert us(there) == {"m": moved_us} and us(back) == {"y": moved_us}
    assert us(there, measured) == {"m": moved_us + 300.0} and us(back, measured) == {"y": moved_us + 200.0}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_counts_on_a_cpu_too_for_each_head_of_the_queries(kv_heads: int) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q * self.scale, k, k, enable_gqa=True)

    topology = Topology(gpu=1).with_links(DEVICE, gpu=Link(1.0, 1.0))
    q, k = torch.zeros(1, 4, 8192, 64), torch.zeros(1, kv_heads, 4096, 64)
    program = shardc.trace(Attention(), shardc.Plan.ddp(topology), q, k, keep=False)
    product = 2 * 4 * 8192 * 4096 * 64
    for variant, products in zip(program.step(), (2, 5), strict=True):
        times = times_us(program.graph(variant), topology)
        found = [time for node, time in times.items() if "attention" in str(node.target)]
        assert found == [products * product / 1e6 * 2]


# Together


def test_a_slow_link_gets_its_gathers_earlier_than_a_fast_one() -> None:
    def ahead(gb_per_s: float) -> int:
        topology = Topology(gpu=2).with_links(DEVICE, gpu=Link(gb_per_s, 0.0))
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        program = shardc.trace(model, shardc.Plan.zero3(topology), torch.zeros(64, 64))
        order = [
            node for node in program.forward.nodes if ops.is_start(node) or node.target is torch.ops.aten.mm.default
        ]
        return order.index(next(node for node in order if not ops.is_start(node)))

    assert ahead(1000.0) == 5
    assert ahead(0.001) == 2


def buckets_of(
    plan: str, gb_per_s: float, layers: int = 6, half: str = "forward", launch_us: float = 0.0, rows: int = 4
) -> list[tuple[str, ...]]:
    """What the hops carry, in order, by purpose and layer."""
    device, link = replace(DEVICE, memory_gb_per_s=1000.0), Link(gb_per_s, 10.0, launch_us=launch_us)
    topology = Topology(node=2, gpu=2).with_links(device, node=link, gpu=link)
    block = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(layers)))
    made = shardc.Plan.paro(topology, "IIG") if plan == "IIG" else shardc.Plan.zero3(topology)
    program = shardc.trace(model, made, torch.zeros(rows, 64))
    graph = program.refreshed() if half == "forward" else program.backward
    return [(ops.hop(n).purpose, *ops.hop(n).params) for n in graph.nodes if ops.is_start(n)]


def test_where_there_is_little_to_hide_behind_large_parameters_go_one_by_one_unless_compute_waits_anyway() -> None:
    middling = buckets_of("zero3", gb_per_s=0.08, rows=4096)
    assert ("gather", "0.0.weight") in middling and ("gather", "0.1.weight") in middling
    assert ("gather", "4.0.weight", "4.1.weight") in middling
    waiting = buckets_of("zero3", gb_per_s=0.08, rows=512)
    assert ("gather", "0.0.weight", "0.1.weight") in waiting
    fast = buckets_of("zero3", gb_per_s=1000.0)
    assert ("gather", "0.0.weight", "0.1.weight") in fast


@pytest.mark.parametrize(("half", "purpose"), [("forward", "gather"), ("backward", "reduce")])
def test_what_takes_many_latencies_goes_on_its_own_everywhere(half: str, purpose: str) -> None:
    slow = buckets_of("zero3", gb_per_s=0.001, half=half)
    assert (purpose, "5.0.weight") in slow and (purpose, "5.1.weight") in slow
    fast = buckets_of("zero3", gb_per_s=1000.0, half=half)
    assert (purpose, "5.0.weight", "5.1.weight") in fast


@pytest.mark.parametrize(("half", "purpose"), [("forward", "gather"), ("backward", "reduce")])
def test_where_launches_hold_up_compute_there_are_fewer(half: str, purpose: str) -> None:
    slow = buckets_of("zero3", gb_per_s=0.001, half=half, launch_us=1e6)
    assert {len(names) for it, *names in slow if it == purpose} == {2}


@pytest.mark.parametrize("name", ["zero3", "IIG"])
def test_waits_take_of_compute_what_launching_each_hop_once_and_its_bytes_do(name: str) -> None:
    links = {"node": Link(0.01, 1.0, launch_us=7.0, gather_us_per_mb=1e3), "gpu": Link(0.01, 1.0, launch_us=7.0)}
    topology = Topology(node=2, gpu=2).with_links(DEVICE, **links)
    plan = shardc.Plan.zero3(topology) if name == "zero3" else shardc.Plan.paro(topology, name)
    program = shardc.trace(nn.Linear(64, 64, bias=False), plan, torch.zeros(4, 64))
    graph = program.graph(program.step()[0])
    launches = {node: us for node, us in times_us(graph, topology).items() if ops.is_wait(node)}
    hops = [node for node in graph.nodes if ops.is_start(node)]
    relayed = [source for hop in hops if (source := ops.relayed(hop))]
    assert relayed and all(bool(ops.wait_of(hop)) == (name == "IIG") for hop in relayed), "a refresh is kept, too"
    sent_bytes = 64 * 64 * 4 / 4  # a quarter over the network
    assert sum(launches.values()) == pytest.approx(7.0 * len(hops) + 1e3 * sent_bytes / 1e6)
    assert all(busy == pytest.approx(0.0) for lane, busy in busy_us(launches, topology).items() if not lane)


def test_what_arrives_where_it_is_gathered_takes_the_second_hop_no_bytes() -> None:
    link = Link(0.01, 1e3, gather_us_per_mb=1e3)
    model, x = nn.Linear(64, 64, bias=False), torch.zeros(4, 64)

    def second_hop(near: bool) -> tuple[float, float]:
        topology = Topology(node=2, gpu=2).with_links(DEVICE, node=link, gpu=replace(link, near=near))
        program = shardc.trace(model, shardc.Plan.zero3(topology), x)
        (hop,) = (node for node in ops.hops(program.forward, "gather") if ops.hop(node).axis == "gpu")
        return hop_us(hop, topology), overhead_us(hop, topology)

    half_bytes = 64 * 64 * 4 / 2
    assert second_hop(near=False) == pytest.approx((1e3 + half_bytes / 10, 1e3 * half_bytes / 1e6))
    assert second_hop(near=True) == pytest.approx((1e3, 0.0), abs=0.2)


@pytest.mark.parametrize("gb_per_s", [0.001, 0.05, 1000.0])
def test_a_gather_is_in_the_bucket_of_the_refresh_that_it_takes(gb_per_s: float) -> None:
    found = buckets_of("IIG", gb_per_s)
    refreshed, gathered = ({tuple(names) for it, *names in found if it == purpose} for purpose in ("refresh", "gather"))
    assert refreshed == gathered
