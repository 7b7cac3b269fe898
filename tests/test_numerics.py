"""Numerics: under every plan, training is that of one process.

Breadth runs the program's graphs for all ranks in one process, with a step loop that keeps a list of ranks for each
thing that the runtime keeps; a few plans run on real Gloo processes. `examples/bench/correct.py` is the full sweep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import shardc
from passes import ops
from passes.insert import Param
from passes.layout import Layout
from shardc.links import Device, Link
from shardc.testing import run_ranks
from training import LIMIT, MicroBatches, adamw, batch, one_process, sharded, small, spelled, worst_error
from world import run

PerRank = list[Tensor]

TWO_BY_TWO = shardc.Topology(node=2, gpu=2)
THREE_BY_TWO = shardc.Topology(node=3, gpu=2)
TWO_BY_THREE = shardc.Topology(node=2, gpu=3)
THREE_AXES = shardc.Topology(node=3, gpu=2, gcd=2)

THRICE_THEN_ONCE = (3, 1)
"""A step that accumulates, and one that sees what became of it."""


class AllRanks:
    """A training loop for all ranks in one process, over the graphs of one program."""

    def __init__(self, plan: shardc.Plan):
        self.topology, self.world = plan.topology, plan.topology.world
        model = small()
        self.program = shardc.trace(model, plan, *batch(0, 0, 0))
        self.params = {p.layout.name: p for p in self.program.params.values()}
        full = dict(model.named_parameters())
        self.shards = {name: self.cut(p.layout, full[name].detach()) for name, p in self.params.items()}
        trained = [n for n, p in self.params.items() if p.layout.trainable]
        self.leaves = {name: [s.clone().requires_grad_() for s in self.shards[name]] for name in trained}
        self.optimizers = [adamw([leaves[rank] for leaves in self.leaves.values()]) for rank in range(self.world)]
        self.copies: dict[str, PerRank] = {}

    def cut(self, layout: Layout, full: Tensor) -> PerRank:
        """Each rank's piece on the optim rung, its real rows only."""
        return [piece(layout, full, self.topology.coordinate(rank)) for rank in range(self.world)]

    def travelling(self, name: str) -> PerRank:
        """Optim shards at the length at which they travel. What the padding holds must not matter."""
        layout = self.params[name].layout
        shape = layout.rung_shape(layout.optim)
        filler = 0.0 if self.params[name].wires.gather else torch.nan  # a block of a wire is all that is in it
        return [padded(s.detach(), shape, filler) for s in self.leaves.get(name, self.shards[name])]

    def step(self, step: int, micro_batches: int) -> float:
        """Forwards, backwards and an optimizer step; returns the mean loss."""
        waiting: dict[str, PerRank] = {}
        losses = []
        for micro in range(micro_batches):
            outs = self.forward(step, micro, refresh=micro == 0)
            losses += [out[0][0] for out in outs]
            waiting = self.backward([out[1] for out in outs], waiting, 1 / micro_batches, micro == micro_batches - 1)
        return float(torch.stack(losses).mean())

    def forward(self, step: int, micro: int, *, refresh: bool) -> list:
        graph = self.program.refreshed() if refresh else self.program.forward
        given = [dict(zip(("ids", "labels"), batch(step, micro, rank), strict=True)) for rank in range(self.world)]
        values = {n: self.at_rest(p, refresh) for n, p in self.program.params.items()}
        names = self.program.captured.inputs
        args = [[given[rank][n] if n in given[rank] else values[n][rank] for n in names] for rank in range(self.world)]
        outs = self.run(graph, args)
        if any(p.has_copy for p in self.params.values()) and refresh:
            self.copies = {name: [out[2][name] for out in outs] for name in outs[0][2]}
        return outs

    def at_rest(self, param: Param, refresh: bool) -> PerRank:
        name = param.layout.name
        return self.copies[name] if param.has_copy and not refresh else self.travelling(name)

    def backward(self, saved: list, waiting: dict[str, PerRank], tangent: float, synced: bool) -> dict[str, PerRank]:
        """What accumulates unsynced, by placeholder; everything else is in `.grad`."""
        accumulated = {n: p for n, p in self.program.params.items() if n in waiting}
        graph = self.program.variation(synced=synced, accumulated=accumulated)
        before = [[waiting[n][rank] for n in accumulated] for rank in range(self.world)]
        args = [[*saved[rank], torch.tensor(tangent), *before[rank]] for rank in range(self.world)]
        outs = self.run(graph, args)
        placeholders = {p.layout.name: n for n, p in self.program.params.items()}
        grads = {name: [out[name] for out in outs] for name in outs[0]}
        kept = {name for name in grads if self.params[name].needs_sync and not synced}
        for name in grads.keys() - kept:
            self.deliver(name, grads[name])
        return {placeholders[name]: grads[name] for name in kept}

    def deliver(self, name: str, grads: PerRank) -> None:
        for leaf, grad in zip(self.leaves[name], grads, strict=True):
            real = grad[: len(leaf)] if leaf.dim() else grad
            leaf.grad = real.clone() if leaf.grad is None else leaf.grad + real

    def run(self, graph: torch.fx.Graph, args: list) -> list:
        return run_ranks(graph, args, **dict(zip(self.topology.axes, self.topology.sizes, strict=True)))

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def piece(layout: Layout, full: Tensor, coordinate: tuple[int, ...]) -> Tensor:
    if not layout.optim:
        return full.clone()
    return full[layout.local_start(coordinate) :][: layout.local_rows(coordinate)].clone()


def padded(rows: Tensor, shape: tuple[int, ...], filler: float) -> Tensor:
    if tuple(rows.shape) == shape:
        return rows
    value = rows.new_full(shape, filler)
    value[: len(rows)] = rows
    return value


def all_ranks_error(plan: shardc.Plan, micro_batches: MicroBatches) -> float:
    """The worst relative error of all ranks, each against its piece of the one process's."""
    ranks = AllRanks(plan)
    expected = one_process(plan.topology.world, micro_batches)
    worst = 0.0
    for step, count in enumerate(micro_batches):
        loss = ranks.step(step, count)
        worst = max(worst, abs(loss - expected.losses[step]) / expected.losses[step])
        grads = {n: [leaf.grad for leaf in leaves] for n, leaves in ranks.leaves.items() if leaves[0].grad is not None}
        assert grads.keys() == expected.grads[step].keys()
        worst = max(worst, *errors(ranks, grads, expected.grads[step]))
        ranks.update()
    return max(worst, *errors(ranks, ranks.shards | ranks.leaves, expected.params))


def errors(ranks: AllRanks, found: dict[str, PerRank], expected: dict[str, Tensor]) -> Iterator[float]:
    for name, pieces in found.items():
        largest = expected[name].abs().max()
        for ours, theirs in zip(pieces, ranks.cut(ranks.params[name].layout, expected[name]), strict=True):
            assert ours.shape == theirs.shape
            if ours.numel():
                yield float(((ours - theirs).abs().max() / largest).nan_to_num(torch.inf))


def rows(topology: shardc.Topology, *rows: tuple[int, int, int, int]) -> list[shardc.Plan]:
    """Plans from numbers of inner axes, in the order params, after_forward, grads, optim."""
    states = ("params", "after_forward", "grads", "optim")
    return [shardc.Plan(topology, **dict(zip(states, row, strict=True))) for row in rows]


@pytest.mark.parametrize("plan", shardc.Plan.legal(TWO_BY_TWO), ids=spelled)
def test_every_plan_on_two_by_two_trains_as_one_process(plan: shardc.Plan) -> None:
    assert all_ranks_error(plan, THRICE_THEN_ONCE) < LIMIT


SAMPLE = [
    *rows(THREE_BY_TWO, (2, 1, 2, 2), (1, 0, 2, 2), (2, 2, 1, 2)),
    *rows(TWO_BY_THREE, (2, 2, 2, 2), (0, 0, 1, 2), (1, 1, 1, 1)),
    *rows(THREE_AXES, (3, 2, 1, 3), (1, 1, 2, 3)),
]


@pytest.mark.parametrize("plan", SAMPLE, ids=str)
def test_axes_of_unequal_size_are_not_confused(plan: shardc.Plan) -> None:
    assert all_ranks_error(plan, THRICE_THEN_ONCE) < LIMIT


def in_pieces(plan: shardc.Plan) -> shardc.Plan:
    """On links without latency, so that what can be cut is."""
    device, link = Device("device", tflops=1.0, memory_gb_per_s=1.0, memory_gb=1.0), Link(1.0, 0.0)
    topology = plan.topology.with_links(device, **dict.fromkeys(plan.topology.axes, link))
    return replace(plan, topology=topology)


@pytest.mark.parametrize(
    "plan", map(in_pieces, [shardc.Plan.zero3(TWO_BY_TWO), SAMPLE[0], SAMPLE[2], *SAMPLE[-2:]]), ids=str
)
def test_what_travels_in_pieces_trains_as_one_process(plan: shardc.Plan) -> None:
    program = shardc.trace(small(), plan, *batch(0, 0, 0))
    graphs = (program.forward, program.backward)
    assert any(ops.hop(start).piece != ops.WHOLE for graph in graphs for start in ops.hops(graph))
    assert all_ranks_error(plan, THRICE_THEN_ONCE) < LIMIT


REAL = rows(TWO_BY_TWO, (0, 0, 1, 2), (2, 1, 2, 2), (1, 1, 1, 1))


def trained_errors(plans: list[shardc.Plan], backend: str, depth: int = 1) -> dict[str, float]:
    """On each rank, plan after plan."""
    expected = one_process(plans[0].topology.world, THRICE_THEN_ONCE, depth)
    return {spelled(p): worst_error(sharded(p, THRICE_THEN_ONCE, backend, depth), expected) for p in plans}


def check(world: int, plans: list[shardc.Plan], backend: str, depth: int = 1) -> None:
    for errors_of_rank in run(trained_errors, world, plans, backend, depth):
        assert max(errors_of_rank.values()) < LIMIT, errors_of_rank


def test_real_processes_train_as_one_process() -> None:
    check(4, REAL, "eager")


def test_real_processes_do_not_confuse_axes_of_unequal_size() -> None:
    check(6, SAMPLE[:1], "eager")


@pytest.mark.slow
def test_real_processes_train_as_one_process_when_compiled() -> None:
    """Two blocks, so that one compiled region serves both."""
    check(4, REAL[:2], "inductor", depth=2)
