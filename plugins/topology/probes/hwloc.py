"""hwloc, through its `lstopo`: any vendor's GPUs in the tree of PCI bridges, with the links its backends know.

It is: running the tool; for machines without a vendor's own tool or library. It is not: the reader of its XML
(`parallax.plugins.topology.text.hwloc`), which also reads saved files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.probes.base import Probe, ProbeError, host_name, machine_id
from parallax.plugins.topology.probes.text import run_tool
from parallax.plugins.topology.probes.visible import only_visible
from parallax.plugins.topology.text import CaptureError
from parallax.plugins.topology.text.hwloc import read_hwloc

TOOLS = ("lstopo-no-graphics", "lstopo", "hwloc-ls")
HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


class HwlocProbe(Probe):
    """GPUs that hwloc sees.

    Args:
        environ: PATH, and what hides GPUs.
        sys_root: where /sys is.
    """

    name: ClassVar[str] = "hwloc"
    priority: ClassVar[int] = 20

    def __init__(self, environ: Mapping[str, str] = os.environ, sys_root: Path = sysfs.SYS) -> None:
        self._environ = environ
        self._sys = sys_root

    def problem(self) -> str | None:
        """See `Probe`."""
        try:
            return None if self._read().devices else "hwloc sees no GPU here"
        except ProbeError as error:
            return str(error)

    def probe(self) -> Node:
        """See `Probe`."""
        node = self._read()
        return only_visible(node, self._environ, HIDING)

    def _read(self) -> Node:
        tool = next((tool for tool in TOOLS if shutil.which(tool, path=self._environ.get("PATH"))), None)
        if tool is None:
            raise ProbeError(f"none of {', '.join(TOOLS)} is installed (package hwloc)")
        command = (tool, "--of", "xml", "--whole-io")
        try:
            node = read_hwloc(run_tool(command, self._environ), host_name())
        except CaptureError as error:
            raise ProbeError(f"`{' '.join(command)}`: {error}") from error
        cpus = sysfs.cpu_counts(self._sys) or node.cpus
        return replace(node, source=self.name, machine=machine_id(), cpus=cpus)
