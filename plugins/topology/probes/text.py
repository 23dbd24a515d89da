"""Probes that read what a vendor's tool prints: NVIDIA's, AMD's, Intel's, or a saved capture of any of them.

It is: running the tool and handing its text to the parsers. It is not: a parser (`parallax.plugins.topology.text`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from parallax.plugins.topology.description import Node
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.probes.base import Probe, ProbeError, host_name, machine_id
from parallax.plugins.topology.probes.visible import only_in_mask, only_visible
from parallax.plugins.topology.text import CaptureError, read_node

SECONDS = 60.0
"""How long a tool may take; on a node with a failing GPU they can hang."""


class ToolProbe(Probe):
    """Runs the first of its tools that is installed.

    Attributes:
        commands: command lines, in order of preference.
        visible: variables that hide GPUs from the user's process but not from the tool.
    """

    commands: ClassVar[Sequence[Sequence[str]]] = ()
    visible: ClassVar[Sequence[str]] = ()

    def __init__(self, environ: Mapping[str, str] = os.environ, sys_root: Path = sysfs.SYS) -> None:
        self._environ = environ
        self._sys = sys_root

    def problem(self) -> str | None:
        """See `Probe`: only whether the tool is there."""
        if self._command() is None:
            return f"none of {', '.join(sorted({command[0] for command in self.commands}))} is installed"
        return None

    def probe(self) -> Node:
        """See `Probe`."""
        command = self._command()
        if command is None:
            raise ProbeError(str(self.problem()))
        try:
            node = read_node(run_tool(command, self._environ), host_name())
        except CaptureError as error:
            raise ProbeError(f"`{' '.join(command)}`: {error}") from error
        node = replace(
            self.identify(node),
            source=self.name,
            machine=machine_id(),
            cpus=sysfs.cpu_counts(self._sys),
        )
        return self.hide(node, self._environ)

    def hide(self, node: Node, environ: Mapping[str, str]) -> Node:
        """`node` without the GPUs that `environ` hides from the user's process."""
        return only_visible(node, environ, self.visible)

    def identify(self, node: Node) -> Node:
        """`node` with what another call of the tool tells of its devices."""
        return node

    def _command(self) -> Sequence[str] | None:
        path = self._environ.get("PATH")
        return next((command for command in self.commands if shutil.which(command[0], path=path)), None)


class NvidiaSmiProbe(ToolProbe):
    """`nvidia-smi topo -m`, for machines with the tool but without nvidia-ml-py."""

    name: ClassVar[str] = "text"
    priority: ClassVar[int] = 50
    commands: ClassVar[Sequence[Sequence[str]]] = (("nvidia-smi", "topo", "-m"),)
    visible: ClassVar[Sequence[str]] = ("CUDA_VISIBLE_DEVICES",)

    def identify(self, node: Node) -> Node:
        """UUID and PCI address, which tell GPUs apart where every process sees its own as GPU 0."""
        query = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
        try:
            lines = run_tool(query, self._environ).strip().split("\n")
        except ProbeError:
            return node
        rows = {row[0].strip(): row for row in (line.split(",") for line in lines) if len(row) == 3}
        found = [
            replace(device, uuid=row[1].strip(), bus_id=row[2].strip().lower())
            for device in node.devices
            if (row := rows.get(str(device.index))) is not None
        ]
        return replace(node, devices=tuple(found)) if len(found) == len(node.devices) else node


class AmdProbe(ToolProbe):
    """AMD GPUs by `amd-smi` or `rocm-smi`."""

    name: ClassVar[str] = "amd"
    priority: ClassVar[int] = 90
    commands: ClassVar[Sequence[Sequence[str]]] = (("rocm-smi", "--showtopo"), ("amd-smi", "topology"))
    visible: ClassVar[Sequence[str]] = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class IntelProbe(ToolProbe):
    """Intel GPUs by XPU Manager; ZE_AFFINITY_MASK is applied as Level Zero does (`visible.py`)."""

    name: ClassVar[str] = "intel"
    priority: ClassVar[int] = 80
    commands: ClassVar[Sequence[Sequence[str]]] = (("xpu-smi", "topology", "-m"), ("xpumcli", "topology", "-m"))

    def hide(self, node: Node, environ: Mapping[str, str]) -> Node:
        """See `ToolProbe`."""
        return only_in_mask(node, environ)


class CaptureProbe(Probe):
    """A saved text in place of this machine.

    Args:
        path: the file.
        host: host name of the machine it was made on.
    """

    name: ClassVar[str] = "capture"

    def __init__(self, path: Path, host: str = "") -> None:
        self._path = path
        self._host = host

    def problem(self) -> str | None:
        """See `Probe`."""
        return None if self._path.is_file() else f"there is no file {self._path}"

    def probe(self) -> Node:
        """See `Probe`."""
        problem = self.problem()
        if problem:
            raise ProbeError(problem)
        try:
            return read_node(self._path.read_text(errors="replace"), self._host or self._path.stem)
        except CaptureError as error:
            raise ProbeError(f"{self._path}: {error}") from error


def run_tool(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What `command` prints.

    Raises:
        ProbeError: it fails, or takes longer than `SECONDS`.
    """
    line = " ".join(command)
    path = shutil.which(command[0], path=environ.get("PATH"))
    try:
        done = subprocess.run(
            [path or command[0], *command[1:]], capture_output=True, text=True, errors="replace", timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"`{line}` could not be run: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ProbeError(f"`{line}` ended with status {done.returncode} and said: {said}")
    return done.stdout
