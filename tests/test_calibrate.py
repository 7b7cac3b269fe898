"""Calibrate: what is fitted to measured times, and that a job measures itself."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardc
from passes.wire import message_bytes
from shardc import gauge, trial
from shardc.calibrate import Products, fitted, summary
from shardc.links import Device, Link, ring_steps
from shardc.plan import WIRE_BLOCK
from shardc.trace import trace
from shardc.trial import Runner
from world import run

calibrating = import_module("shardc.calibrate")  # `shardc.calibrate` is its function


def table_of(link: Link, kind: str, size: int) -> tuple[tuple[int, float], ...]:
    sent = [1 << n for n in range(12, 27, 2)]
    return tuple((b, link.us(kind, b, size)) for b in sent)


@pytest.mark.parametrize("link", [Link(50.0, 12.0), Link(0.05, 80.0), Link(300.0, 0.0)])
@pytest.mark.parametrize("size", [2, 8])
def test_latency_and_bandwidth_are_found_again(link: Link, size: int) -> None:
    tables = {kind: table_of(link, kind, size) for kind in ("all_gather", "reduce_scatter")}
    found = fitted(tables, size)
    assert found.gb_per_s == pytest.approx(link.gb_per_s, rel=1e-3)
    assert found.latency_us == pytest.approx(link.latency_us, abs=1e-3)
    for kind, table in tables.items():
        assert all(found.us(kind, sent, size) == pytest.approx(us) for sent, us in table)
    assert found.us("broadcast", 1e6, size) == pytest.approx(link.us("broadcast", 1e6, size), rel=1e-2)


def test_a_latency_below_nothing_is_none() -> None:
    found = fitted({"all_gather": ((1000, 1.0), (10_000, 20.0), (100_000, 300.0))}, 2)
    assert found.latency_us == 0.0 and 0.1 < found.gb_per_s < 2.0


def test_a_group_of_one_rank_takes_no_time() -> None:
    assert fitted({}, 1).us("all_gather", 0, 1) == ring_steps("all_gather", 1) == 0


def measured(path: str) -> str:
    trial.RUNS, trial.DIM, trial.VOCAB, trial.PASSES_S = trial.RUNS[:1], 64, 256, 0.1
    gauge.TURN = 0.05
    slowest, shift = trial._slowest, 1.0 + 0.01 * int(os.environ["RANK"])  # as if their arithmetic was not the same
    trial._slowest = lambda seconds: shift * slowest(seconds)
    found = shardc.calibrate(shardc.Topology(node=2, gpu=2), sizes=[1 << 12, 1 << 16, 1 << 20], out=path)
    return json.dumps(found.to_dict())


def test_a_job_measures_its_axes_and_all_ranks_have_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    found = run(measured, 4, str(path))
    assert len(set(found)) == 1
    topology = shardc.Topology.load(path)
    assert topology == shardc.Topology.from_dict(json.loads(found[0]))
    for axis in ("node", "gpu"):
        tables = topology.link(axis).tables
        assert set(tables) == {"all_gather", "reduce_scatter", "all_to_all", "all_reduce"}
        assert [sent for sent, _ in tables["all_gather"]] == [1 << 11, 1 << 15, 1 << 19]
        assert [sent for sent, _ in tables["all_reduce"]] == [1 << 12, 1 << 16, 1 << 20]
        link = topology.link(axis)
        assert link.gb_per_s > 0 and 0 < link.launch_us < 1e5 and min(link.gather_us_per_mb, link.reduce_us_per_mb) >= 0
        assert link.near
    ((axes, flat),) = topology.flat
    assert axes == "gpu+node" and [sent for sent, _ in flat.tables["all_gather"]] == [3 << 10, 3 << 14, 3 << 18]
    device = topology.computes
    assert device.tflops > 0 and device.memory_gb_per_s > 0
    kinds = ("products", "attention", "attention backward")
    wires = {f"{kind} {wire}" for kind in ("quantize", "dequantize") for wire in ("int8", "int4", "fp8")}
    assert set(device.tables) == {kind + bits for kind in kinds for bits in ("16", "32")} | {"memory"} | wires
    assert device.launch_us > 0 and 0.1 < device.copied_gb_per_s < 1e3
    largest = 2 * 1024**3
    assert device.product_us(largest, 2) == pytest.approx(largest / device.tflops / 1e6)
    assert device.product_us(largest, 4) == pytest.approx(largest / device.tflops / 1e6 * device.slower_fp32)
    assert "GB/s a rank" in summary(topology) and "launch us" in summary(topology)


@pytest.mark.parametrize(("share", "us"), [(1.0, 2e3), (0.5, 0.0)])
def test_on_a_core_of_its_own_a_collective_takes_what_products_lose_to_it(
    monkeypatch: pytest.MonkeyPatch, share: float, us: float
) -> None:
    """And on one that is shared what other threads had of it, here none."""
    made = iter([Products(100, int(1e7 * share), 10**7), Products(80, int(1e7 * share), 10**7)])
    monkeypatch.setattr(calibrating, "_multiplied", lambda a, us: next(made))
    monkeypatch.setattr(calibrating, "time", SimpleNamespace(thread_time_ns=lambda: 0, process_time_ns=lambda: 0))
    lane = SimpleNamespace(start=lambda hop, x: SimpleNamespace(wait=lambda: None))
    assert calibrating._taken_us(lane, None, None, None, 1e4, threads=True) == us


def test_a_slow_second_is_not_all_that_one_of_some_measured_has(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_so_far = []

    def average_us(call: Callable[[], float], device: torch.device) -> float:
        measured_so_far.append(call)
        return call() * (2.0 if 3 <= len(measured_so_far) <= 5 else 1.0)

    monkeypatch.setattr(gauge, "_average_us", average_us)
    assert gauge.in_turns_us([lambda: 10.0, lambda: 20.0], torch.device("cpu")) == [10.0, 20.0]


def test_a_size_that_was_slow_while_others_were_not_counts_as_it_was_the_other_time() -> None:
    table, other = (((10, 5.0), (20, 13.0)), ((10, 6.0), (20, 11.0)))
    once = Device("cpu", 0.1, 8.0, 16.0, slower_fp32=2.0, tables={"products32": table}, launch_us=3.0)
    again = replace(once, tflops=0.08, slower_fp32=1.0, memory_gb_per_s=12.0, tables={"products32": other})
    found = gauge.faster(once, again)
    assert found.tables == {"products32": ((10, 5.0), (20, 11.0))}
    assert (found.tflops, found.slower_fp32, found.memory_gb_per_s) == (0.1, 0.1 / 0.08, 12.0)
    assert found.launch_us == once.launch_us


def test_quantizing_is_measured_without_its_calls_and_without_what_it_reads_and_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Device("cpu", 0.1, 2.0, 16.0, efficiency=1.0)

    def repeated_us(call: partial[object], device: torch.device) -> float:
        (x,) = call.args
        messages = x.dtype == torch.uint8
        elements = x.numel() * WIRE_BLOCK // message_bytes(WIRE_BLOCK, "int8", WIRE_BLOCK) if messages else x.numel()
        moved_bytes = 2 * elements + message_bytes(elements, "int8", WIRE_BLOCK)
        return 100.0 + known.memory_us(moved_bytes) + (5e-3 if messages else 3e-3) * elements

    monkeypatch.setattr(gauge, "repeated_us", repeated_us)
    there, back = gauge._quantized("int8", known)
    device = Device("cpu", 0.1, 2.0, 16.0, tables={"quantize int8": there, "dequantize int8": back})
    for elements in (1 << 10, 1 << 17, 1 << 25):
        assert device.quantized_us(elements, "quantize int8") == pytest.approx(3e-3 * elements)
        assert device.quantized_us(elements, "dequantize int8") == pytest.approx(5e-3 * elements)


def test_copies_are_measured_without_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge, "repeated_us", lambda call, device: 100.0 + call().nbytes * 2 / 5e3)
    assert gauge._copied_gb_per_s(torch.device("cpu")) == pytest.approx(5.0)


def test_a_trial_makes_what_is_foretold_like_what_steps_and_passes_took() -> None:
    links = {
        "node": Link(0.1, 50.0, launch_us=200.0, gather_us_per_mb=2e3, reduce_us_per_mb=3e3),
        "gpu": Link(1.0, 5.0, launch_us=100.0, gather_us_per_mb=500.0, reduce_us_per_mb=1e3, near=True),
    }
    table = ((10**4, 100.0), (10**6, 1e4))
    tables = {f"{kind} int{bits}": table for kind in ("quantize", "dequantize") for bits in (8, 4)}
    device = Device("cpu", 0.1, 2.0, 16.0, slower_fp32=2.0, library="gloo", tables=tables)
    known = shardc.Topology(node=2, gpu=2).with_links(device, **links)
    plans = list(trial._plans(known))
    assert len(plans) == len(trial.RUNS)
    programs = [(trace(trial._model(), plan, trial._batch(plan, 1), keep=False), count) for plan, count in plans]
    true, runs = trial._scaled(known, [1.5, 3.0, 2.0, 2.5]), []
    for program, count in programs:
        runs += [(program, it, trial._foretold_s(program, it, true)) for it in (count, 0)]
    found = trial.refitted(runs, partial(trial._scaled, known), len(trial.HOPS), trial.FIRM["hops"])

    def off(topology: shardc.Topology) -> float:
        return max(abs(trial._foretold_s(program, count, topology) / took_s - 1) for program, count, took_s in runs)

    assert off(found) < 0.05 < 0.15 < off(known)
    assert found.computes.quantized_us(10**6, "quantize int8") == pytest.approx(2.5e4, rel=0.1)
    for itemsize in (2, 4):
        assert found.computes.product_us(10**9, itemsize) == device.product_us(10**9, itemsize), "as without hops"


def test_products_numbers_and_calls_take_what_compute_took() -> None:
    tables = {f"products{bits}": ((10**6, 100.0), (10**9, 1e5)) for bits in ("16", "32")}
    tables |= {"memory": ((1 << 13, 1.0), (1 << 27, 1e5)), "attention16": ((10**6, 200.0), (10**9, 2e5))}
    device = Device("cpu", 0.1, 2.0, 16.0, slower_fp32=2.0, library="gloo", tables=tables, launch_us=40.0, value_ns=0.5)
    known = shardc.Topology(gpu=2).with_links(device, gpu=Link(1.0, 5.0))
    true, runs = trial._with_factors(known, [1.2, 2.5, 4.0, 0.6]), []
    assert true.computes.tables["attention16"] == tables["attention16"]
    assert true.computes.tables["memory"] == tables["memory"], "an optimizer reads and writes as fast as before"
    for model, plan, x in trial._without_hops(known):
        program = trace(model, plan, x, keep=False)
        runs.append((program, 0, trial._foretold_s(program, 0, true)))
    found = trial.pinned(known, runs)
    assert found.computes.launch_us == pytest.approx(24.0, rel=0.2)
    assert found.computes.value_ns == pytest.approx(2.0, rel=0.3), "the least of what is measured here"
    for program, _, took_s in runs:
        assert trial._foretold_s(program, 0, found) == pytest.approx(took_s, rel=0.03)
        assert abs(trial._foretold_s(program, 0, known) / took_s - 1) > 0.1


def test_runs_are_timed_in_turns_so_that_a_slow_minute_is_in_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", 0.1, 2.0, 16.0, slower_fp32=2.0, library="gloo")
    known = shardc.Topology(node=2, gpu=2).with_links(device, node=Link(0.1, 50.0), gpu=Link(1.0, 5.0))
    timed: list[Runner] = []

    def runner(*of_run: object) -> Runner:
        made = Runner(torch.nn.Module(), 1, lambda: timed.append(made) or 1.0)
        return made

    fakes = {"_alone": runner, "_trained": runner, "_passes": runner, "_slowest": float}
    fakes |= {"programs": lambda model: [None]}
    fakes |= {"of_rank_0": lambda found: found, "_foretold_s": lambda *of_run: 1.0, "_rows": lambda *of_run: 1}
    fakes |= {"gauged": lambda cpu, progress: replace(device, memory_gb_per_s=4.0)}
    fakes |= {"pinned": lambda found, runs: found, "refitted": lambda runs, scaled, *of_fit: scaled.args[0]}
    for name, fake in fakes.items():
        monkeypatch.setattr(trial, name, fake)
    launches = iter([900.0, 200.0])
    found = trial.tried(known, lambda topology: {"node": replace(topology.link("node"), launch_us=next(launches))})
    assert found.computes.memory_gb_per_s == 4.0, "as what was measured again is faster"
    assert found.link("node").launch_us == 200.0, "between none of before and 900"
    runs = timed[: len(timed) // trial.ROUNDS]
    assert len({id(it) for it in runs}) == len(runs) == 7 + 2 * len(trial.RUNS)
    assert timed == runs * trial.ROUNDS


def test_passes_are_timed_behind_one_that_does_not_count_and_without_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[tuple[int, bool]] = []

    def passes_s(model: object, x: object, calls: int) -> float:
        passes.append((calls, gc.isenabled()))
        return 0.25

    for name, fake in {"_passes_s": passes_s, "_slowest": float}.items():
        monkeypatch.setattr(trial, name, fake)
    runner = trial._passes(torch.nn.Module(), torch.zeros(1))
    passes.clear()
    assert runner.go_on().rounds_s == [0.25]
    assert passes == [(1, False), (int(trial.PASSES_S / 0.25), False)]
    assert gc.isenabled()


@pytest.mark.parametrize("make", [trial._model, trial._deep_model, trial._adapters])
def test_no_number_of_a_trial_is_near_those_that_are_denormal(make: Callable[[], nn.Sequential]) -> None:
    """With these some CPUs take many times as long."""
    values, model = torch.randn(1, trial.TOKENS, trial.DIM), make()
    sizes = [(values := layer(values)).square().mean().sqrt() for layer in model]
    values.backward()
    sizes += [p.grad.square().mean().sqrt() for p in model.parameters() if p.grad is not None]
    assert min(sizes) > 1e-9


@pytest.mark.parametrize(("slower_fp32", "dtypes"), [(2.0, {None, torch.bfloat16}), (0.1, {None})])
def test_no_model_runs_in_16_bits_where_these_are_emulated(slower_fp32: float, dtypes: set[torch.dtype | None]) -> None:
    device = Device("cpu", 0.1, 2.0, 16.0, slower_fp32=slower_fp32, library="gloo")
    known = shardc.Topology(node=2, gpu=2).with_links(device, node=Link(0.1, 50.0), gpu=Link(1.0, 5.0))
    assert {plan.param_dtype for _, plan, _ in trial._without_hops(known)} == dtypes
    assert {plan.param_dtype for plan, _ in trial._plans(known)} == dtypes


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(shardc.Error, match="not initialised(.|\n)*torchrun"):
        shardc.calibrate(shardc.Topology(node=1, gpu=1))
