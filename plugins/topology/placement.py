"""Which rank goes where: a permutation of the launcher's ranks with less predicted communication time.

It is: a pure function of the description of the cluster, the launcher's slots and the layout; the same on every rank
and in every run. It is not: a launcher: `ParallaxMPIEnvironment(new_rank_of)` puts the permutation into effect.

Up to 8 ranks every order is tried. Above, blocks of axes are packed into nodes (`search.pack`), most tensor-parallel
first, and the devices of each kind of node are arranged exactly (up to 8) or by swaps; nodes that look alike are
searched once. An order is taken only if its predicted time is lower than the launcher's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

import torch
from torch import Tensor

from parallax.plugins.topology import search
from parallax.plugins.topology.cost import Groups, Prediction, Shape, groups_of, predict
from parallax.plugins.topology.description import Cluster, Node, Slot
from parallax.plugins.topology.grouping import EXACT_LIMIT, best_groups
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.sites import Sites
from parallax.plugins.topology.traffic import AxisTraffic, traffic_of
from parallax.strategies.layout import Layout

SWAP_LIMIT = 64
"""Ranks up to which single swaps are tried on the whole order."""
MOST_TILES = 32
"""Candidates judged for each size of island."""


@dataclass(frozen=True)
class Placement:
    """An order of the ranks and what it is expected to bring.

    Attributes:
        new_rank_of: new global rank of each of the launcher's ranks.
        before: axis -> predicted seconds per step in the launcher's order.
        after: axis -> predicted seconds per step in the new order; never more in sum.
        judged: number of orders of all ranks that were predicted; it does not grow with the number of ranks.
        notes: what a reader should know, one sentence each.
    """

    new_rank_of: tuple[int, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    judged: int = 1
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return any(new != old for old, new in enumerate(self.new_rank_of))

    @property
    def speedup(self) -> float:
        """Predicted time of communication before over after; 1 where nothing communicates."""
        after = sum(self.after.values())
        return sum(self.before.values()) / after if after else 1.0

    def slot_of(self) -> tuple[int, ...]:
        """The launcher's rank that becomes each new rank: the inverse permutation."""
        inverse = [0] * len(self.new_rank_of)
        for old, new in enumerate(self.new_rank_of):
            inverse[new] = old
        return tuple(inverse)


def place(
    cluster: Cluster,
    slots: Sequence[Slot],
    layout: Layout,
    traffic: Sequence[AxisTraffic] | None = None,
    rates: Rates | None = None,
) -> Placement:
    """Order the ranks so that communication is predicted to take the least time.

    Args:
        cluster: the nodes.
        slots: node and device of each of the launcher's ranks, in its order.
        layout: of as many ranks as there are slots (resolved here).
        traffic: bytes of each axis; default: `traffic_of(layout)`, the assumed ranking tp >> ep, cp >> pp >> dp.
        rates: GB/s of links and network; default: assumed ones.

    Raises:
        ValueError: the layout does not fit the number of slots, or a slot names no device of the cluster.
    """
    layout = layout.resolve(len(slots))
    moved = tuple(traffic_of(layout) if traffic is None else traffic)
    sites = Sites.of(cluster, slots, rates or Rates())
    shape = shape_of(layout)
    planner = _Planner(cluster, slots, sites, shape, moved)
    launched = torch.arange(len(slots))
    best, prediction = planner.choose(launched)
    axes = [each.axis for each in moved]
    before, after = ({a: float(s) for a, s in zip(axes, row, strict=True)} for row in prediction.seconds[[0, -1]])
    notes = [] if traffic is not None else ["volumes are assumed, not the model's: times compare orders, no more"]
    new_rank_of = torch.empty_like(best)
    new_rank_of[best] = launched
    return Placement(tuple(new_rank_of.tolist()), before, after, planner.judged, tuple(notes))


def plan_reorder(cluster: Cluster, slots: Sequence[Slot], layout: Layout) -> tuple[int, ...]:
    """What `ParallaxMPIEnvironment` takes: call it on rank 0 of the launcher and broadcast the result.

    Raises:
        ValueError: as `place`.
    """
    return place(cluster, slots, layout).new_rank_of


def shape_of(layout: Layout) -> Shape:
    """Axis sizes of a resolved layout."""
    return Shape(**layout.axis_sizes(), ep=layout.expert_parallel_size, etp=layout.experts_cut_over)


@dataclass
class _Planner:
    cluster: Cluster
    slots: Sequence[Slot]
    sites: Sites
    shape: Shape
    traffic: Sequence[AxisTraffic]
    judged: int = 0
    _groups: tuple[Groups, ...] = ()
    _arranged: dict[tuple[int, search.Digits], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._groups = groups_of(self.shape, self.traffic)

    def judge(self, orders: Tensor) -> Prediction:
        self.judged += len(orders)
        return predict(self.sites, self._groups, orders)

    def choose(self, launched: Tensor) -> tuple[Tensor, Prediction]:
        """The best order found, and the prediction of [the launcher's order, that order]."""
        best = launched
        if self.traffic:
            best = self._search(launched)
        both = self.judge(torch.stack((launched, best)))
        before, after = both.seconds.sum(1).tolist()
        if after >= before * (1 - search.TOLERANCE):
            return launched, Prediction(both.seconds[[0, 0]], both.work[[0, 0]])
        return best, both

    def _search(self, launched: Tensor) -> Tensor:
        n = len(launched)
        if n <= search.EXACT_LIMIT:
            return search.exhaustive(self.shape, self.judge)
        orders = [launched, *self._candidates()]
        found = [self.judge(order[None]) for order in orders]
        together = Prediction(torch.cat([f.seconds for f in found]), torch.cat([f.work for f in found]))
        best = orders[search.best_of(together)]
        return search.descend(best, self.judge) if n <= SWAP_LIMIT and not self._regular() else best

    def _regular(self) -> bool:
        """Whether all islands are of one size and all pairs inside them alike: then tiles leave nothing to swap."""
        sizes = set(torch.bincount(self.sites.island).tolist())
        return len(sizes) == 1 and len(self.sites.kinds) == 1 and self.sites.kinds[0].uniform is not None

    def _candidates(self) -> list[Tensor]:
        islands = self._islands()
        sizes = Counter(len(island) for island in islands).most_common(3)
        tp_first = self.traffic[0].axis == "tp" and all(
            t.edge_bytes <= self.traffic[0].edge_bytes for t in self.traffic
        )
        ways: dict[search.Digits, None] = {}
        for size, _ in sizes:
            found = search.tiles(self.shape, size)
            most = found[0][0] if tp_first else None  # with less tp inside than fits, the most traffic would go outside
            ways |= dict.fromkeys([digits for digits in found if most in (None, digits[0])][:MOST_TILES])
        return [search.spread(torch.tensor(self._line(islands, digits)), digits, self.shape) for digits in ways]

    def _islands(self) -> list[list[int]]:
        """Slots of each island, node by node."""
        order = (self.sites.node * self.sites.size + self.sites.ordinal).argsort().tolist()
        islands: dict[int, list[int]] = {}
        for slot, island in zip(order, self.sites.island[order].tolist(), strict=True):
            islands.setdefault(island, []).append(slot)
        return list(islands.values())

    def _line(self, islands: list[list[int]], digits: search.Digits) -> list[int]:
        """Slots packed for `digits`, those of one node arranged as its kind likes best."""
        if all(kind.uniform is not None for kind in self.sites.kinds):
            return search.pack(islands, digits)
        nodes = self.sites.node.tolist()
        kinds = self.sites.kind.tolist()
        arranged = []
        for island in islands:
            line: list[int] = []
            for node in dict.fromkeys(nodes[slot] for slot in island):
                mine = [slot for slot in island if nodes[slot] == node]
                line += [mine[i] for i in self._arrange(kinds[mine[0]], mine, digits)]
            arranged.append(line)
        return search.pack(arranged, digits)

    def _arrange(self, kind: int, mine: Sequence[int], digits: search.Digits) -> list[int]:
        """Order of the ordinals of a kind of node; `mine` are the slots of one node of it."""
        inside = digits[: len(search.INNER)]
        key = kind, inside
        if key not in self._arranged:
            self._arranged[key] = self._arrange_kind(kind, mine, inside)
        return self._arranged[key]

    def _arrange_kind(self, kind: int, mine: Sequence[int], inside: search.Digits) -> list[int]:
        n = len(mine)
        if self.sites.kinds[kind].uniform is not None:
            return list(range(n))
        size = dict(inside)
        grouped = self._grouped(mine, size["tp"])
        if prod(size.values()) != n:
            return grouped  # blocks do not fill the node: what matters is that tp groups are whole
        shape, traffic = self._inside(size)
        groups, sites = groups_of(shape, traffic), self.sites.subset(torch.tensor(mine))

        def judge(orders: Tensor) -> Prediction:
            return predict(sites, groups, orders)

        if n <= search.EXACT_LIMIT:
            line = search.spread(torch.arange(n), inside, shape)  # slot_at of a line is also its place in the line
            best = search.exhaustive(shape, judge)
        else:
            line = search.spread(torch.arange(n), inside, shape)
            starts = torch.stack([search.spread(torch.tensor(s), inside, shape) for s in (list(range(n)), grouped)])
            best = search.descend(starts[search.best_of(judge(starts))], judge, limit=n)
        arranged = [0] * n
        for place_in_line, slot in zip(line.tolist(), best.tolist(), strict=True):
            arranged[place_in_line] = slot
        return arranged

    def _inside(self, size: Mapping[str, int]) -> tuple[Shape, list[AxisTraffic]]:
        """The part of the layout that lies in one node, with the volumes of the whole."""
        data = size["dp"] * size["cp"]
        etp = gcd(self.shape.tensor, size["tp"])
        ep = gcd(self.shape.ep, data * (size["tp"] // etp))
        shape = Shape(size["pp"], size["dp"], size["cp"], size["tp"], ep, etp)
        parts = {"tp": shape.tp, "ep": shape.ep, "cp": shape.cp, "pp": shape.pp, "dp": data}
        return shape, [
            AxisTraffic(t.axis, t.pattern, parts[t.axis], t.edge_bytes) for t in self.traffic if parts[t.axis] > 1
        ]

    def _grouped(self, mine: Sequence[int], tp: int) -> list[int]:
        """Ordinals with the best groups of `tp` first; what is left over last."""
        n = len(mine)
        devices = [self.slots[slot].device for slot in mine]
        used = [device for device in devices if device is not None]
        if not 2 <= tp < n or len(set(used)) < n or n > 4 * EXACT_LIMIT:
            return list(range(n))
        groups = best_groups(_part(self.cluster.nodes[self.slots[mine[0]].node], used), tp).groups
        first = [i for group in groups for i in group]
        return first + [i for i in range(n) if i not in first]


def _part(node: Node, devices: Sequence[int]) -> Node:
    """The node with only these devices, in this order."""
    links = tuple(tuple(node.links[i][j] for j in devices) for i in devices)
    return Node(node.host, tuple(node.devices[i] for i in devices), links)
