"""AMD's management library: the kind of every link, its bandwidth, NUMA nodes.

It is: calls of the Python package `amdsmi` turned into a node. It is not: a parser of `rocm-smi` (`text.py`).

Names of link types are looked up, never their numbers: those differ between releases. Partitions of one GPU (CPX)
reach each other inside the package, which counts as XGMI.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from parallax.plugins.topology.description import Device, Link, LinkKind, Node, fabric_of
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.probes.base import Probe, ProbeError, host_name, machine_id
from parallax.plugins.topology.probes.text import AmdProbe
from parallax.plugins.topology.probes.visible import only_visible
from parallax.plugins.topology.text.links import reconcile

_KINDS = {"XGMI": LinkKind.XGMI, "INTERNAL": LinkKind.XGMI, "PCIE": LinkKind.PCIE}


class AmdSmiProbe(Probe):
    """AMD GPUs by the library.

    Args:
        environ: what hides GPUs.
        sys_root: where /sys is.
    """

    name: ClassVar[str] = "amdsmi"
    priority: ClassVar[int] = 95

    def __init__(self, environ: Mapping[str, str] = os.environ, sys_root: Path = sysfs.SYS) -> None:
        self._environ = environ
        self._sys = sys_root

    def problem(self) -> str | None:
        """See `Probe`."""
        try:
            smi = _load()
        except ProbeError as error:
            return str(error)
        try:
            return None if smi.amdsmi_get_processor_handles() else "the driver runs, but no GPU is visible"
        except smi.AmdSmiException as error:
            return f"AMD SMI failed: {_words(error)}"
        finally:
            smi.amdsmi_shut_down()

    def probe(self) -> Node:
        """See `Probe`."""
        smi = _load()
        try:
            return only_visible(self._read(smi), self._environ, AmdProbe.visible)
        except smi.AmdSmiException as error:
            raise ProbeError(f"AMD SMI failed: {_words(error)}") from error
        finally:
            smi.amdsmi_shut_down()

    def _read(self, smi: Any) -> Node:
        handles = smi.amdsmi_get_processor_handles()
        if not handles:
            raise ProbeError("the driver runs, but no GPU is visible to this process (container or cgroup limits?)")
        devices = [self._device(smi, handle, i) for i, handle in enumerate(handles)]
        notes: list[str] = []
        raw = [[_link(smi, a, b, (i, j), notes) if i != j else None for j, b in enumerate(handles)]
               for i, a in enumerate(handles)]  # fmt: skip
        links, differing = reconcile(raw, [f"GPU{device.index}" for device in devices])
        notes.extend(differing)
        untold = any(link is not None and link.kind is LinkKind.UNKNOWN for row in links for link in row)
        return Node(
            host=host_name(),
            devices=tuple(devices),
            links=links,
            fabric=fabric_of(links),
            source=self.name,
            complete=not untold,
            notes=tuple(dict.fromkeys(notes)),
            machine=machine_id(),
            cpus=sysfs.cpu_counts(self._sys),
        )

    def _device(self, smi: Any, handle: Any, index: int) -> Device:
        bus = str(smi.amdsmi_get_gpu_device_bdf(handle)).lower()
        numa = _ask(smi, smi.amdsmi_get_gpu_topo_numa_affinity, handle, default=-1)
        info = _ask(smi, smi.amdsmi_get_gpu_asic_info, handle, default={})
        return Device(
            index=index,
            name=str(info.get("market_name") or f"GPU{index}"),
            uuid=_ask(smi, smi.amdsmi_get_gpu_device_uuid, handle, default=None) or None,
            bus_id=bus,
            numa=str(numa) if numa >= 0 else sysfs.numa_node_of(bus, self._sys),
        )


def _load() -> Any:
    """The package, initialised.

    Raises:
        ProbeError: it or ROCm's library is missing, the two are of different versions, or there is no driver.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):  # it prints what it does not find
            import amdsmi
    except ImportError as error:
        raise ProbeError("amdsmi is not installed: pip install the version of your ROCm") from error
    except (KeyError, OSError) as error:
        raise ProbeError("libamd_smi.so is not here: there is no ROCm (ROCM_PATH names another place)") from error
    except AttributeError as error:
        raise ProbeError(
            f"libamd_smi.so is older than the package amdsmi: pip install ROCm's version ({error})"
        ) from error
    try:
        amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
    except amdsmi.AmdSmiException as error:
        raise ProbeError(f"AMD SMI does not start (is the amdgpu driver loaded?): {_words(error)}") from error
    return amdsmi


def _link(smi: Any, a: Any, b: Any, pair: tuple[int, int], notes: list[str]) -> Link:
    told = _ask(smi, smi.amdsmi_topo_get_link_type, a, b, default=None)
    names = {int(kind): kind.name.rpartition("_")[2] for kind in smi.AmdSmiLinkType}
    kind = LinkKind.UNKNOWN if told is None else _KINDS.get(names.get(int(told["type"]), ""), LinkKind.UNKNOWN)
    if kind is LinkKind.UNKNOWN:
        notes.append(f"the link of GPU {min(pair)} and GPU {max(pair)} is not told")
    if not kind.is_link:
        return Link(kind)
    if not _ask(smi, smi.amdsmi_is_P2P_accessible, a, b, default=True):
        notes.append(f"GPU {min(pair)} and GPU {max(pair)} have XGMI, but the driver reports no peer access over it")
        return Link(LinkKind.PCIE)
    speeds = _ask(smi, smi.amdsmi_get_minmax_bandwidth_between_processors, a, b, default={})
    fastest = int(speeds.get("max_bandwidth", 0))
    return Link(kind, 1, fastest / 1000 if fastest else None)


def _ask(smi: Any, function: Callable[..., Any], *arguments: Any, default: Any) -> Any:
    """What `function` tells, `default` where this GPU, driver or right does not let it tell."""
    silent: Sequence[int] = [
        getattr(smi.amdsmi_wrapper, f"AMDSMI_STATUS_{name}")
        for name in ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "NO_DATA", "INVAL", "UNEXPECTED_DATA")
    ]
    try:
        return function(*arguments)
    except smi.AmdSmiLibraryException as error:
        if error.get_error_code() in silent:
            return default
        raise


def _words(error: Exception) -> str:
    return " ".join(str(error).split())
