"""A machine without GPUs: its NUMA nodes and CPUs.

It is: the last resort, so that ranks on CPUs are still grouped by host. It is not: a description of caches or cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.probes.base import Probe, host_name, machine_id


class CpuProbe(Probe):
    """Works everywhere; used where nothing else does.

    Args:
        sys_root: where /sys is.
    """

    name: ClassVar[str] = "cpu"
    priority: ClassVar[int] = -100

    def __init__(self, sys_root: Path = sysfs.SYS) -> None:
        self._sys = sys_root

    def problem(self) -> str | None:
        """See `Probe`."""
        return None

    def probe(self) -> Node:
        """See `Probe`."""
        cpus = sysfs.cpu_counts(self._sys) or (os.cpu_count() or 1,)
        return Node(host_name(), (), (), fabric="none", source=self.name, machine=machine_id(), cpus=cpus)
