"""What every probe offers, and how one is chosen.

It is: the contract of the entry-point group `parallax.probes` and `find_probe`. It is not: a probe. A probe looks at
the machine only inside `detect` and `probe`; the planner works on what it returned.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from parallax.plugins import registry
from parallax.plugins.topology.description import Node

GROUP = "parallax.probes"


class ProbeError(ValueError):
    """A probe cannot describe this machine; the message says why and what would help."""


class Probe(ABC):
    """Describes the machine it runs on. Made without arguments.

    Attributes:
        name: as its entry point.
        priority: of those that can work here the highest is used; ties go to the first by name.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0

    @abstractmethod
    def problem(self) -> str | None:
        """Why it cannot work here, None when it can. Must not raise."""

    def detect(self) -> bool:
        """Whether it can work here."""
        return self.problem() is None

    @abstractmethod
    def probe(self) -> Node:
        """The node as this process sees it.

        Raises:
            ProbeError: it cannot.
        """


def find_probe(name: str | None = None) -> Probe:
    """The probe called `name`, or the one of highest priority that works here.

    Raises:
        ValueError: no such probe.
        ProbeError: none works here; every reason is in the message.
    """
    if name is not None:
        return _make(name)
    probes = [_make(plugin.name) for plugin in registry.available(GROUP) if plugin.error is None]
    reasons = []
    for probe in sorted(probes, key=lambda p: (-p.priority, p.name)):
        problem = probe.problem()
        if problem is None:
            return probe
        reasons.append(f"{probe.name}: {problem}")
    raise ProbeError("no probe works here: " + "; ".join(reasons))


def probe_node(name: str | None = None) -> Node:
    """This machine's node by `find_probe`."""
    return find_probe(name).probe()


def host_name() -> str:
    """This machine's host name, without its domain."""
    return socket.gethostname().split(".")[0]


def machine_id(proc: Path = Path("/proc")) -> str:
    """Identity of the running system: its boot id; empty where the system has none."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _make(name: str) -> Probe:
    made = registry.load(GROUP, name)()
    if not isinstance(made, Probe):
        raise ProbeError(f"the entry point {name!r} of {GROUP} makes a {type(made).__name__}, not a Probe")
    return made
