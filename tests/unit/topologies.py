"""Small clusters for the tests of placement, and the cost model once more in plain Python.

The second model walks over `mesh.partition`'s groups with loops and dictionaries: no tensors, no runs, no bit masks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from parallax.plugins.topology.description import Cluster, Device, Link, LinkKind, Nic, Node, Slot
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.traffic import AxisTraffic
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import expert_partitions, partition

NV = LinkKind.NVLINK
SYS = Link(LinkKind.SYS)

# Links of a DGX-1 with V100: NVIDIA, "DGX-1 with Tesla V100 system architecture" (2017), figure of the hybrid cube mesh
DGX1 = {
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1},
    **{(4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
}


def node(
    host: str, n: int, links: dict[tuple[int, int], int] | int = 12, nics: int = 0, key: str | None = None
) -> Node:
    """`n` GPUs joined by NVLinks: all pairs with as many (an int), or the given pairs; the rest crosses sockets."""
    count = links if isinstance(links, dict) else dict.fromkeys(combinations(range(n), 2), links)

    def link(i: int, j: int) -> Link | None:
        bonded = count.get((min(i, j), max(i, j)), 0)
        return None if i == j else Link(NV, bonded) if bonded else SYS

    devices = tuple(Device(i, f"GPU{i}", domain_key=key) for i in range(n))
    rows = tuple(tuple(link(i, j) for j in range(n)) for i in range(n))
    return Node(host, devices, rows, tuple(Nic(f"NIC{k}") for k in range(nics)))


def dealt(*nodes: Node) -> tuple[Cluster, list[Slot]]:
    """Ranks handed out like cards: one to each node in turn, as `mpirun --map-by node` does."""
    most = max(len(each.devices) for each in nodes)
    slots = [Slot(k, i) for i in range(most) for k, each in enumerate(nodes) if i < len(each.devices)]
    return Cluster(nodes), slots


def filled(*nodes: Node) -> tuple[Cluster, list[Slot]]:
    """Ranks node after node."""
    return Cluster(nodes), [Slot(k, i) for k, each in enumerate(nodes) for i in range(len(each.devices))]


def groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    if axis == "ep":
        return expert_partitions(layout)["ep"]
    return partition({"dp": ("dp", "cp")}.get(axis, (axis,)), layout.axis_sizes())


class Model:
    """Seconds of groups of slots, one group at a time; `out` collects what leaves each island."""

    def __init__(self, cluster: Cluster, slots: Sequence[Slot], rates: Rates) -> None:
        self.cluster, self.slots, self.rates = cluster, slots, rates
        self.island = _islands(cluster)
        self.ports: dict[int, float] = defaultdict(float)
        for number in {slot.node for slot in slots}:
            self.ports[self.island[number]] += rates.network * max(1, len(cluster.nodes[number].nics))
        self.out: dict[int, float] = defaultdict(float)

    def rate(self, a: Slot, b: Slot) -> float:
        here, there = self.cluster.nodes[a.node], self.cluster.nodes[b.node]
        if a.node == b.node:
            link = here.links[a.device][b.device]
            return {NV: 25.0 * link.count}.get(link.kind, 16.0)
        if self.island[a.node] == self.island[b.node] and here.devices[0].domain_key == there.devices[0].domain_key:
            return self.rates.fabric or 25.0 * here.links[0][1].count
        return self.rates.network

    def neighbours(self, places: list[Slot], gb: float, both_ways: bool) -> float:
        steps = list(zip(places, places[1:], strict=False))
        steps += [(b, a) for a, b in steps] if both_ways else [(places[-1], places[0])]
        for a, b in steps:
            if self.island[a.node] != self.island[b.node]:
                self.out[self.island[a.node]] += gb
        return max(gb / self.rate(a, b) for a, b in steps)

    def by_island(self, places: list[Slot]) -> dict[int, list[Slot]]:
        found: dict[int, list[Slot]] = defaultdict(list)
        for place in places:
            found[self.island[place.node]].append(place)
        return found

    def ring(self, places: list[Slot], gb: float) -> float:
        times = []
        parts = self.by_island(places)
        for home, mine in parts.items():
            times += [gb / self.rate(a, b) for a, b in combinations(mine, 2)]
            if len(parts) > 1:
                self.out[home] += gb
                times.append(gb / (self.rates.network * self.flows(home, len(mine))))
        return max(times)

    def flows(self, home: int, members: int) -> int:
        """As many as there are members, while all together stay below the slowest pair of the island."""
        there = [slot for slot in self.slots if self.island[slot.node] == home]
        slowest = min((self.rate(a, b) for a, b in combinations(there, 2)), default=float("inf"))
        flows = 1
        while flows < members and (flows + 1) * self.rates.network < slowest:
            flows += 1
        return flows

    def all_to_all(self, places: list[Slot], gb: float) -> float:
        times = []
        for home, mine in self.by_island(places).items():
            away = len(places) - len(mine)
            times += [(len(mine) - 1) * gb / self.rate(a, b) for a, b in combinations(mine, 2)]
            times.append(away * gb / self.rates.network)
            self.out[home] += len(mine) * away * gb
        return max(times)


def seconds(
    cluster: Cluster,
    slots: Sequence[Slot],
    layout: Layout,
    traffic: Sequence[AxisTraffic],
    slot_of: Sequence[int],
    rates: Rates,
) -> dict[str, float]:
    """Predicted seconds of each axis when new rank r runs where the launcher's rank `slot_of[r]` was started."""
    at = [slots[old] for old in slot_of]
    found = {}
    for each in traffic:
        model, gb = Model(cluster, slots, rates), each.edge_bytes / 1e9
        times = []
        for ranks in groups(layout, each.axis):
            places = [at[rank] for rank in ranks]
            if each.pattern == "reduce":
                times.append(model.ring(places, gb))
            elif each.pattern == "exchange":
                times.append(model.all_to_all(places, gb))
            else:
                times.append(model.neighbours(places, gb, both_ways=each.pattern == "chain"))
        found[each.axis] = max(*times, 0.0, *(out / model.ports[home] for home, out in model.out.items()))
    return found


def _islands(cluster: Cluster) -> list[int]:
    """Nodes with the same domain key are one island (all devices of a node have the same key here)."""
    first: dict[str, int] = {}
    found = []
    for number, each in enumerate(cluster.nodes):
        key = each.devices[0].domain_key
        found.append(number if key is None else first.setdefault(key, number))
    return found


def random_cluster(rng: random.Random, ranks: int) -> tuple[Cluster, list[Slot]]:
    """Nodes of random sizes with random links; the ranks start in random order on random devices."""
    nodes, left = [], ranks
    while left:
        n = min(left, rng.randint(1, 6))
        count = {pair: rng.choice((0, 1, 2, 4)) for pair in combinations(range(n), 2)}
        nodes.append(node(f"n{len(nodes)}", n, count, nics=rng.randint(0, 4)))
        left -= n
    cluster, slots = filled(*nodes)
    rng.shuffle(slots)
    return cluster, slots
