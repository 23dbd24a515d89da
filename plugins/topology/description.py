"""What a node and a cluster are made of: devices, the links between them, and the groups that follow from the links.

It is: frozen data that every probe returns, that the planner reads and that survives a round trip through JSON.
It is not: a probe (`parallax.plugins.topology.probes`), a parser (`.text`) or a placement. Nothing here looks at the
machine it runs on.

Devices are named by their *position* in `Node.devices` in every method below; `Device.index` is the number the tool
printed and may have gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from parallax.plugins.topology.graph import components, maximal_cliques
from parallax.plugins.topology.kinds import Link, LinkKind, fabric_of

__all__ = ["Cluster", "Device", "Link", "LinkKind", "Nic", "Node", "Slot", "fabric_of"]

FORMAT = 1
"""Version of the JSON form; `from_dict` refuses any other."""


@dataclass(frozen=True)
class Device:
    """One GPU (or tile).

    Attributes:
        index: number in the tool's own naming.
        name: label or model, for people.
        uuid: permanent identity.
        bus_id: PCI address, lower case, domain:bus:device.function.
        numa: NUMA affinity as the source writes it: "0", "0-1", "0,3-9"; equal text means equal affinity.
        cpus: CPU affinity as the source writes it.
        domain_key: names the NVLink domain that may cross hosts: "clusterUuid/cliqueId"; None when there is none.
        switch_links: active links that end at a switch (NVSwitch); two devices of one node that both have them can
            reach each other, although no link of one ends at the other.
    """

    index: int
    name: str
    uuid: str | None = None
    bus_id: str | None = None
    numa: str | None = None
    cpus: str | None = None
    domain_key: str | None = None
    switch_links: int = 0


@dataclass(frozen=True)
class Nic:
    """One network port.

    Attributes:
        label: its name in the matrix (NIC0, mlx5_0).
        device: the system's name where told (mlx5_0).
        links: its path to each device of the node, in their order; empty when not told.
    """

    label: str
    device: str | None = None
    links: tuple[Link, ...] = ()


@dataclass(frozen=True)
class Node:
    """One machine as one process sees it.

    Attributes:
        host: host name.
        devices: GPUs in the source's order.
        links: square, `links[i][j]` is the path from i to j by position; None on the diagonal.
        nics: network ports named by the source.
        fabric: "nvlink", "xgmi", "xelink" or "pcie" ("pcie": no GPU link is visible); "none" without GPUs.
        source: which probe said so.
        complete: False when the source hides or lacks a part; `notes` then say which.
        notes: what a reader should know, one sentence each.
        machine: identity of the running system (boot id): tells two hosts of one name apart.
        cpus: CPU count of each NUMA node of the machine, where told.
    """

    host: str
    devices: tuple[Device, ...]
    links: tuple[tuple[Link | None, ...], ...]
    nics: tuple[Nic, ...] = ()
    fabric: str = "pcie"
    source: str = ""
    complete: bool = True
    notes: tuple[str, ...] = ()
    machine: str = ""
    cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.devices)
        if len(self.links) != n or any(len(row) != n for row in self.links):
            shape = f"{len(self.links)} rows of {sorted({len(row) for row in self.links})}"
            raise ValueError(f"{self.host}: links must be {n} x {n} for {n} devices, but is {shape}")

    def link(self, i: int, j: int) -> Link:
        """Path between two different devices, by position."""
        link = self.links[i][j]
        return Link(LinkKind.UNKNOWN) if link is None else link

    def neighbours(self) -> list[set[int]]:
        """For each device the others that it reaches over a GPU link (NVLink, XGMI, Xe Link, MDF)."""
        n = len(self.devices)
        return [{j for j in range(n) if j != i and self.link(i, j).kind.is_link} for i in range(n)]

    def link_domains(self) -> list[list[int]]:
        """Connected components over GPU links, of at least two devices, by first member."""
        return [group for group in components(self.neighbours()) if len(group) > 1]

    def link_cliques(self) -> list[list[int]]:
        """Maximal sets of pairwise linked devices, of at least two: largest first, then in order."""
        cliques = [clique for clique in maximal_cliques(self.neighbours()) if len(clique) > 1]
        return sorted(cliques, key=lambda clique: (-len(clique), clique))

    def all_to_all(self) -> bool:
        """Whether there are at least two devices and every pair is linked, directly or through a switch."""
        n = len(self.devices)
        return n > 1 and all(len(linked) == n - 1 for linked in self.neighbours())

    def isolated(self) -> list[int]:
        """Devices in no link domain."""
        return [i for i, linked in enumerate(self.neighbours()) if not linked]

    def numa_groups(self) -> list[list[int]] | None:
        """Devices of equal NUMA affinity, else of equal CPU affinity, by first member; None when neither is told."""
        for values in ([d.numa for d in self.devices], [d.cpus for d in self.devices]):
            if any(value is not None for value in values):
                return _by_value(values)
        return None

    def socket_groups(self) -> list[list[int]] | None:
        """Sockets read from the PCIe paths where the affinity does not separate them; None when that cannot be told.

        Two devices share a socket when their path, or the path of both to one NIC, stays inside a NUMA node. Told only
        if every device shares with some other device or NIC, and every two sockets see each other across SYS.
        """
        if len(self.numa_groups() or []) > 1 or len(self.devices) < 2:
            return None
        paths = _socket_paths(self)
        near = [{j for j, link in row.items() if 1 <= link.kind.rank <= 4} for row in paths]
        n = len(self.devices)
        groups = [group for group in components(near) if group[0] < n]
        if len(groups) < 2 or not all(near[:n]):
            return None
        far = {(i, j) for i, row in enumerate(paths) for j, link in row.items() if link.kind is LinkKind.SYS}
        apart = all(any((i, j) in far for i in a for j in b) for a, b in combinations(groups, 2))
        sockets = [[i for i in group if i < n] for group in groups]
        return sockets if apart else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is its inverse."""
        found = {"format": FORMAT, **asdict(self)}
        found["links"] = [[_link_to(link) for link in row] for row in self.links]
        found["nics"] = [
            {"label": nic.label, "device": nic.device, "links": [_link_to(link) for link in nic.links]}
            for nic in self.nics
        ]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Node:
        """Inverse of `to_dict`.

        Raises:
            ValueError: another format version, or not a recorded node.
        """
        _check_format(data, "node")
        try:
            return cls(
                host=data["host"],
                devices=tuple(Device(**device) for device in data["devices"]),
                links=tuple(tuple(_link_from(link) for link in row) for row in data["links"]),
                nics=tuple(
                    Nic(nic["label"], nic["device"], tuple(_told(_link_from(link)) for link in nic["links"]))
                    for nic in data["nics"]
                ),
                fabric=data["fabric"],
                source=data["source"],
                complete=data["complete"],
                notes=tuple(data["notes"]),
                machine=data["machine"],
                cpus=tuple(data["cpus"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a recorded node: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Slot:
    """Where one rank of the launcher runs: node by position in the cluster, device by position in the node."""

    node: int
    device: int | None


@dataclass(frozen=True)
class Cluster:
    """All nodes of a job and where the launcher put its ranks.

    Attributes:
        nodes: in the order of their first rank.
        slots: `slots[rank]` for the launcher's ranks; empty when only the machines are described.
        notes: what a reader should know of the whole.
    """

    nodes: tuple[Node, ...]
    slots: tuple[Slot, ...] = ()
    notes: tuple[str, ...] = ()

    def domains(self) -> list[list[tuple[int, int]]]:
        """Link domains as (node, device) positions, those that cross hosts joined by `Device.domain_key`.

        Every device is in exactly one: one without any link is alone. By first member.
        """
        where = [(k, i) for k, node in enumerate(self.nodes) for i in range(len(node.devices))]
        at = {place: position for position, place in enumerate(where)}
        near: list[set[int]] = [set() for _ in where]
        first: dict[str, int] = {}
        for (k, i), position in at.items():
            near[position].update(at[k, j] for j in self.nodes[k].neighbours()[i])
            key = self.nodes[k].devices[i].domain_key
            if key is not None:
                other = first.setdefault(key, position)
                near[position].add(other)
                near[other].add(position)
        return [[where[position] for position in group] for group in components(near)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` is its inverse."""
        return {
            "format": FORMAT,
            "nodes": [node.to_dict() for node in self.nodes],
            "slots": [[slot.node, slot.device] for slot in self.slots],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """Inverse of `to_dict`; raises as `Node.from_dict`."""
        _check_format(data, "cluster")
        try:
            nodes = tuple(Node.from_dict(node) for node in data["nodes"])
            return cls(nodes, tuple(Slot(k, i) for k, i in data["slots"]), tuple(data["notes"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a recorded cluster: {type(error).__name__} {error}") from error


def _by_value(values: Sequence[str | None]) -> list[list[int]]:
    groups: dict[str | None, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(value, []).append(i)
    return list(groups.values())


def _socket_paths(node: Node) -> list[dict[int, Link]]:
    """Paths among devices (positions 0..n-1) and NICs (n..)."""
    n = len(node.devices)
    paths: list[dict[int, Link]] = [{j: node.link(i, j) for j in range(n) if j != i} for i in range(n)]
    for k, nic in enumerate(node.nics):
        paths.append(dict(enumerate(nic.links)))
        for i, link in enumerate(nic.links):
            paths[i][n + k] = link
    return paths


def _link_to(link: Link | None) -> list[Any] | None:
    return None if link is None else [link.kind.value, link.count, link.rate]


def _link_from(data: Sequence[Any] | None) -> Link | None:
    return None if data is None else Link(LinkKind(data[0]), data[1], data[2])


def _told(link: Link | None) -> Link:
    return Link(LinkKind.UNKNOWN) if link is None else link


def _check_format(data: Mapping[str, Any], what: str) -> None:
    found = data.get("format") if isinstance(data, Mapping) else None
    if found != FORMAT:
        raise ValueError(f"not a recorded {what} of format {FORMAT}: its format is {found!r}; record it again")
