"""Layouts against DTensor's own arithmetic, and the ladder walked with plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from passes.build import Writer
from passes.insert import Param, climb, descend
from passes.layout import Layout
from shardc.testing import run_ranks
from shardc.topology import Topology

MESHES = [(2, 2), (4, 2), (3, 2), (2, 3), (3, 2, 2)]
"""Sizes, outermost axis first."""
ROWS = range(1, 41)

meshes = pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))


def topology_of(sizes: tuple[int, ...]) -> Topology:
    return Topology(**dict(zip("abc", sizes, strict=False)))


def layouts(sizes: tuple[int, ...]) -> Iterator[Layout]:
    """One layout for each number of rows and each optim rung."""
    topology = topology_of(sizes)
    for rows, optim in product(ROWS, range(len(sizes) + 1)):
        yield Layout("w", (rows, 3), topology.inner, optim, optim, optim, optim)


def coordinates(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    topology = topology_of(sizes)
    return [topology.coordinate(rank) for rank in range(topology.world)]


@meshes
def test_pieces_are_those_of_dtensor_on_the_inner_first_mesh(sizes):
    for layout in layouts(sizes):
        placements = [Shard(0)] * layout.optim + [Replicate()] * (len(sizes) - layout.optim)
        for coordinate in coordinates(sizes):
            shape, start = _compute_local_shape_and_global_offset(
                layout.shape, sizes[::-1], list(coordinate), placements
            )
            rows = layout.local_rows(coordinate)
            assert rows == shape[0], (layout, coordinate)
            # An empty piece starts nowhere: DTensor says the end of the tensor, a layout the end of its neighbour.
            assert layout.local_start(coordinate) == start[0] or not rows, (layout, coordinate)


@meshes
def test_empty_pieces_start_inside_the_tensor_or_at_its_end(sizes):
    for layout in layouts(sizes):
        assert all(layout.local_start(c) + layout.local_rows(c) <= layout.shape[0] for c in coordinates(sizes))


@meshes
def test_row_table_places_every_real_row_in_its_piece(sizes):
    for layout in layouts(sizes):
        expected = {}
        for coordinate in coordinates(sizes):
            slot = piece_index(layout, coordinate) * layout.piece_rows
            start = layout.local_start(coordinate)
            expected.update({start + i: slot + i for i in range(layout.local_rows(coordinate))})
        assert [expected[row] for row in range(layout.shape[0])] == table(layout), layout


@meshes
def test_row_table_is_none_exactly_where_it_is_the_identity(sizes):
    for layout in layouts(sizes):
        assert (layout.row_table is None) == (layout.rung_shape(layout.optim)[0] * pieces(layout) == layout.shape[0])


@meshes
def test_gather_of_padded_pieces_and_copy_out_restores_the_tensor(sizes):
    for layout in layouts(sizes):
        full = torch.arange(1.0, 1 + prod(layout.shape)).view(layout.shape)
        values = {c: cut(layout, full, c) for c in coordinates(sizes)}
        for rung in reversed(range(layout.optim)):
            values = {c: all_gather(values, c, rung, layout.axes[rung][1]) for c in values}
            assert rung == 0 or all(value.shape == layout.rung_shape(rung) for value in values.values())
        for value in values.values():
            assert torch.equal(value[table(layout)], full), layout


@meshes
def test_expanding_and_splitting_inner_axis_first_gives_the_pieces(sizes):
    for layout in layouts(sizes):
        full = torch.arange(1.0, 1 + prod(layout.shape)).view(layout.shape)
        expanded = torch.zeros(layout.padded_rows, *layout.shape[1:])
        expanded[table(layout)] = full
        for coordinate in coordinates(sizes):
            value = expanded
            for index, (_, size) in zip(coordinate, layout.axes[: layout.optim], strict=False):
                value = value.chunk(size)[index]
            assert torch.equal(value, cut(layout, full, coordinate)), (layout, coordinate)


@meshes
def test_scalars_stay_whole(sizes):
    layout = Layout("scale", (), topology_of(sizes).inner, 0, 0, 0, 0)
    assert (layout.rung_shape(0), layout.row_table, layout.piece_rows, layout.padded_rows) == ((), None, 1, 1)


def test_five_rows_on_two_by_two_lie_as_the_module_says():
    layout = Layout("w", (5,), topology_of((2, 2)).inner, 2, 2, 2, 2)
    assert (layout.piece_rows, layout.row_table) == (2, (0, 1, 2, 4, 6))
    assert [layout.rung_shape(rung) for rung in range(3)] == [(5,), (4,), (2,)]


def test_rungs_below_optim_keep_its_padding():
    """3 rows on optim rung 2 of 2x2 travel as 4, also where params rests on rung 1."""
    layout = Layout("w", (3,), topology_of((2, 2)).inner, 1, 0, 1, 2)
    assert (layout.rung_shape(1), layout.rung_shape(2)) == ((2,), (1,))


def pieces(layout: Layout) -> int:
    return layout.size(layout.optim)


def table(layout: Layout) -> list[int]:
    return list(range(layout.shape[0])) if layout.row_table is None else list(layout.row_table)


def piece_index(layout: Layout, coordinate: tuple[int, ...]) -> int:
    """Place of a piece in the padded full value: innermost axis most significant."""
    place = 0
    for index, (_, size) in zip(coordinate, layout.axes[: layout.optim], strict=False):
        place = place * size + index
    return place


def cut(layout: Layout, full: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The padded piece at a coordinate."""
    start, rows = layout.local_start(coordinate), layout.local_rows(coordinate)
    piece = torch.zeros(layout.rung_shape(layout.optim))
    piece[:rows] = full[start : start + rows]
    return piece


def all_gather(values: dict[tuple[int, ...], torch.Tensor], at: tuple[int, ...], axis: int, size: int) -> torch.Tensor:
    """What the rank at `at` holds after an all-gather over one axis (counted from the innermost)."""
    return torch.cat([values[(*at[:axis], index, *at[axis + 1 :])] for index in range(size)])


# The inserted graph moves the rows as DTensor cuts them


def hops_of(layout: Layout, start: int, end: int) -> fx.Graph:
    """x on one rung -> x on another, by gathers upwards and by reduce-scatters downwards."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = FakeTensorMode()
    with mode:
        x.meta["val"] = torch.empty(layout.rung_shape(start))
    write = Writer(graph, mode)
    param = Param(layout, torch.float32, torch.float32, torch.float32, 1.0)
    if start > end:
        graph.output(climb(write, x, param, start, end, "gather"))
    else:
        graph.output(descend(write, x, param, start, end, "reduce"))
    return graph


def shards_by_dtensor(layout: Layout, sizes: tuple[int, ...], full: torch.Tensor) -> list[torch.Tensor]:
    """The real rows of each rank."""
    placements = [Shard(0)] * layout.optim + [Replicate()] * (len(sizes) - layout.optim)
    pieces = []
    for coordinate in coordinates(sizes):
        shape, start = _compute_local_shape_and_global_offset(layout.shape, sizes[::-1], list(coordinate), placements)
        pieces.append(full[start[0] :][: shape[0]])
    return pieces


def run_on(sizes: tuple[int, ...], graph: fx.Graph, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return run_ranks(graph, [[value] for value in values], **dict(zip("abc", sizes, strict=False)))


def padded(piece: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([piece, piece.new_full((rows - len(piece), *piece.shape[1:]), torch.nan)])


@meshes
def test_inserted_hops_gather_and_scatter_what_dtensor_cuts(sizes):
    """From the optim rung to every rung and to the full value, and back; padding is poisoned on the way up."""
    for layout in layouts(sizes):
        full = torch.arange(1.0, 1 + prod(layout.shape)).view(layout.shape)
        shards = shards_by_dtensor(layout, sizes, full)
        for rung in range(layout.optim):
            check_way_up(layout, sizes, shards, full, rung)
            check_way_down(layout, sizes, shards, full, rung)


def check_way_up(
    layout: Layout, sizes: tuple[int, ...], shards: list[torch.Tensor], full: torch.Tensor, rung: int
) -> None:
    at_rest = [padded(shard, layout.piece_rows) for shard in shards]
    resting = run_on(sizes, hops_of(layout, layout.optim, rung), at_rest)
    assert all(tuple(value.shape) == layout.rung_shape(rung) for value in resting)
    whole = run_on(sizes, hops_of(layout, rung, 0), resting) if rung else resting
    assert all(torch.equal(value, full) for value in whole), (layout, rung)


def check_way_down(
    layout: Layout, sizes: tuple[int, ...], shards: list[torch.Tensor], full: torch.Tensor, rung: int
) -> None:
    local = [full] * len(shards)
    reduced = run_on(sizes, hops_of(layout, 0, rung), local) if rung else local
    synced = run_on(sizes, hops_of(layout, rung, layout.optim), reduced)
    for value, shard in zip(synced, shards, strict=True):
        # Each rank of an axis brought the same rows: their sum is the axis's size times them.
        assert torch.equal(value[: len(shard)], shard * layout.size(layout.optim)), (layout, rung)
        assert not value[len(shard) :].any(), (layout, rung)
