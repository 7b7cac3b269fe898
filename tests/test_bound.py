"""The bound: what no order of the same compute and the same moves can beat."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from passes.parse import parse
from shardc.bound import _before_us, _bound, _Job, _lane_bound, _needed


def jobs(*rows: tuple[str, float, list[int]]) -> list[_Job]:
    return [_Job(us, (lane,), us, needs) for lane, us, needs in rows]


def test_a_job_begins_behind_its_longest_chain() -> None:
    found = jobs(("gpu", 3.0, []), ("compute", 2.0, [0]), ("node", 1.0, [1]), ("compute", 1.0, [0]))
    assert _before_us(found, [job.needs for job in found]) == [0.0, 3.0, 5.0, 3.0]


def test_a_job_begins_behind_all_that_a_lane_has_to_do_for_it() -> None:
    found = jobs(("gpu", 3.0, []), ("gpu", 4.0, []), ("node", 5.0, []), ("compute", 1.0, [0, 1, 2]))
    assert _before_us(found, [job.needs for job in found])[3] == 7.0


def test_views_and_the_like_lead_on() -> None:
    found = jobs(
        ("gpu", 3.0, []), ("compute", 0.0, [0]), ("gpu", 4.0, []), ("compute", 0.0, [1, 2]), ("node", 1.0, [3])
    )
    assert _before_us(found, [job.needs for job in found])[4] == 7.0


def test_a_lane_begins_with_a_head_and_leaves_a_tail() -> None:
    assert _lane_bound([(1.0, 2.0, 0.0), (4.0, 2.0, 0.0)]) == pytest.approx(6.0)
    assert _lane_bound([(1.0, 2.0, 0.0), (4.0, 2.0, 3.0)]) == pytest.approx(9.0)


def test_what_leaves_the_longest_tail_comes_first_even_in_between() -> None:
    assert _lane_bound([(0.0, 4.0, 2.0), (1.0, 4.0, 5.0)]) == pytest.approx(10.0)


def test_what_leaves_no_tail_does_not_hide_what_does() -> None:
    assert _lane_bound([(0.0, 5.0, 10.0), (1.0, 3.0, 0.0)]) == pytest.approx(15.0)


def test_hops_of_a_chain_count_as_side_by_side_and_compute_waits_for_all_of_them() -> None:
    graph = parse(
        """\
def forward(w: f32[2, 4], x: f32[8, 8]):
    a = all_gather(w, 'node', 2, params=['w'])
    f = wait(a)
    b = all_gather(f, 'gpu', 2, params=['w'])
    g = wait(b)
    y = mm(x, g)
    return [y]
"""
    )
    names = {node.name: node for node in graph.nodes}
    assert _needed(names["b"]) == [names["w"]]
    assert _needed(names["f"]) == [names["a"]]
    assert _needed(names["g"]) == [names["b"], names["a"]]


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_a_small_program_beats_it(seed: int) -> None:
    rng = random.Random(seed)
    found: list[_Job] = []
    for i in range(6):
        needs = [n for n in range(i) if rng.random() < 0.4]
        found += jobs((rng.choice(["compute", "gpu", "node"]), float(rng.randint(1, 5)), needs))
    best = min(_makespan(found, order) for order in permutations(range(6)))
    assert _bound(found).us <= best + 1e-9


def _makespan(found: list[_Job], order: tuple[int, ...]) -> float:
    """Lanes take their jobs in this order; infinite where a job comes before one that it needs."""
    free, end = dict.fromkeys(("compute", "gpu", "node"), 0.0), {}
    for i in order:
        if any(n not in end for n in found[i].needs):
            return float("inf")
        begin = max([free[found[i].lanes[0]], *(end[n] for n in found[i].needs)])
        end[i] = free[found[i].lanes[0]] = begin + found[i].us
    return max(end.values())
