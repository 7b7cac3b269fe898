"""Closed forms: the same as the papers', in symbols, and as what real graphs send, in numbers."""

from __future__ import annotations

from itertools import product

import pytest
import sympy
import torch
from sympy import Expr, simplify
from torch import nn

import shardc
from passes import ops
from shardc.cost import MOVES, Symbols, move_seconds, rest_bytes, step_seconds
from shardc.plan import PARO

AXES = ("gpu", "node")
S = Symbols(AXES)
M, Phi, w = S.micro_batches, S.elements, S.weight_bytes
g, m = S.size("gpu"), S.size("node")
B, B_, a, a_ = S.bandwidth("gpu"), S.bandwidth("node"), S.latency("gpu"), S.latency("node")
LETTERS = {"N": 0, "I": 1, "G": 2}


def row(letters: str) -> tuple[int, int, int, int]:
    params, grads, optim = (LETTERS[letter] for letter in letters)
    return params, params, grads, optim


def ring(value: Expr, ranks: Expr, bandwidth: Expr, latency: Expr) -> Expr:
    """An all-gather or a reduce-scatter of a value."""
    return (ranks - 1) / ranks * value / bandwidth + (ranks - 1) * latency


def same(left: Expr, right: Expr) -> bool:
    return simplify(left - right) == 0


# PaRO (arXiv 2310.06003)

INSIDE, ACROSS = ring(Phi * w, g, B, a), ring(Phi * w / g, m, B_, a_)
"""Over the group, and of a slice of it between groups."""
FLAT = ring(Phi * w, g * m, sympy.Min(B, g * B_), sympy.Max(a, a_))
"""Over all ranks at once; each of a group crosses the network at a place of its own."""
WITHIN = {"N": 0, "I": INSIDE, "G": INSIDE + ACROSS}
"""To gather from a letter, or to reduce to it."""


@pytest.mark.parametrize("letters", PARO)
def test_paro_a_step_is_m_times_two_gathers_and_a_reduce_then_the_syncs(letters: str) -> None:
    params, grads, optim = letters
    t_sync_param = WITHIN[optim] - WITHIN[params]
    whole = {"N": 2 * FLAT, "I": 2 * ACROSS, "G": 0}[optim]
    t_sync_grad = WITHIN[optim] - WITHIN[grads] + whole
    expected = M * (2 * WITHIN[params] + WITHIN[grads]) + t_sync_grad + t_sync_param
    assert same(step_seconds(row(letters), AXES), expected)


def test_paro_the_gather_after_the_step_sends_1_over_m_of_the_bytes_of_a_flat_one() -> None:
    """Only between groups: a slice in the place of everything."""
    refresh = move_seconds(row("IIG"), AXES)["refresh"].subs({a_: 0})
    assert same(refresh, (m - 1) / m * (Phi * w / g) / B_)
    assert B not in refresh.free_symbols


# AMSP (arXiv 2311.00257)

s_ = {0: sympy.Integer(1), 1: g, 2: g * m}


def amsp_bytes(params: int, grads: int, optim: int) -> Expr:
    return 2 * Phi / s_[params] + 2 * Phi / s_[grads] + 12 * Phi / s_[optim]


NESTED = [row for row in product(range(3), repeat=3) if row[2] >= max(row[:2])]


@pytest.mark.parametrize(("params", "grads", "optim"), NESTED)
def test_amsp_memory_is_ours_or_more_where_a_state_needs_no_second_home(params: int, grads: int, optim: int) -> None:
    ours = rest_bytes((params, params, grads, optim), AXES).subs({w: 2})
    once = sum((2 * Phi / s_[rung] for rung in (params, grads) if rung == optim), sympy.Integer(0))
    assert same(amsp_bytes(params, grads, optim) - ours, once)


@pytest.mark.parametrize("rung", [1, 2])
def test_amsp_t_p_is_two_gathers_and_a_reduce_of_2_phi(rung: int) -> None:
    """T_p = M [2 t(AG, 2 Phi, p) + t(RS, 2 Phi, p)], over the axes of p."""
    moves = move_seconds((rung, rung, rung, 2), AXES)
    t = INSIDE if rung == 1 else INSIDE + ACROSS
    each = moves["forward gather"] + moves["backward gather"] + moves["reduce"]
    assert same(M * each, M * 3 * t)


@pytest.mark.parametrize(("params", "optim"), [(0, 1), (0, 2), (1, 2)])
def test_amsp_even_shards_send_fewer_bytes_than_all_reduce_and_broadcast(params: int, optim: int) -> None:
    """T_os0 + T_os1 against sync + refresh, where gradients rest with parameters; bandwidths alike, no latencies."""
    alike = {B: 1, B_: 1, a: 0, a_: 0, w: 2}
    moves = move_seconds((params, params, params, optim), AXES)
    ours = (moves["sync"] + moves["refresh"]).subs(alike)
    dp, p, os = g * m, s_[params], s_[optim]
    all_reduce = 2 * (dp / p - 1) / (dp / p) * 2 * Phi / p
    broadcast = (os / p) * (2 * Phi / os)
    for sizes in ({g: 8, m: 2}, {g: 8, m: 128}, {g: 2, m: 2}):
        assert (all_reduce + broadcast - ours).subs({**sizes, Phi: 1}) > 0


# ZeRO (arXiv 1910.02054), ZeRO++ (2306.10209), MiCS (2205.00119)


def volume(letters: str, after_forward: int | None = None) -> dict[str, Expr]:
    """Bytes that one rank sends over each axis in a step of one micro-batch."""
    params, _, grads, optim = row(letters)
    it = (params, params if after_forward is None else after_forward, grads, optim)
    seconds = step_seconds(it, AXES).subs({M: 1, a: 0, a_: 0})
    return {"gpu": seconds.subs({B: 1, B_: sympy.oo}), "node": seconds.subs({B: sympy.oo, B_: 1})}


@pytest.mark.parametrize(("letters", "times"), [("NNN", 2), ("NNG", 2), ("NGG", 2), ("GGG", 3)])
def test_zero_sends_twice_the_model_or_three_times_where_parameters_are_sharded(letters: str, times: int) -> None:
    """(n-1)/n of it, n = all ranks."""
    sent = volume(letters)["gpu"] if letters == "NNN" else sum(volume(letters).values(), sympy.Integer(0))
    assert same(sent, times * (g * m - 1) / (g * m) * Phi * w)


def test_zeropp_a_secondary_shard_takes_the_backward_off_the_network() -> None:
    share = (m - 1) / m * Phi * w / g
    assert same(volume("GGG")["node"], 3 * share)
    assert same(volume("GGG", after_forward=1)["node"], 2 * share)


def test_mics_crosses_the_network_once_a_step_with_an_all_reduce_of_the_shard() -> None:
    moves = move_seconds(row("III"), AXES)
    assert B_ not in (moves["forward gather"] + moves["backward gather"] + moves["reduce"]).free_symbols
    assert same(moves["sync"], 2 * ring(Phi * w / g, m, B_, a_))


# Real graphs


class Squares(nn.Module):
    """Every parameter divides evenly and is needed in the backward; the input's gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = torch.tanh(x @ weight)
        return x.sum()


@pytest.mark.parametrize("letters", PARO)
def test_graphs_send_what_the_closed_form_says(letters: str) -> None:
    topology = shardc.Topology(node=2, gpu=4)
    x = torch.empty(2, 16, requires_grad=True)
    program = shardc.trace(Squares(), shardc.Plan.paro(topology, letters), x, keep=False)
    counted = dict.fromkeys(AXES, 0)
    for variant in program.step(3):
        for start in ops.hops(program.graph(variant)):
            axes = ops.hop(start).axis.split("+")
            for axis in axes:  # a flat one crosses the network at four places
                counted[axis] += ops.moved_bytes(start) // (4 if axis == "node" and "gpu" in axes else 1)
    numbers = {M: 3, Phi: 3 * 16 * 16, w: 4, g: 4, m: 2, a: 0, a_: 0}
    seconds = step_seconds(row(letters), AXES).subs(numbers)
    assert counted == {"gpu": seconds.subs({B: 1, B_: sympy.oo}), "node": seconds.subs({B: sympy.oo, B_: 1})}


def test_every_move_has_its_formula() -> None:
    assert list(move_seconds(row("IIG"), AXES)) == list(MOVES)
