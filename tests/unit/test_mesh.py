"""Coordinates and groups of ranks, against slices of `np.arange(world).reshape(pp, dp, cp, tp)`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import (
    AXES,
    VIEWS,
    Mesh,
    context_partitions,
    coordinates,
    expert_partitions,
    members,
    partition,
)
from parallax.strategies.report import ranges, rank_table

LAYOUTS = [
    ("dp1", 1),
    ("tp2 pp2 dp2", 8),
    ("tp3 cp2 ep2", 12),
    ("tp2 pp4 cp2 ep4", 64),
    ("tp8 pp2 ep2 dp4", 64),
    ("tp4 pp2 cp2 ep16 etp1", 64),
    ("tp4 pp2 ep4 etp2 dp4", 32),
]


def _grid(layout: Layout) -> np.ndarray:
    return np.arange(layout.world_size).reshape([layout.axis_sizes()[axis] for axis in AXES])


def _slices(grid: np.ndarray, view: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of a view by slicing: its axes last, everything else flattened in front."""
    inside = [AXES.index(axis) for axis in view]
    outside = [i for i in range(grid.ndim) if i not in inside]
    rows = grid.transpose(outside + inside).reshape(-1, int(np.prod([grid.shape[i] for i in inside])))
    return sorted(tuple(row) for row in rows.tolist())


def _folded(layout: Layout) -> np.ndarray:
    """The second view of the same ranks: pp, edp, ep, etp."""
    sizes, ep = layout.axis_sizes(), layout.expert_parallel_size
    return np.arange(layout.world_size).reshape(sizes["pp"], -1, ep, layout.experts_cut_over)


@pytest.mark.parametrize(("text", "world"), LAYOUTS)
def test_coordinates_are_numpys(text: str, world: int) -> None:
    layout = Layout.parse(text).resolve(world)
    grid = _grid(layout)
    for rank in range(world):
        where = coordinates(rank, layout.axis_sizes())
        assert grid[tuple(where[axis] for axis in AXES)] == rank


@pytest.mark.parametrize(("text", "world"), LAYOUTS)
def test_groups_are_slices(text: str, world: int) -> None:
    layout = Layout.parse(text).resolve(world)
    grid, sizes = _grid(layout), layout.axis_sizes()
    for view in VIEWS.values():
        groups = partition(view, sizes)
        assert groups == _slices(grid, view)
        for rank in range(world):
            assert members(view, rank, sizes) == next(g for g in groups if rank in g)


@pytest.mark.parametrize(("text", "world"), LAYOUTS)
def test_experts_fold_over_dp_cp_and_tp(text: str, world: int) -> None:
    layout = Layout.parse(text).resolve(world)
    grid = _folded(layout)
    parts = expert_partitions(layout)
    assert parts["ep"] == sorted(tuple(g) for g in np.moveaxis(grid, 2, -1).reshape(-1, grid.shape[2]).tolist())
    assert parts["edp"] == sorted(tuple(g) for g in np.moveaxis(grid, 1, -1).reshape(-1, grid.shape[1]).tolist())
    assert parts["etp"] == sorted(tuple(g) for g in grid.reshape(-1, grid.shape[3]).tolist())
    shares = _grid(layout).reshape(-1, layout.tensor_parallel_size // grid.shape[3], grid.shape[3]).swapaxes(1, 2)
    assert parts["tp_shares"] == sorted(tuple(g) for g in shares.reshape(-1, shares.shape[2]).tolist())


@pytest.fixture
def fake_world_of_64() -> Iterator[int]:
    """A world of 64 in one process: groups are made, nothing is sent. Yields this process's rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=37, world_size=64)
    try:
        yield 37
    finally:
        dist.destroy_process_group()


def test_mesh_of_64_ranks_with_groups(fake_world_of_64: int) -> None:
    rank = fake_world_of_64
    layout = Layout.parse("tp2 pp4 cp2 ep4").resolve(64)  # pp4 dp4 cp2 tp2
    mesh = Mesh.build(layout, rank, control_backend="fake")

    pp, dp, cp, tp = (int(i[0]) for i in np.where(_grid(layout) == rank))
    assert (pp, dp, cp, tp) == (2, 1, 0, 1)  # 37 = 2*16 + 1*4 + 0*2 + 1
    assert [mesh.index(axis) for axis in AXES] == [pp, dp, cp, tp]
    grid = _grid(layout)
    expected = {
        "pp": grid[:, dp, cp, tp],
        "dp": grid[pp, :, cp, tp],
        "cp": grid[pp, dp, :, tp],
        "tp": grid[pp, dp, cp, :],
        "data": grid[pp, :, :, tp].ravel(),
        "model": grid[:, dp, cp, :].ravel(),
        "world": grid.ravel(),
        "ep": _folded(layout)[pp, 0, :, tp],
        "edp": _folded(layout)[pp, :, 2, tp],
        "control": grid.ravel(),
    }
    for name, ranks in expected.items():
        assert mesh[name].ranks == tuple(ranks.tolist()), name
        assert dist.get_process_group_ranks(mesh[name].group) == ranks.tolist(), name
    assert not mesh.is_first_stage and not mesh.is_last_stage

    mpu = mesh.mpu()
    assert mpu.get_data_parallel_group_ranks() == expected["data"].tolist()
    assert mpu.get_data_parallel_world_size() == 8  # type: ignore[attr-defined]
    assert mpu.get_model_parallel_world_size() == 8  # type: ignore[attr-defined]
    assert mpu.get_tensor_model_parallel_rank() == tp  # type: ignore[attr-defined]
    assert mpu.get_pipeline_model_parallel_rank() == pp  # type: ignore[attr-defined]


def test_mesh_without_groups_says_what_is_wrong() -> None:
    layout = Layout.parse("tp2 pp2").resolve(4)
    mesh = Mesh.build(layout, 3, groups=False)
    assert mesh["tp"].group is None and mesh["tp"].ranks == (2, 3) and mesh.is_last_stage
    with pytest.raises(ValueError, match="no axis 'tensor'.*tp"):
        mesh["tensor"]
    with pytest.raises(ValueError, match="rank 4 is outside a layout of 4 ranks"):
        Mesh.build(layout, 4, groups=False)


def _cells(table: Table) -> list[list[str]]:
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]  # type: ignore[arg-type]


def test_table_has_a_row_for_each_of_a_few_ranks() -> None:
    table = rank_table(Layout.parse("tp2 pp2").resolve(8), holds={0: "layers 0-1"})
    assert [column.header for column in table.columns] == ["rank", "pp", "dp", "cp", "tp", "holds"]
    assert _cells(table)[0] == ["0", "0", "0", "0", "0", "layers 0-1"]
    assert [row[:5] for row in _cells(table)] == [
        [str(int(i)) for i in (rank, *where)] for where, rank in np.ndenumerate(np.arange(8).reshape(2, 2, 1, 2))
        for where in [where]
    ]  # fmt: skip


def test_table_of_many_ranks_is_compressed() -> None:
    holds = {rank: f"stage {rank // 128}" for rank in range(512)}
    rows = _cells(rank_table(Layout.parse("tp8 pp4 ep4").resolve(512), holds))
    assert rows == [[f"{128 * s}-{128 * s + 127}", str(s), "0-15", "0", "0-7", "0-3", f"stage {s}"] for s in range(4)]
    rows = _cells(rank_table(Layout.parse("tp4 pp2").resolve(32)))
    assert rows[:2] == [["0-3", "0", "0", "0", "0-3"], ["4-7", "0", "1", "0", "0-3"]] and len(rows) == 8


def test_table_prints_its_whole_title() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(rank_table(Layout.parse("tp2 pp2 zero1").resolve(8)))
    assert "tp2 pp2 dp2 zero1 1f1b mb2 on 8 ranks" in capture.get()


def test_ranges() -> None:
    assert ranges([6, 3, 2, 1, 0, 2]) == "0-3, 6"
    assert ranges([4]) == "4"


def test_context_groups_are_runs_and_what_is_across_them() -> None:
    layout = Layout.parse("tp2 cp4 inner2").resolve(16)
    grid = np.arange(16).reshape(2, 2, 2, 2)  # dp, outer, inner, tp
    parts = context_partitions(layout)
    assert parts["cp_inner"] == sorted(tuple(g) for g in np.moveaxis(grid, 2, -1).reshape(-1, 2).tolist())
    assert parts["cp_outer"] == sorted(tuple(g) for g in np.moveaxis(grid, 1, -1).reshape(-1, 2).tolist())
    assert str(layout) == "tp2 cp4 dp2 inner2"
    assert Layout.parse(str(layout)) == Layout.parse("tp2 cp4 dp2 inner2")
    with pytest.raises(ValueError, match="context_inner_size 3 does not divide .* 4; use one of 1, 2, 4"):
        Layout(context_parallel_size=4, context_inner_size=3)
