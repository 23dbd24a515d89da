"""Machines by name, for plans and tests without them: "4x dgx-h100", "2x dgx1-v100, 1x pcie-8".

It is: a table of public layouts, written by hand from the vendors' descriptions, not recorded. It is not: a
measurement; rates are left to the cost model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from parallax.plugins.topology.description import Cluster, Device, Link, LinkKind, Nic, Node, fabric_of
from parallax.plugins.topology.probes.base import Probe, host_name, machine_id
from parallax.strategies.names import unknown_name

_CUBE: Mapping[frozenset[int], int] = MappingProxyType(
    {
        frozenset(pair): count
        for count, pairs in {
            1: [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)],
            2: [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)],
        }.items()
        for pair in pairs
    }
)
"""NVLinks of the hybrid cube mesh of eight V100: pair -> links; every GPU has six."""


@dataclass(frozen=True)
class Model:
    """One kind of machine.

    Attributes:
        gpus: devices of a node.
        nics: network ports of a node.
        link: path between positions i < j.
        sockets: how many NUMA nodes the GPUs are spread over, in blocks.
        rack: nodes that share one NVLink domain; 1: it ends with the node.
    """

    gpus: int
    nics: int
    link: Callable[[int, int], Link]
    sockets: int = 2
    rack: int = 1


def _all(kind: LinkKind, count: int) -> Callable[[int, int], Link]:
    return lambda i, j: Link(kind, count)


def _cube(i: int, j: int) -> Link:
    count = _CUBE.get(frozenset((i, j)), 0)
    return Link(LinkKind.NVLINK, count) if count else _pcie(i, j)


def _pcie(i: int, j: int) -> Link:
    """Eight GPUs on two sockets, two to a switch."""
    if i // 2 == j // 2:
        return Link(LinkKind.PIX)
    return Link(LinkKind.NODE if i // 4 == j // 4 else LinkKind.SYS)


def _pairs(i: int, j: int) -> Link:
    return Link(LinkKind.NVLINK, 12) if i // 2 == j // 2 else Link(LinkKind.NODE if i // 4 == j // 4 else LinkKind.SYS)


def _summit(i: int, j: int) -> Link:
    return Link(LinkKind.NVLINK, 2) if i // 3 == j // 3 else Link(LinkKind.SYS)


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "dgx1-v100": Model(8, 4, _cube),
        "dgx2": Model(16, 8, _all(LinkKind.NVLINK, 6)),
        "hgx-a100": Model(8, 8, _all(LinkKind.NVLINK, 12)),
        "hgx-a100-4": Model(4, 4, _all(LinkKind.NVLINK, 4)),
        "dgx-a100": Model(8, 8, _all(LinkKind.NVLINK, 12)),
        "dgx-h100": Model(8, 8, _all(LinkKind.NVLINK, 18)),
        "dgx-b200": Model(8, 8, _all(LinkKind.NVLINK, 18)),
        "gb200-nvl72": Model(4, 4, _all(LinkKind.NVLINK, 18), rack=18),
        "mi300x": Model(8, 8, _all(LinkKind.XGMI, 1)),
        "pvc-tiles": Model(
            4, 1, lambda i, j: Link(LinkKind.MDF, 1) if i // 2 == j // 2 else Link(LinkKind.XELINK, 16), sockets=2
        ),
        "summit": Model(6, 2, _summit),
        "pcie-bridged-8": Model(8, 2, _pairs),
        "pcie-8": Model(8, 1, _pcie),
        "pcie-4": Model(4, 1, _pcie, sockets=1),
    }
)


class SyntheticProbe(Probe):
    """Stands in for this machine; never chosen by itself.

    Args:
        model: a name of `MODELS`.

    Raises:
        ValueError: no such name.
    """

    name: ClassVar[str] = "synthetic"
    priority: ClassVar[int] = -1000

    def __init__(self, model: str = "dgx-h100") -> None:
        self._model = model
        _model(model)

    def problem(self) -> str | None:
        """See `Probe`."""
        return None

    def probe(self) -> Node:
        """See `Probe`: under this machine's name, so that several real hosts can play several nodes."""
        return synthetic_node(self._model, host_name(), machine_id())


def synthetic_cluster(spec: str) -> Cluster:
    """The cluster that "COUNTx MODEL, COUNTx MODEL, ..." names.

    Raises:
        ValueError: not of this form, or no such model.
    """
    nodes: list[Node] = []
    for part in spec.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[x*]\s*)?([a-z][\w\-]*)\s*", part, re.IGNORECASE)
        if match is None or (match[1] and int(match[1]) < 1):
            raise ValueError(f"{part.strip()!r} is not 'COUNTx MODEL', for example '4x dgx-h100'")
        name = match[2].lower()
        first, rack = len(nodes), _model(name).rack
        for k in range(int(match[1] or 1)):
            key = f"{name}-rack{first}-{k // rack}/1" if rack > 1 else None
            nodes.append(synthetic_node(name, f"node{len(nodes)}", f"synthetic-{len(nodes)}", key))
    return Cluster(tuple(nodes))


def synthetic_node(name: str, host: str = "node0", machine: str = "", domain_key: str | None = None) -> Node:
    """One machine of the model called `name`.

    Raises:
        ValueError: no such model.
    """
    model = _model(name)
    n = model.gpus
    links = tuple(tuple(None if i == j else model.link(min(i, j), max(i, j)) for j in range(n)) for i in range(n))
    devices = tuple(
        Device(i, name, uuid=f"{host}-{name}-{i}", numa=str(i * model.sockets // n), domain_key=domain_key)
        for i in range(n)
    )
    nics = tuple(Nic(f"NIC{k}", None, tuple(_nic_link(model, k, i) for i in range(n))) for k in range(model.nics))
    return Node(host, devices, links, nics, fabric_of(links), "synthetic", machine=machine)


def _nic_link(model: Model, nic: int, gpu: int) -> Link:
    """NICs are spread over the GPUs in blocks: near its own, on the socket of its neighbours."""
    near = nic * model.gpus // model.nics <= gpu < max(1, (nic + 1) * model.gpus // model.nics)
    if near and model.nics > 1:
        return Link(LinkKind.PXB)
    same = nic * model.sockets // model.nics == gpu * model.sockets // model.gpus
    return Link(LinkKind.NODE if same else LinkKind.SYS)


def _model(name: str) -> Model:
    if name not in MODELS:
        raise unknown_name("machine", name, MODELS)
    return MODELS[name]
