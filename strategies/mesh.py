"""Where each rank sits: one frozen object with the axes, the coordinates and the groups.

Axes from outermost to innermost are `pp, dp, cp, tp`, so that tensor-parallel ranks are neighbours.
Expert parallelism folds over `dp x cp x tp` (Liu et al. 2025, "MoE Parallel Folding"): the same ranks seen
as `pp, edp, ep, etp`. The mesh decides nothing about what is computed and holds no module global; it
can be built without process groups (`groups=False`) to reason about any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from parallax.strategies.comm import AxisComm, Ledger
from parallax.strategies.layout import Layout

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes, outermost first. The last one varies fastest with the global rank."""

VIEWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("pp",),
        "dp": ("dp",),
        "cp": ("cp",),
        "tp": ("tp",),
        "data": ("dp", "cp"),  # ranks with the same weights: gradients are averaged over them
        "model": ("pp", "tp"),  # ranks that together hold one copy of the model
        "world": AXES,
    }
)
"""Named groups: the axes that vary inside each of them."""


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Coordinate of `rank` on each axis of `AXES`, the last axis varying fastest."""
    out: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, out[axis] = divmod(rank, sizes[axis])
    return {axis: out[axis] for axis in AXES}


def _rank(coords: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    rank = 0
    for axis in AXES:
        rank = rank * sizes[axis] + coords[axis]
    return rank


def members(view: Sequence[str], rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Global ranks that share all coordinates with `rank` except those on the axes of `view`, ascending."""
    here = coordinates(rank, sizes)
    world = 1
    for axis in AXES:
        world *= sizes[axis]
    fixed = [axis for axis in AXES if axis not in view]
    return tuple(r for r in range(world) if all(coordinates(r, sizes)[a] == here[a] for a in fixed))


@dataclass(frozen=True)
class Mesh:
    """Coordinates and groups of one rank.

    Attributes:
        layout: the resolved layout (data_parallel_size known).
        rank: global rank of this process.
        comms: one `AxisComm` per name in `VIEWS`, plus "tp_run2" and the like, "cp_inner", "cp_outer", "ep", "edp",
            "etp" and "tp_shares" (either may be "tp" itself), "pp_back" and "tie",
            plus "control": a gloo group over the world for small messages on the CPU (errors, object broadcasts).
        ledger: the counter behind all of them.
    """

    layout: Layout
    rank: int
    comms: Mapping[str, AxisComm]
    ledger: Ledger = field(default_factory=Ledger)
    _alone: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        layout: Layout,
        rank: int,
        *,
        groups: bool = True,
        timeout: timedelta | None = None,
        control_backend: str = "gloo",
    ) -> Mesh:
        """Build the mesh of `layout` as seen by `rank`.

        With `groups` (the default) every rank of the initialised world calls this together, and process
        groups are made in the same order everywhere. Without, only coordinates and members are known.
        `control_backend` is the backend of "control"; one that can carry CPU tensors.

        Raises:
            ValueError: the layout is not resolved, or `rank` is outside it.
        """
        sizes = layout.axis_sizes()
        world = layout.world_size
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside a layout of {world} ranks ({layout})")
        ledger = Ledger()

        def comm(name: str, all_members: list[tuple[int, ...]], backend: str | None = None) -> AxisComm:
            mine = next(m for m in all_members if rank in m)
            group = None
            if groups:
                for ranks in all_members:  # every rank takes part in making every group, in one order
                    if len(ranks) > 1:
                        made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
                        group = made if rank in ranks else group
            return AxisComm(name, mine, rank, group, ledger)

        comms = {name: comm(name, partition(view, sizes)) for name, view in VIEWS.items()}
        tp = partition(("tp",), sizes)
        for name, parts in _further_partitions(layout).items():
            comms[name] = comms["tp"] if name in ("etp", "tp_shares") and parts == tp else comm(name, parts)
        comms["control"] = comm("control", [tuple(range(world))], backend=control_backend)
        return cls(layout, rank, MappingProxyType(comms), ledger)

    def __getitem__(self, name: str) -> AxisComm:
        try:
            return self.comms[name]
        except KeyError:
            raise ValueError(f"no axis {name!r}; the mesh has {', '.join(self.comms)}") from None

    def size(self, name: str) -> int:
        return self[name].size

    def index(self, name: str) -> int:
        """Coordinate of this rank on an axis (or its position in a combined group)."""
        return self[name].index

    def real_group(self, name: str) -> dist.ProcessGroup:
        """The process group of an axis; where it has one rank, a group of this rank alone, made at first use.

        For libraries that take None for the whole world.
        """
        if (group := self[name].group) is not None:
            return group
        if not self._alone:
            self._alone.append(dist.new_group([self.rank], use_local_synchronization=True))
        return self._alone[0]

    def close(self) -> None:
        """Destroy the mesh's process groups (not the world's own). Collective."""
        while self._alone:
            dist.destroy_process_group(self._alone.pop())
        for comm in self.comms.values():
            if comm.group is not None:
                dist.destroy_process_group(comm.group)
                comm.group = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_first_stage(self) -> bool:
        return self["pp"].is_first

    @property
    def is_last_stage(self) -> bool:
        return self["pp"].is_last

    def mpu(self) -> Mpu:
        """The model-parallel unit DeepSpeed asks for."""
        return Mpu(self)


def partition(view: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """All groups of a view, each ascending, ordered by their first rank: every rank is in exactly one."""
    world = 1
    for axis in AXES:
        world *= sizes[axis]
    groups: dict[tuple[int, ...], list[int]] = {}
    fixed = [axis for axis in AXES if axis not in view]
    for rank in range(world):
        at = coordinates(rank, sizes)
        groups.setdefault(tuple(at[a] for a in fixed), []).append(rank)
    return sorted(tuple(g) for g in groups.values())


def _further_partitions(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """Groups that are not slices along axes, in the order they are made."""
    return {
        **tensor_partitions(layout),
        **context_partitions(layout),
        **expert_partitions(layout),
        **pipeline_partitions(layout),
    }


def tensor_partitions(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The groups "tp_run2", ...: runs of that many neighbours in "tp", for every proper divisor of its size.

    A run shares a key-value head when a model has fewer of them than "tp" has ranks.
    """
    size = layout.tensor_parallel_size
    lines = partition(("tp",), layout.axis_sizes())
    return {
        f"tp_run{run}": sorted(tp[i : i + run] for tp in lines for i in range(0, size, run))
        for run in range(2, size)
        if size % run == 0
    }


def context_partitions(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The groups "cp_inner", runs of neighbours in "cp", and "cp_outer", the ranks at the same place of their runs."""
    inner = layout.context_inner_size
    out: dict[str, list[tuple[int, ...]]] = {"cp_inner": [], "cp_outer": []}
    for cp in partition(("cp",), layout.axis_sizes()):
        out["cp_inner"] += [cp[i : i + inner] for i in range(0, len(cp), inner)]
        out["cp_outer"] += [cp[i::inner] for i in range(inner)]
    return {name: sorted(parts) for name, parts in out.items()}


def expert_partitions(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """The groups "etp", "tp_shares", "ep" and "edp": the ranks of one stage seen as edp x ep x etp.

    "etp" are runs of neighbours in "tp", which share every matrix of an expert; "tp_shares" joins the ranks at the same
    place of the runs of one "tp", which share its tokens among them.
    """
    ep, etp = layout.expert_parallel_size, layout.experts_cut_over
    out: dict[str, list[tuple[int, ...]]] = {"etp": [], "tp_shares": [], "ep": [], "edp": []}
    for tp in partition(("tp",), layout.axis_sizes()):
        out["etp"] += [tp[i : i + etp] for i in range(0, len(tp), etp)]
        out["tp_shares"] += [tp[i::etp] for i in range(etp)]
    for stage in partition(("dp", "cp", "tp"), layout.axis_sizes()):
        for lane in (stage[i::etp] for i in range(etp)):
            out["ep"] += [lane[i : i + ep] for i in range(0, len(lane), ep)]
            out["edp"] += [lane[i::ep] for i in range(ep)]
    return {name: sorted(parts) for name, parts in out.items()}


def pipeline_partitions(layout: Layout) -> dict[str, list[tuple[int, ...]]]:
    """Groups the pipeline needs beside "pp".

    "pp_back" holds the ranks of "pp" again: gradients travel on a group of their own, so that a send of an
    activation never queues behind a gradient that its receiver has not asked for yet. "tie" joins first and last
    stage (tied embedding and head); ranks in between are alone.
    """
    stages = partition(("pp",), layout.axis_sizes())
    ends: list[tuple[int, ...]] = [tuple(dict.fromkeys((g[0], g[-1]))) for g in stages]
    middle: list[tuple[int, ...]] = [(rank,) for g in stages for rank in g[1:-1]]
    return {"pp_back": stages, "tie": sorted(ends + middle)}


def _method(name: str, what: str) -> Callable[[Mpu], object]:
    def call(self: Mpu) -> object:
        comm = self._mesh[name]
        return {"group": comm.group, "rank": comm.index, "world_size": comm.size}[what]

    return call


class Mpu:
    """DeepSpeed's model-parallel unit: `get_{data,model,tensor_model,pipeline_model}_parallel_{group,rank,world_size}`.

    DeepSpeed shards and averages over "data" (dp x cp) and sums norms over "model" (pp x tp).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._mesh["data"].ranks)


for _prefix, _axis in (
    ("data_parallel", "data"),
    ("model_parallel", "model"),
    ("tensor_model_parallel", "tp"),
    ("pipeline_model_parallel", "pp"),
    ("pipe_parallel", "pp"),
    ("slice_parallel", "tp"),
):
    for _what in ("group", "rank", "world_size"):
        setattr(Mpu, f"get_{_prefix}_{_what}", _method(_axis, _what))
