"""What a link is worth in GB/s: told by the source, measured, or assumed from its kind.

It is: one frozen table of assumptions and the rule to read a link with it. It is not: a measurement (`measure.py`).
Placement depends on the order of these numbers far more than on their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from parallax.plugins.topology.description import Link, LinkKind, Node

PER_LINK: Mapping[LinkKind, float] = MappingProxyType(
    {LinkKind.MDF: 100.0, LinkKind.NVLINK: 25.0, LinkKind.XGMI: 50.0, LinkKind.XELINK: 26.5}
)
"""GB/s one way of one link: NVLink 2 to 4 has 25 (NVLink 1: 20, NVLink 5: 50), Infinity Fabric 50 (MI250X) to 64
(MI300X), Xe Link 26.5. The path between two tiles of one package is at least as fast as any of them."""

PATHS: Mapping[LinkKind, float] = MappingProxyType(
    {
        LinkKind.PIX: 24.0,
        LinkKind.PXB: 22.0,
        LinkKind.PHB: 20.0,
        LinkKind.NODE: 18.0,
        LinkKind.SYS: 16.0,
        LinkKind.PCIE: 16.0,
        LinkKind.UNKNOWN: 16.0,
    }
)
"""GB/s one way over PCIe. PCIe 4.0 x16 carries about 25; each bridge and socket on the way costs a little, and more
under load. All are above one network port: a path inside a node passes no more PCIe than a path to the next node."""


@dataclass(frozen=True)
class Rates:
    """GB/s (10^9 bytes a second), one way.

    Attributes:
        network: one network port, which is also the most that one flow between two nodes gets.
        ports: network ports of a node; None: as many as its description lists, at least 1.
        fabric: between devices of different nodes that a multi-node NVLink fabric joins; None: as the fastest link
            inside the node, 450 where it has none.
        host: between ranks of one node without devices (shared memory).
    """

    network: float = 12.5
    ports: int | None = None
    fabric: float | None = None
    host: float = 20.0

    def __post_init__(self) -> None:
        for name in ("network", "fabric", "host"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be a rate in GB/s above 0, got {value!r}")

    def link(self, link: Link) -> float:
        """GB/s of a link: its own rate where told or measured, else by kind and count."""
        if link.rate:
            return link.rate
        per_link = PER_LINK.get(link.kind)
        return PATHS[link.kind] if per_link is None else per_link * max(1, link.count)

    def node(self, node: Node) -> float:
        """GB/s that leave a node over its network, all ports together."""
        return self.network * (self.ports or max(1, len(node.nics)))
