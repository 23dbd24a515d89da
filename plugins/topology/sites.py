"""Where the launcher's ranks sit, as numbers: which node, which island, how fast each pair is.

It is: the description of a cluster turned into tensors once, so that any order of the ranks can be judged quickly.
Nodes that look alike share one table (a *kind*). It is not: a judgement of an order (`cost.py`).

An *island* is what devices reach without the network: a node, or several that a multi-node NVLink fabric joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from parallax.plugins.topology.description import Cluster, Link, Node, Slot
from parallax.plugins.topology.graph import components
from parallax.plugins.topology.rates import Rates

Table = tuple[tuple[float, ...], ...]
"""GB/s between the used devices of a node, by their order among its slots; infinite on the diagonal."""

Links = tuple[tuple[Link | None, ...], ...]
COLUMNS = ("node", "island", "ordinal", "kind", "key")
"""The fields of `Sites` with one entry per slot."""
FASTEST_FABRIC = 450.0


@dataclass(frozen=True)
class Kind:
    """Nodes whose used devices are joined in the same way.

    Attributes:
        table: GB/s of each pair.
        domains: the used devices that GPU links join, as ordinals: every ordinal is in exactly one.
        uniform: GB/s of every pair where all are equal (infinite for a single device), else None.
    """

    table: Table
    domains: tuple[tuple[int, ...], ...]
    uniform: float | None

    @property
    def size(self) -> int:
        return len(self.table)

    @property
    def fastest(self) -> float:
        """GB/s of the fastest pair; 0 for a single device."""
        return max((self.table[i][j] for i, j in combinations(range(self.size), 2)), default=0.0)

    def slowest_pair(self, members: Sequence[int]) -> float:
        """GB/s of the slowest pair among `members`; infinite for fewer than two."""
        return min((self.table[i][j] for i, j in combinations(members, 2)), default=float("inf"))

    def mean_cost(self, members: Sequence[int]) -> float:
        """Mean over pairs of `members` of the seconds for one GB; 0 for fewer than two."""
        pairs = list(combinations(members, 2))
        return sum(1 / self.table[i][j] for i, j in pairs) / max(1, len(pairs))


@dataclass(frozen=True)
class Sites:
    """One entry per slot, that is per rank of the launcher, in its order.

    Attributes:
        node: number of the node, numbered so that nodes of one island are neighbours. int64 [N].
        island: number of the island. int64 [N].
        ordinal: place among the slots of the node, by device. int64 [N].
        kind: number of the node's kind. int64 [N].
        key: number of the multi-node fabric the device is in, -1 for none. int64 [N].
        kinds: the kinds.
        rates: GB/s by kind and two ordinals. float64 [kinds, most, most].
        fabric: GB/s between nodes of one island. float64 [islands].
        ports: GB/s that leave an island over the network. float64 [islands].
        flow: the most that one flow over the network gets, GB/s.
    """

    node: Tensor
    island: Tensor
    ordinal: Tensor
    kind: Tensor
    key: Tensor
    kinds: tuple[Kind, ...]
    rates: Tensor
    fabric: Tensor
    ports: Tensor
    flow: float

    @property
    def size(self) -> int:
        return self.node.numel()

    @classmethod
    def of(cls, cluster: Cluster, slots: Sequence[Slot], rates: Rates) -> Sites:
        """Read a cluster as seen by the ranks in `slots`.

        Raises:
            ValueError: no slots, or a slot on a node or device that the cluster does not have.
        """
        _check(cluster, slots)
        on: dict[int, list[int]] = {}
        for slot, place in enumerate(slots):
            on.setdefault(place.node, []).append(slot)
        for mine in on.values():  # by device, so that nodes differ in kind by their links and not by their ranks
            mine.sort(key=lambda slot: slots[slot].device or 0)
        islands = _islands(cluster, slots, on)
        kinds, kind_of = _kinds(cluster, slots, on, rates)
        rows: list[tuple[int, ...]] = [()] * len(slots)
        keys: dict[str, int] = {}
        number = 0
        for island, nodes in enumerate(islands):
            for node in nodes:
                for ordinal, slot in enumerate(on[node]):
                    key = _domain_key(cluster, slots[slot])
                    fabric = -1 if key is None else keys.setdefault(key, len(keys))
                    rows[slot] = (number, island, ordinal, kind_of[node], fabric)
                number += 1
        most = max(kind.size for kind in kinds)
        table = torch.full((len(kinds), most, most), float("inf"), dtype=torch.float64)
        for k, kind in enumerate(kinds):
            table[k, : kind.size, : kind.size] = torch.tensor(kind.table, dtype=torch.float64)
        fastest = [max(kinds[kind_of[node]].fastest for node in nodes) or FASTEST_FABRIC for nodes in islands]
        fabric_rates = [rates.fabric or rate for rate in fastest]
        ports = [sum(rates.node(cluster.nodes[node]) for node in nodes) for nodes in islands]
        columns = torch.tensor(rows, dtype=torch.int64).t().contiguous()
        return cls(
            **dict(zip(COLUMNS, columns, strict=True)),
            kinds=kinds,
            rates=table,
            fabric=torch.tensor(fabric_rates, dtype=torch.float64),
            ports=torch.tensor(ports, dtype=torch.float64),
            flow=rates.network,
        )

    def subset(self, slots: Tensor) -> Sites:
        """Some slots only; entry i is slot `slots[i]`. Islands are numbered anew."""
        columns = {name: getattr(self, name)[slots] for name in COLUMNS}
        islands, columns["island"] = torch.unique(columns["island"], return_inverse=True)
        return replace(self, **columns, fabric=self.fabric[islands], ports=self.ports[islands])

    def pair_rates(self, a: Tensor, b: Tensor) -> Tensor:
        """GB/s between slots `a` and `b` of one island, element by element."""
        inside = self.rates[self.kind[a], self.ordinal[a], self.ordinal[b]]
        joined = (self.key[a] >= 0) & (self.key[a] == self.key[b])
        between = torch.where(joined, self.fabric[self.island[a]], self.flow)
        return torch.where(self.node[a] == self.node[b], inside, between)


def _check(cluster: Cluster, slots: Sequence[Slot]) -> None:
    if not slots:
        raise ValueError("there are no ranks to place: the cluster has no slots")
    for rank, slot in enumerate(slots):
        if not 0 <= slot.node < len(cluster.nodes):
            raise ValueError(f"rank {rank} is on node {slot.node}, but the cluster has {len(cluster.nodes)} nodes")
        node = cluster.nodes[slot.node]
        if slot.device is not None and not 0 <= slot.device < len(node.devices):
            raise ValueError(
                f"rank {rank} uses device {slot.device} of {node.host}, which shows {len(node.devices)} devices: "
                "start no more ranks on it than it has devices"
            )


def _domain_key(cluster: Cluster, slot: Slot) -> str | None:
    return None if slot.device is None else cluster.nodes[slot.node].devices[slot.device].domain_key


def _islands(cluster: Cluster, slots: Sequence[Slot], on: dict[int, list[int]]) -> list[list[int]]:
    """Nodes joined by the fabric of some device in use; by first slot."""
    home: dict[int, int] = {}
    first: dict[str, int] = {}

    def root(node: int) -> int:
        while home.setdefault(node, node) != node:
            node = home[node]
        return node

    for node, mine in on.items():
        for slot in mine:
            key = _domain_key(cluster, slots[slot])
            if key is not None:
                home[root(node)] = root(first.setdefault(key, node))
    islands: dict[int, list[int]] = {}
    for node in on:
        islands.setdefault(root(node), []).append(node)
    return list(islands.values())


def _kinds(
    cluster: Cluster, slots: Sequence[Slot], on: dict[int, list[int]], rates: Rates
) -> tuple[tuple[Kind, ...], dict[int, int]]:
    """The kinds in order of first use, and the kind of each node."""
    known: dict[tuple[Table, tuple[tuple[int, ...], ...]], int] = {}
    kinds: list[Kind] = []
    kind_of: dict[int, int] = {}
    seen: deque[tuple[tuple[int | None, ...], Links, int]] = deque(maxlen=4)  # most nodes are like one of the last few
    for node, mine in on.items():
        devices = tuple(slots[slot].device for slot in mine)
        links = cluster.nodes[node].links
        like = next((kind for used, others, kind in seen if used == devices and others == links), None)
        if like is None:
            found = _table(cluster.nodes[node], devices, rates), _domains(cluster.nodes[node], devices)
            if found not in known:
                known[found] = len(kinds)
                values = {found[0][i][j] for i, j in combinations(range(len(devices)), 2)}
                kinds.append(Kind(*found, min(values, default=float("inf")) if len(values) < 2 else None))
            like = known[found]
            seen.appendleft((devices, links, like))
        kind_of[node] = like
    return tuple(kinds), kind_of


def _domains(node: Node, devices: tuple[int | None, ...]) -> tuple[tuple[int, ...], ...]:
    def linked(a: int | None, b: int | None) -> bool:
        return a is not None and b is not None and (a == b or node.link(a, b).kind.is_link)

    numbers = range(len(devices))
    near = [{j for j in numbers if j != i and linked(devices[i], devices[j])} for i in numbers]
    return tuple(tuple(group) for group in components(near))


def _table(node: Node, devices: tuple[int | None, ...], rates: Rates) -> Table:
    def rate(i: int, j: int) -> float:
        a, b = devices[i], devices[j]
        if i == j or (a is not None and a == b):
            return float("inf")  # one device shared by two ranks: nothing is sent
        if a is None or b is None:
            return rates.host
        return min(rates.link(node.link(a, b)), rates.link(node.link(b, a)))

    return tuple(tuple(rate(i, j) for j in range(len(devices))) for i in range(len(devices)))
