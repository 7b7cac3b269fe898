"""Exchange: reductions by all-to-all, where that sends less."""

from __future__ import annotations

import pytest
import torch

from passes import ops
from passes.exchange import exchange
from passes.fuse import fuse
from passes.layout import Layout
from passes.parse import parse
from passes.verify import verify
from shardc.links import Device, Link
from shardc.testing import run_ranks
from shardc.times import exchanged
from shardc.topology import Topology
from test_fuse import JOINT

TWO = Topology(node=2, gpu=2)
LAYOUT = Layout("w", (8, 4), (("gpu", 2), ("node", 2)), 2, 2, 2, 2)
EXCHANGED = ((1 << 10, 20.0), (1 << 20, 1000.0))
SLOW_SCATTER = {"reduce_scatter": ((1 << 10, 20.0), (1 << 20, 2000.0)), "all_to_all": EXCHANGED}
FAST_SCATTER = {"reduce_scatter": ((1 << 10, 20.0), (1 << 20, 900.0)), "all_to_all": EXCHANGED}


@pytest.mark.parametrize("flat", [False, True])
def test_ranks_get_what_a_reduce_scatter_brings(flat: bool) -> None:
    torch.manual_seed(0)
    inputs = [[torch.randn(2, 4), torch.randn(2, 8), torch.randn(2, 4)] for _ in range(4)]
    before = fuse(parse(JOINT)) if flat else parse(JOINT)
    after = exchange(fuse(parse(JOINT)) if flat else parse(JOINT), {"gpu", "node"})
    verify({"w": LAYOUT}, joint=after)
    assert not after.find_nodes(op="call_function", target=ops.reduce_scatter)
    for ours, theirs in zip(*(run_ranks(graph, inputs, node=2, gpu=2) for graph in (after, before)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_axes_that_are_named_are_exchanged() -> None:
    graph = exchange(parse(JOINT), {"node"})
    kinds = {ops.hop(start).axis: ops.hop(start).kind for start in ops.hops(graph, "reduce")}
    assert kinds == {"gpu": "reduce_scatter", "node": "all_to_all"}
    flat = exchange(fuse(parse(JOINT)), {"node"})
    assert [ops.hop(start).kind for start in ops.hops(flat, "reduce")] == ["reduce_scatter"]


def test_gloo_exchanges_and_others_do_where_it_was_measured_to_be_faster() -> None:
    assert exchanged(TWO) == frozenset()
    assert exchanged(TWO, "gloo") == {"gpu", "node"}
    assert exchanged(Topology(node=2, gpu=1), "gloo") == {"node"}
    device = Device("a device", 1, 1, 1)
    links = {"node": Link(1.0, 1.0, SLOW_SCATTER), "gpu": Link(1.0, 1.0, FAST_SCATTER)}
    assert exchanged(TWO.with_links(device, **links)) == {"node"}
    assert exchanged(TWO.with_links(device, **links), "gloo") == {"node"}
