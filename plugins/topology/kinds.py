"""How two devices of a node are joined: classes of paths, and one path with its width.

It is: two frozen values and the name of a fabric. It is not: a matrix (`description.py`) or a cost (`rates.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class LinkKind(Enum):
    """How two devices of one node reach each other; `a < b` when a is of the slower class (compare `rank` for ties).

    MDF, NVLINK, XGMI and XELINK are links of their own; the rest are PCIe paths by what they cross.
    """

    MDF = "MDF"
    """Two tiles of one package (Intel)."""
    NVLINK = "NV"
    XGMI = "XGMI"
    XELINK = "XL"
    PIX = "PIX"
    """At most one PCIe bridge."""
    PXB = "PXB"
    """Several PCIe bridges, no host bridge."""
    PHB = "PHB"
    """A PCIe host bridge."""
    NODE = "NODE"
    """Several host bridges of one NUMA node."""
    SYS = "SYS"
    """The interconnect between NUMA nodes or sockets (SOC in old drivers)."""
    PCIE = "PCIE"
    """PCIe, path not told."""
    UNKNOWN = "?"
    """Not told at all: counted as the slowest."""

    @property
    def rank(self) -> int:
        """Class from 6 (MDF) and 5 (NVLink, XGMI, Xe Link) down to 0 (across sockets, or not told)."""
        return _RANK[self]

    @property
    def is_link(self) -> bool:
        """Whether it is a GPU-to-GPU link rather than a PCIe path."""
        return _RANK[self] >= 5

    def __lt__(self, other: object) -> bool:
        return self.rank < other.rank if isinstance(other, LinkKind) else NotImplemented


_RANK: Mapping[LinkKind, int] = {
    LinkKind.MDF: 6,
    LinkKind.NVLINK: 5,
    LinkKind.XGMI: 5,
    LinkKind.XELINK: 5,
    LinkKind.PIX: 4,
    LinkKind.PXB: 3,
    LinkKind.PHB: 2,
    LinkKind.NODE: 1,
    LinkKind.SYS: 0,
    LinkKind.PCIE: 0,
    LinkKind.UNKNOWN: 0,
}


@dataclass(frozen=True)
class Link:
    """The best path between two devices.

    Attributes:
        kind: its class.
        count: bonded links (NV12 has 12); 1 where the source does not count, 0 for PCIe paths.
        rate: GB/s in one direction over all of them; None when not known.
    """

    kind: LinkKind
    count: int = 0
    rate: float | None = None

    def weaker(self, other: Link) -> Link:
        """The one to believe when two sources disagree: lower class, then fewer links."""
        return min(self, other, key=lambda link: (link.kind.rank, link.count))


def fabric_of(links: Iterable[Iterable[Link | None]]) -> str:
    """Name of the fastest kind of GPU link in a matrix: "nvlink", "xgmi", "xelink" or "pcie"."""
    kinds = {link.kind for row in links for link in row if link is not None}
    if LinkKind.NVLINK in kinds:
        return "nvlink"
    if LinkKind.XGMI in kinds:
        return "xgmi"
    return "xelink" if kinds & {LinkKind.XELINK, LinkKind.MDF} else "pcie"
