"""A node from hwloc's XML: `lstopo --of xml`, of hwloc 2 or 3.

It is: GPUs and network ports in the tree of PCI bridges and NUMA nodes, and the bandwidth matrices that hwloc's
vendor backends add (NVLink, XGMI, Xe Link). It is not: hwloc; only the standard library reads the file.

What the file alone does not say:
- A link that ends at an NVSwitch does not name the GPU behind it, and the trunks between switches are not in the file:
  the sixteen GPUs of a DGX-2 look like two halves. GPUs of one node that both have such links reach each other.
- A hwloc without a vendor's backend shows that vendor's GPUs as PCI devices, without their links: the node is marked
  incomplete.
- Links are not counted; bandwidth is told. The count is bandwidth over the widest rate of one NVLink (25 or 20 GB/s)
  that fits all of them; where one link carries 50 GB/s it is twice the number of cables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from parallax.plugins.topology.description import Device, Link, LinkKind, Nic, Node, fabric_of
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.text.links import reconcile
from parallax.plugins.topology.text.matrix import CaptureError

_GPU = re.compile(r"(nvml|rsmi|ze|cuda)(\d+)$")
_BACKENDS = ("nvml", "rsmi", "ze", "cuda")
"""Names of GPUs by preference: the numbers of the first are the vendor tool's own."""
_VENDORS = {"10de": "NVIDIA", "1002": "AMD", "8086": "Intel"}
_DISPLAY = "0300"
_GPU_CLASSES = frozenset({_DISPLAY, "0302", "0380", "1200"})
_MATRICES = {"NVLinkBandwidth": LinkKind.NVLINK, "XGMIBandwidth": LinkKind.XGMI, "XeLinkBandwidth": LinkKind.XELINK}
_LINK_UNITS = (25000, 20000)
_OPENFABRICS_2, _OPENFABRICS_3 = 3, 32


@dataclass
class _Place:
    """One object of the tree.

    Attributes:
        element: of the XML.
        up: its parents, the nearest first.
    """

    element: Element
    up: tuple[Element, ...]

    @property
    def name(self) -> str:
        return self.element.get("name", "")

    def pci(self) -> _Place:
        """The PCI device it belongs to; itself where there is none."""
        for k, parent in enumerate((self.element, *self.up)):
            if parent.get("type") == "PCIDev":
                return _Place(parent, self.up[k:])
        return self


@dataclass
class _Gpu:
    """A GPU with all objects that stand for it."""

    place: _Place
    number: int
    names: list[_Place] = field(default_factory=list)


def is_hwloc(text: str) -> bool:
    """Whether this is XML of hwloc, of whatever version."""
    return bool(re.match(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!DOCTYPE\s+topology[^>]*>\s*)?<topology\b", text))


def read_hwloc(text: str, host: str = "") -> Node:
    """The node.

    Args:
        text: the XML.
        host: its name; default: the one in the file.

    Raises:
        CaptureError: not readable, of hwloc 1, or a matrix that is not whole.
    """
    root = _parse(text)
    places = list(_walk(root))
    gpus = _gpus(places)
    devices = [_device(gpu, root) for gpu in gpus]
    names = [device.name for device in devices]
    found: list[list[Link | None]] = [
        [None if a is b else Link(_path(a.place, b.place, root)) for b in gpus] for a in gpus
    ]
    switch = [0] * len(gpus)
    told = _apply_matrices(root, gpus, found, switch)
    links, notes = reconcile(found, names)
    dark = sorted({vendor for gpu in gpus if (vendor := _without_backend(gpu)) is not None})
    if dark:
        notes.append(
            f"hwloc was built without the backend for {' and '.join(dark)} GPUs: their links are not shown, which does "
            "not mean that there are none"
        )
    return Node(
        host=host or _host(root),
        devices=tuple(
            Device(d.index, d.name, d.uuid, d.bus_id, d.numa, d.cpus, None, count)
            for d, count in zip(devices, switch, strict=True)
        ),
        links=links,
        nics=tuple(Nic(p.name, p.name, tuple(Link(_path(p, gpu.place, root)) for gpu in gpus)) for p in _ports(places)),
        fabric=(told or fabric_of(links)) if gpus else "none",
        complete=not dark,
        notes=tuple(notes),
        cpus=tuple(len(_bits(p.element.get("cpuset"))) for p in places if p.element.get("type") == "NUMANode"),
    )


def _parse(text: str) -> Element:
    if "<!ENTITY" in text:
        raise CaptureError("this XML defines entities, which hwloc never does: refused")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise CaptureError(f"the XML of hwloc is cut off or damaged: {error}") from error
    if not re.match(r"[23]\.", root.get("version", "")):
        raise CaptureError(f"XML of hwloc {root.get('version', '1')}: save it again with hwloc 2 or later (lstopo)")
    return root


def _walk(element: Element, up: tuple[Element, ...] = ()) -> Iterator[_Place]:
    for child in element.findall("object"):
        yield _Place(child, up)
        yield from _walk(child, (child, *up))


def _gpus(places: Sequence[_Place]) -> list[_Gpu]:
    """One for each PCI device that a backend names, by the vendor tool's numbers; if none, those of a GPU's class."""
    found: dict[int, _Gpu] = {}
    rank: dict[int, tuple[int, int]] = {}
    for place in places:
        match = _GPU.match(place.name) if place.element.get("type") == "OSDev" else None
        if match is not None:
            device = place.pci()
            key = id(device.element)
            found.setdefault(key, _Gpu(device, -1)).names.append(place)
            rank[key] = min(rank.get(key, (len(_BACKENDS), 0)), (_BACKENDS.index(match[1]), int(match[2])))
    if not found:
        return [_Gpu(place, k) for k, place in enumerate(_unnamed(places))]
    for key, gpu in found.items():
        gpu.number = rank[key][1]
    return [found[key] for key in sorted(found, key=lambda key: rank[key])]


def _unnamed(places: Sequence[_Place]) -> list[_Place]:
    """PCI devices of a GPU's class, by address; display adapters only where there are no accelerators."""
    found: list[tuple[str, str, _Place]] = []
    for place in places:
        match = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):", place.element.get("pci_type", ""))
        if place.element.get("type") == "PCIDev" and match and match[1] in _GPU_CLASSES and match[2] in _VENDORS:
            found.append((place.element.get("pci_busid", ""), match[1], place))
    strong = [row for row in found if row[1] != _DISPLAY]
    return [place for _, _, place in sorted(strong or found, key=lambda row: row[0])]


def _device(gpu: _Gpu, root: Element) -> Device:
    infos: dict[str, str] = {}
    for place in gpu.names:
        infos.update({info.get("name", ""): info.get("value", "") for info in place.element.findall("info")})
    home = _home(gpu.place, root)
    bus = gpu.place.element.get("pci_busid")
    return Device(
        index=gpu.number,
        name=infos.get("GPUModel") or f"GPU{gpu.number}",
        uuid=next((value for name, value in sorted(infos.items()) if name.endswith("UUID")), None),
        bus_id=bus.lower() if bus else None,
        numa=sysfs.format_list(_bits(home.get("nodeset"))) if home is not None else None,
        cpus=sysfs.format_list(_bits(home.get("cpuset"))) if home is not None else None,
    )


def _home(place: _Place, root: Element) -> Element | None:
    """The nearest parent that has CPUs; None when that is the whole of a machine with several NUMA nodes."""
    home = next((parent for parent in place.up if parent.get("nodeset")), None)
    machine = root.find("object")
    whole = machine is not None and home is machine and len(_bits(machine.get("nodeset"))) > 1
    return None if whole else home


def _path(a: _Place, b: _Place, root: Element) -> LinkKind:
    """PCIe path between two devices: what kind of object joins them, and how far above them it is."""
    mine = {id(parent): depth for depth, parent in enumerate(a.pci().up)}
    joint = next((k for k, parent in enumerate(b.pci().up) if id(parent) in mine), None)
    if joint is None:
        return LinkKind.UNKNOWN
    parent = b.pci().up[joint]
    if parent.get("type") == "Bridge":
        if parent.get("bridge_type", "").startswith("0"):
            return LinkKind.PHB
        return LinkKind.PIX if max(joint, mine[id(parent)]) <= 1 else LinkKind.PXB
    homes = [_home(place.pci(), root) for place in (a, b)]
    if None in homes:
        return LinkKind.UNKNOWN
    return LinkKind.NODE if len({home.get("nodeset") for home in homes if home is not None}) == 1 else LinkKind.SYS


def _apply_matrices(root: Element, gpus: Sequence[_Gpu], found: list[list[Link | None]], switch: list[int]) -> str:
    """Put the links of every bandwidth matrix into `found` and `switch`; the fabric if switches alone tell it."""
    position = {place.element.get("gp_index"): i for i, gpu in enumerate(gpus) for place in (gpu.place, *gpu.names)}
    position.pop(None, None)
    fabric = ""
    for matrix in (*root.findall("distances2"), *root.findall("distances2hetero")):
        kind = _MATRICES.get(matrix.get("name", ""))
        if kind is None:
            continue
        ends, values = _values(matrix, root)
        at = [position.get(end) for end in ends]
        switches = [k for k, end in enumerate(ends) if _is_switch(root, end)]
        cells = [value for i, row in enumerate(values) for j, value in enumerate(row) if i != j and value]
        unit = _unit(cells) if kind is LinkKind.NVLINK else 0
        rates = {place: sum(values[k][s] for s in switches) for k, place in enumerate(at) if place is not None}
        for place, total in rates.items():
            switch[place] = max(switch[place], total // unit if unit else 0)
            fabric = fabric or ("nvlink" if total and kind is LinkKind.NVLINK else "")
        for k, i in enumerate(at):
            for m, j in enumerate(at):
                if i is None or j is None or i == j:
                    continue
                rate = values[k][m] or min(rates[i], rates[j])
                if rate:
                    found[i][j] = Link(kind, rate // unit if unit else 1, rate / 1000)
    return fabric


def _values(matrix: Element, root: Element) -> tuple[list[str], list[list[int]]]:
    """The numbers (gp_index) of the objects of a matrix, and its rows in MB/s."""
    try:
        n = int(matrix.get("nbobjs", ""))
        words = " ".join(part.text or "" for part in matrix.findall("indexes")).split()
        flat = [int(word) for part in matrix.findall("u64values") for word in (part.text or "").split()]
    except ValueError as error:
        raise CaptureError(f"matrix {matrix.get('name')} of the XML cannot be read: {error}") from error
    if len(words) != n or len(flat) != n * n:
        raise CaptureError(
            f"matrix {matrix.get('name')} has {len(words)} objects and {len(flat)} values, not {n} x {n}"
        )
    ends = [word.rpartition(":")[2] for word in words]
    if matrix.get("indexing") == "os":
        kind = matrix.get("type")
        by_os = {e.get("os_index"): e.get("gp_index", "") for e in root.iter("object") if e.get("type") == kind}
        ends = [by_os.get(end, "") for end in ends]
    return ends, [flat[n * k : n * (k + 1)] for k in range(n)]


def _is_switch(root: Element, number: str) -> bool:
    element = next((e for e in root.iter("object") if e.get("gp_index") == number), None)
    return element is not None and (
        element.get("subtype") == "NVSwitch" or element.get("pci_type", "").startswith("0680 [10de:")
    )


def _unit(cells: Sequence[int]) -> int:
    """MB/s of one NVLink."""
    common = gcd(*cells) if cells else 1
    return next((unit for unit in _LINK_UNITS if common % unit == 0), common)


def _without_backend(gpu: _Gpu) -> str | None:
    """Vendor of a GPU that no backend with links has named."""
    if any(_GPU.match(place.name) and not place.name.startswith("cuda") for place in gpu.names):
        return None
    match = re.search(r"\[([0-9a-f]{4}):", gpu.place.element.get("pci_type", ""))
    return _VENDORS.get(match[1]) if match else None


def _ports(places: Sequence[_Place]) -> list[_Place]:
    """Ports of InfiniBand and its kin, by name."""
    ports = [place for place in places if place.element.get("type") == "OSDev" and _is_port(place.element)]
    return sorted(ports, key=lambda place: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", place.name)])


def _is_port(element: Element) -> bool:
    kind = element.get("osdev_type", "")
    return bool(re.match(r"mlx|hfi|efa|rdmap|bnxt_re|irdma|ib", element.get("name", ""))) and kind in (
        str(_OPENFABRICS_2),
        str(_OPENFABRICS_3),
    )


def _host(root: Element) -> str:
    infos: Mapping[str, str] = {info.get("name", ""): info.get("value", "") for info in root.iter("info")}
    return infos.get("HostName", "").split(".")[0]


def _bits(text: str | None) -> list[int]:
    """Set bits of "0x00000003,,0x1": 32-bit words, highest first, empty for zero; none for an endless set."""
    if not text or "..." in text:
        return []
    value = 0
    for word in text.split(","):
        value = value << 32 | (int(word, 16) if word else 0)
    return [bit for bit in range(value.bit_length()) if value >> bit & 1]
