"""Predicted time of the communication of a layout, for one order of the ranks or for many at once.

It is: a model of bandwidth alone. All groups of an axis communicate at the same time, and the axis takes as long as its
busiest link: a pair of devices inside an island, or the network ports of an island, which all its flows share. Axes
add up. It is not: a simulation; latency, overlap with computation, and PCIe lanes shared by several pairs are left out.

What each pattern loads (volumes from `traffic.py`):

- "reduce": a ring (Patarasuk & Yuan 2009), as slow as the slowest pair on one node: exact where all pairs are alike and
  for the direct algorithms that short messages use, pessimistic where a long ring could go round a slow pair. Through
  several islands, one flow out of each island that the group touches.
- "exchange": n-1 rounds of pairs, each as slow as the slowest pair (Thakur et al. 2005).
- "rotate", "chain": messages between neighbours in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parallax.plugins.topology.sites import Kind, Sites
from parallax.plugins.topology.traffic import AxisTraffic

GIGA = 1e9
INF = float("inf")


class Shape(NamedTuple):
    """Sizes of the mesh axes and of the expert fold: a layout without its choices."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int = 1
    etp: int | None = None

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def tensor(self) -> int:
        """Ranks of tp that share every matrix of an expert."""
        return self.etp or self.tp


class Prediction(NamedTuple):
    """Of B orders of the ranks.

    Attributes:
        seconds: of each axis, in the order of the traffic. float64 [B, axes].
        work: sum over groups and links of their time: tells apart orders whose slowest links are equal. float64 [B].
    """

    seconds: Tensor
    work: Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of one axis, as mesh ranks: int64 [groups, size]; what `strategies/mesh.py` builds, all at once."""

    traffic: AxisTraffic
    members: Tensor


def groups_of(shape: Shape, traffic: Sequence[AxisTraffic]) -> tuple[Groups, ...]:
    """Groups of every axis in `traffic`, in the mesh's order of ranks (pp outermost, tp innermost)."""
    ranks = torch.arange(shape.size).reshape(shape.pp, shape.dp, shape.cp, shape.tp)
    data = ranks.permute(0, 3, 1, 2).reshape(-1, shape.dp * shape.cp)
    members = {
        "tp": ranks.reshape(-1, shape.tp),
        "cp": ranks.permute(0, 1, 3, 2).reshape(-1, shape.cp),
        "pp": ranks.permute(1, 2, 3, 0).reshape(-1, shape.pp),
        "dp": data,
        "ep": ranks.reshape(shape.pp, -1, shape.tensor).permute(0, 2, 1).reshape(-1, shape.ep),
    }
    return tuple(Groups(each, members[each.axis].contiguous()) for each in traffic)


def predict(sites: Sites, groups: Sequence[Groups], slot_at: Tensor) -> Prediction:
    """Predicted time per step of each order in `slot_at`.

    Args:
        sites: where the slots are.
        groups: groups of each axis that communicates.
        slot_at: the slot of each mesh rank. int64 [B, ranks].
    """
    seconds = torch.zeros(len(slot_at), len(groups), dtype=torch.float64)
    work = torch.zeros(len(slot_at), dtype=torch.float64)
    for column, each in enumerate(groups):
        model = _MODELS[each.traffic.pattern]
        seconds[:, column], extra = model(sites, slot_at[:, each.members], each.traffic.edge_bytes / GIGA)
        work += extra
    return Prediction(seconds, work)


def _reduce(sites: Sites, members: Tensor, load: float) -> tuple[Tensor, Tensor]:
    """Rings through `members` [B, groups, n]; `load` in GB over each edge."""
    parts = _Parts(sites, members)
    local = load / parts.rate()
    meshed = load * parts.mean_cost()  # of equally slow groups, the one with more links inside
    leaving = parts.spans_islands[parts.island_row].double() * load
    flows = leaving / (sites.flow * parts.flows())
    network = torch.maximum(parts.leaving(leaving), parts.slowest_island(flows))
    return torch.maximum(parts.slowest(local), network), parts.total(meshed) + parts.total_islands(flows)


def _exchange(sites: Sites, members: Tensor, load: float) -> tuple[Tensor, Tensor]:
    """Every member of a group sends `load` GB to every other."""
    parts = _Parts(sites, members)
    inside = parts.island_count[parts.island_of_part].double()
    local = (inside - 1) * load / parts.rate()
    outside = (members.shape[-1] - parts.island_count).double()
    sent = parts.island_count * outside * load
    each = outside * load / sites.flow
    network = torch.maximum(parts.leaving(sent), parts.slowest_island(each))
    return torch.maximum(parts.slowest(local), network), parts.total(local) + parts.total_islands(each)


def _rotate(sites: Sites, members: Tensor, load: float) -> tuple[Tensor, Tensor]:
    return _edges(sites, members, members.roll(-1, -1), load)


def _chain(sites: Sites, members: Tensor, load: float) -> tuple[Tensor, Tensor]:
    left, right = members[..., :-1], members[..., 1:]
    return _edges(sites, torch.cat((left, right), -1), torch.cat((right, left), -1), load)


_MODELS: Mapping[str, Callable[[Sites, Tensor, float], tuple[Tensor, Tensor]]] = {
    "reduce": _reduce,
    "exchange": _exchange,
    "rotate": _rotate,
    "chain": _chain,
}


def _edges(sites: Sites, source: Tensor, target: Tensor, load: float) -> tuple[Tensor, Tensor]:
    """`load` GB from each slot in `source` [B, ...] to the one in `target`."""
    source, target = source.flatten(1), target.flatten(1)
    inside = sites.island[source] == sites.island[target]
    each = load / torch.where(inside, sites.pair_rates(source, target), sites.flow)
    out = torch.zeros(len(source), len(sites.ports), dtype=torch.float64)
    out.scatter_add_(1, sites.island[source], (~inside).double() * load)
    return torch.maximum(each.amax(1), (out / sites.ports).amax(1)), each.sum(1)


class _Parts:
    """Groups cut by node and by island: a *part* is the members of one group on one node.

    Args:
        members: slots, int64 [B, groups, n].
    """

    def __init__(self, sites: Sites, members: Tensor) -> None:
        self.sites = sites
        self.batches, groups, n = members.shape
        rows = members.reshape(-1, n)
        node, order = sites.node[rows].sort(-1)  # nodes are numbered island by island: islands are runs as well
        slots = rows.gather(-1, order)
        self.slots = slots.flatten()  # in the order of the runs
        batch_of = torch.arange(len(rows)) // groups
        self.part = _runs(node)
        first = _firsts(self.part)
        self.count = torch.bincount(self.part)
        self.kind = sites.kind[self.slots[first]]
        self.batch = batch_of[first // n]
        island = sites.island[slots]
        island_run = _runs(island)
        self.island_first = island_first = _firsts(island_run)
        self.island_row = island_first // n
        self.island_batch = batch_of[self.island_row]
        self.island = sites.island[self.slots[island_first]]
        self.island_count = torch.bincount(island_run)
        self.island_of_part = island_run[first]
        self.spans_islands = island[:, 0] != island[:, -1]
        self.spans_nodes = torch.bincount(self.island_of_part, minlength=len(island_first)) > 1

    def rate(self) -> Tensor:
        """GB/s of the slowest pair of each part, and no more than the fabric where its island has other members."""
        found = torch.where(self.count > 1, self._of_members(Kind.slowest_pair), INF)
        fabric = self.sites.fabric[self.island[self.island_of_part]]
        return torch.where(self.spans_nodes[self.island_of_part], torch.minimum(found, fabric), found)

    def mean_cost(self) -> Tensor:
        """Seconds per GB of the mean pair of each part; 0 for a single member."""
        return torch.where(self.count > 1, self._of_members(Kind.mean_cost), 0.0)

    def _of_members(self, of: Callable[[Kind, Sequence[int]], float]) -> Tensor:
        """`of` the members of each part of more than one; every set of members of a kind is looked at once."""
        kinds, ordinals = self.sites.kinds, self.sites.ordinal[self.slots]
        whole = [of(kind, range(kind.size)) for kind in kinds]
        found = torch.tensor(whole, dtype=torch.float64)[self.kind]
        if all(kind.uniform is not None or kind.size > 60 for kind in kinds):
            return found  # any pair is as good, or there are more members than bits in a number: the whole node counts
        mask = torch.zeros(len(self.count), dtype=torch.int64).scatter_add_(0, self.part, 1 << ordinals)
        for k, kind in enumerate(kinds):
            mine = (self.kind == k) & (self.count > 1)
            if kind.uniform is not None or kind.size > 60 or not mine.any():
                continue
            masks, inverse = _unique(mask[mine], kind.size)
            values = [of(kind, [i for i in range(kind.size) if m >> i & 1]) for m in masks.tolist()]
            found[mine] = torch.tensor(values, dtype=torch.float64)[inverse]
        return found

    def flows(self) -> Tensor:
        """Network flows that a ring of each (group, island) can use at once: one for each member, each with a port of
        its own, but only as long as the slowest pair inside outruns them together; where pairs are PCIe paths, no
        more than one, because the way to the port is such a path too."""
        pairs = [kind.slowest_pair(range(kind.size)) for kind in self.sites.kinds]
        inside = torch.tensor(pairs, dtype=torch.float64)[self.sites.kind[self.slots[self.island_first]]]
        inside = torch.where(self.spans_nodes, torch.minimum(inside, self.sites.fabric[self.island]), inside)
        most = (inside / self.sites.flow).ceil() - 1
        return torch.minimum(self.island_count.double(), most.clamp(min=1))

    def slowest_island(self, seconds: Tensor) -> Tensor:
        """The longest of the `seconds` of (group, island) in each batch."""
        return torch.zeros(self.batches, dtype=torch.float64).scatter_reduce_(0, self.island_batch, seconds, "amax")

    def slowest(self, seconds: Tensor) -> Tensor:
        """The longest of the parts' `seconds` in each batch."""
        return torch.zeros(self.batches, dtype=torch.float64).scatter_reduce_(0, self.batch, seconds, "amax")

    def leaving(self, gigabytes: Tensor) -> Tensor:
        """Seconds that the busiest island needs for what leaves it, `gigabytes` of each (group, island)."""
        islands = len(self.sites.ports)
        out = torch.zeros(self.batches * islands, dtype=torch.float64)
        out.scatter_add_(0, self.island_batch * islands + self.island, gigabytes)
        return (out.view(self.batches, islands) / self.sites.ports).amax(1)

    def total(self, seconds: Tensor) -> Tensor:
        """Sum over the parts of each batch."""
        return torch.zeros(self.batches, dtype=torch.float64).scatter_add_(0, self.batch, seconds)

    def total_islands(self, seconds: Tensor) -> Tensor:
        """Sum over the (group, island) pairs of each batch."""
        return torch.zeros(self.batches, dtype=torch.float64).scatter_add_(0, self.island_batch, seconds)


def _runs(rows: Tensor) -> Tensor:
    """Number of the run of equal neighbours that each entry is in, counted through all rows; flat."""
    new = torch.ones_like(rows, dtype=torch.bool)
    new[:, 1:] = rows[:, 1:] != rows[:, :-1]
    return new.flatten().cumsum(0) - 1


def _firsts(runs: Tensor) -> Tensor:
    """Position of the first entry of each run."""
    new = torch.ones_like(runs, dtype=torch.bool)
    new[1:] = runs[1:] != runs[:-1]
    return new.nonzero().flatten()


def _unique(masks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Distinct masks, and where each entry finds its own."""
    if bits > 16:
        return torch.unique(masks, return_inverse=True)
    present = torch.zeros(1 << bits, dtype=torch.bool)
    present[masks] = True
    number = present.cumsum(0) - 1
    return present.nonzero().flatten(), number[masks]
