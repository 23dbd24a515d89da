"""What the Linux kernel tells of PCI devices and NUMA nodes, and the notation of its lists.

It is: small readers of /sys with the root as argument. It is not: a probe. A missing file is None or empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

SYS = Path("/sys")


def numa_node_of(bus_id: str, root: Path = SYS) -> str | None:
    """NUMA node of a PCI device ("domain:bus:device.function"); None when the firmware does not tell."""
    domain, _, rest = bus_id.lower().partition(":")
    text = _read(root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node")
    return text if text and text.isdigit() else None


def cpu_counts(root: Path = SYS) -> tuple[int, ...]:
    """CPUs of each NUMA node that has any, by number; empty when the system has no NUMA information."""
    nodes = (path for path in (root / "devices/system/node").glob("node*") if re.fullmatch(r"node\d+", path.name))
    counts = [len(parse_list(_read(path / "cpulist"))) for path in sorted(nodes, key=lambda p: int(p.name[4:]))]
    return tuple(count for count in counts if count)


def parse_list(text: str | None) -> list[int]:
    """ "0-2,8" -> [0, 1, 2, 8]."""
    found: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def format_list(numbers: Iterable[int]) -> str | None:
    """[0, 1, 2, 8] -> "0-2,8"; None for nothing."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or None


def bits(words: Iterable[int]) -> list[int]:
    """Numbers of the set bits in 64-bit words, lowest word first."""
    return [64 * k + bit for k, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
