"""Who sits where, for people: the coordinates of every rank at its device, before and after the reordering.

It is: the rows that the table, the picture and the JSON of `parallax topo` share. It is not: the decision
(`placement.py`) or the drawing of any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallax.plugins.topology.description import Cluster, Slot
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import coordinates


@dataclass(frozen=True)
class Seat:
    """One rank at its place.

    Attributes:
        rank: global rank.
        launched: rank that the launcher gave to the process.
        slot: node and device.
        host: host name.
        device: the tool's own number of the device; None for a rank without one.
        at: axis -> coordinate, for the axes of the layout with more than one rank; "ep" included.
        tp_group: number of its tensor-parallel group.
    """

    rank: int
    launched: int
    slot: Slot
    host: str
    device: int | None
    at: dict[str, int]
    tp_group: int

    def __str__(self) -> str:
        return " ".join(f"{axis}{index}" for axis, index in self.at.items())


def seats(cluster: Cluster, slots: Sequence[Slot], layout: Layout, new_rank_of: Sequence[int]) -> list[Seat]:
    """The seat of each of the launcher's ranks, in its order.

    Args:
        cluster, slots: as for `place`.
        layout: resolved.
        new_rank_of: global rank of each of the launcher's ranks.
    """
    sizes, ep = layout.axis_sizes(), layout.expert_parallel_size
    found = []
    for launched, (slot, rank) in enumerate(zip(slots, new_rank_of, strict=True)):
        node = cluster.nodes[slot.node]
        at = coordinates(rank, sizes)
        named = {axis: at[axis] for axis in ("pp", "dp", "cp") if sizes[axis] > 1}
        if ep > 1:  # runs of dp x cp x tp/etp, see strategies/mesh.py
            named["ep"] = rank // layout.experts_cut_over % ep
        if sizes["tp"] > 1:
            named["tp"] = at["tp"]
        device = None if slot.device is None else node.devices[slot.device].index
        found.append(Seat(rank, launched, slot, node.host, device, named, rank // sizes["tp"]))
    return found
