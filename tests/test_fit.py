"""How far hops get away from compute under a memory limit; `shardc.fit`."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

import shardc
from shardc.fit import BOTH, LEAST, WAYS, Look, for_longer, narrowed
from shardc.program import MOST, Allowance
from test_simulate import PLANS, Deep

Times = Callable[[Allowance], float]


def fits(limits: Mapping[str, Allowance]) -> Look[str, Mapping[str, Allowance]]:
    """Steps whose calls need too much as soon as they are allowed more than these."""
    return lambda given: (given, [call for call, most in limits.items() if given[call] > most])


def takes(us: Times) -> Callable[[Mapping[str, Allowance]], float]:
    return lambda given: sum(map(us, given.values()))


def windows(allowed: Allowance) -> float:
    """Where compute waits for what it needs."""
    return 1.0 - allowed.window


def piles(allowed: Allowance) -> float:
    """Where compute waits for gradients to be gone."""
    return 1.0 / allowed.pile


def test_calls_that_need_no_more_than_there_is_are_left_alone() -> None:
    given, _, above = narrowed(["forward", "backward"], fits({"forward": MOST, "backward": BOTH[2]}), takes(windows))
    assert given == {"forward": MOST, "backward": BOTH[2]}
    assert not above


@pytest.mark.parametrize(("us", "taken"), [(windows, Allowance(1, 0.5)), (piles, Allowance(2, 0.0))])
def test_where_to_gather_less_ahead_does_not_suffice_the_faster_of_two_ways_is_taken(
    us: Times, taken: Allowance
) -> None:
    given, _, above = narrowed(["backward"], fits({"backward": Allowance(2, 0.0)}), takes(us))
    assert given == {"backward": taken}
    assert not above


def test_a_way_that_does_not_lead_below_the_limit_is_not_taken() -> None:
    given, _, above = narrowed(["backward"], fits({"backward": Allowance(1, 0.25)}), takes(piles))
    assert given == {"backward": Allowance(1, 0.25)}
    assert not above


def test_where_nothing_suffices_calls_have_the_least_and_are_named() -> None:
    given, _, above = narrowed(["forward", "backward"], fits({"forward": MOST, "backward": (0, 0.0)}), takes(windows))
    assert given["backward"] == LEAST
    assert above == ["backward"]


def test_where_the_least_does_not_suffice_nothing_between_is_looked_at() -> None:
    seen = []

    def look(given: Mapping[str, Allowance]) -> tuple[None, list[str]]:
        seen.append(given["backward"])
        return None, ["backward"]

    narrowed(["backward"], look, lambda _: 0.0)
    assert seen == [MOST, LEAST]


def shared_forward_with(least_us: float, limit: Allowance) -> dict[str, Allowance]:
    """Steps of one allow the forward everything, longer ones only a limit; with less a step of one takes so long."""

    def takes_us(given: Mapping[str, Allowance]) -> float:
        return 1.0 if given["forward"] == MOST else least_us

    alone = fits({"forward": MOST, "last": MOST})
    longer = fits({"forward": limit, "middle": BOTH[1]})
    tried = narrowed(["forward", "last"], alone, takes_us)
    return for_longer(tried, ["forward", "middle"], alone, longer, takes_us)[0]


def test_a_step_of_one_micro_batch_keeps_what_it_has_where_longer_ones_fit_beside_it() -> None:
    assert shared_forward_with(9.0, limit=MOST) == {"forward": MOST, "last": MOST, "middle": BOTH[1]}


def test_a_step_of_one_micro_batch_loses_little_for_longer_ones_and_never_much() -> None:
    assert shared_forward_with(1.04, limit=BOTH[2])["forward"] == BOTH[2]
    assert shared_forward_with(1.06, limit=BOTH[2])["forward"] == MOST


def test_every_way_goes_on_down_to_the_least() -> None:
    for way in WAYS:
        assert [*BOTH, *way] == sorted({*BOTH, *way}, reverse=True)
        assert way[-1] == LEAST


def test_a_program_in_little_memory_is_faster_for_the_second_way(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.empty(64, 64)
    free = shardc.simulate(shardc.trace(Deep(), PLANS["IIG"], batch, keep=False))
    plan = replace(PLANS["IIG"], memory_limit=int(0.88 * free.peak_bytes))
    both = shardc.simulate(shardc.trace(Deep(), plan, batch, keep=False))
    monkeypatch.setattr("shardc.fit.WAYS", WAYS[:1])
    first = shardc.simulate(shardc.trace(Deep(), plan, batch, keep=False))
    assert both.peak_bytes <= first.peak_bytes <= 0.88 * free.peak_bytes
    assert both.step_us < first.step_us
