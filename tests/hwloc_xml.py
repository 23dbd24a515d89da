"""XML as hwloc writes it, for machines made by hand: small trees of NUMA nodes, PCI bridges, GPUs and switches.

It is: the parts of the format that a reader of GPUs needs. It is not: recorded from hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NVSWITCH = 'subtype="NVSwitch" pci_type="0680 [10de:1ac2] [0000:0000] a1 00"'


@dataclass
class Machine:
    """A machine with `sockets` NUMA nodes of four CPUs each.

    Attributes:
        sockets: how many.
        version: of the XML.
        trees: what hangs below the host bridges of each socket.
        tail: matrices and other elements after the tree.
    """

    sockets: int = 2
    version: str = "2.0"
    trees: dict[int, list[str]] = field(default_factory=dict)
    tail: list[str] = field(default_factory=list)

    def hang(self, socket: int, *parts: str) -> Machine:
        """One host bridge with `parts` below it."""
        inside = "".join(parts)
        self.trees.setdefault(socket, []).append(f'<object type="Bridge" bridge_type="0-1" depth="0">{inside}</object>')
        return self

    def matrix(self, name: str, ends: Sequence[str], rows: Sequence[Sequence[int]]) -> Machine:
        """A matrix over objects of several types, cut into lines of ten as hwloc does."""
        words, values = list(ends), [str(value) for row in rows for value in row]
        lines = [f"<indexes>{' '.join(words[k : k + 10])} </indexes>" for k in range(0, len(words), 10)]
        lines += [f"<u64values>{' '.join(values[k : k + 10])} </u64values>" for k in range(0, len(values), 10)]
        self.tail.append(f'<distances2hetero nbobjs="{len(ends)}" kind="25" name="{name}">{"".join(lines)}')
        self.tail.append("</distances2hetero>")
        return self

    def xml(self) -> str:
        """The file."""
        packages = ""
        for k in range(self.sockets):
            sets = f'cpuset="0x{15 << 4 * k:08x}" nodeset="0x{1 << k:08x}"'
            packages += (
                f'<object type="Package" os_index="{k}" {sets} gp_index="{900 + k}">'
                f'<object type="NUMANode" os_index="{k}" {sets} gp_index="{910 + k}"/>{"".join(self.trees.get(k, []))}'
                "</object>"
            )
        whole = f'cpuset="0x{(1 << 4 * self.sockets) - 1:08x}" nodeset="0x{(1 << self.sockets) - 1:08x}"'
        return (
            '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
            f'<topology version="{self.version}"><object type="Machine" os_index="0" {whole} gp_index="1">'
            f'<info name="HostName" value="box.example.org"/>{packages}</object>{"".join(self.tail)}</topology>\n'
        )


def bridge(*parts: str) -> str:
    """A PCI bridge."""
    return f'<object type="Bridge" bridge_type="1-1">{"".join(parts)}</object>'


def pci(number: int, kind: str, *parts: str) -> str:
    """A PCI device of gp_index 100 + `number`; `kind` are further attributes."""
    return (
        f'<object type="PCIDev" gp_index="{100 + number}" pci_busid="0000:{number + 16:02x}:00.0" {kind}>'
        f"{''.join(parts)}</object>"
    )


def osdev(number: int, name: str, infos: Mapping[str, str] | None = None, kind: int = 1) -> str:
    """What a backend of hwloc adds to a device; its gp_index is `number`."""
    inside = "".join(f'<info name="{key}" value="{value}"/>' for key, value in (infos or {}).items())
    return f'<object type="OSDev" gp_index="{number}" name="{name}" osdev_type="{kind}">{inside}</object>'


def gpu(number: int, name: str = "nvml", vendor: str = "10de") -> str:
    """A GPU with one backend's name, such as nvml3, of gp_index 200 + `number`; without a name if that is empty."""
    infos = {"GPUModel": "Made-up GPU", "NVIDIAUUID": f"GPU-{number}"}
    parts = [osdev(200 + number, f"{name}{number}", infos)] if name else []
    return pci(number, f'pci_type="0302 [{vendor}:1db8] [{vendor}:131d] a1 00"', *parts)


def port(number: int, name: str) -> str:
    """An InfiniBand port."""
    return pci(number, 'pci_type="0207 [15b3:1017] [15b3:0007] 00 00"', osdev(300 + number, name, kind=3))
