"""NVIDIA's management library: every NVLink and where it ends, PCIe paths, NUMA, the fabric clique.

It is: calls of `pynvml` turned into a node. It is not: a parser of `nvidia-smi` (`text.py`).

Rules that the calls alone do not give:
- Links that end at an NVSwitch say nothing of the GPU behind it. GPUs of one host that both have such links reach each
  other, unless the driver reports that peer access over NVLink is off for the pair.
- The fabric's domain is believed as NCCL does (mnnvl.cc): state complete and a cluster UUID that is not all zeros.
- A GPU that is cut into MIG instances has no peer access: its links do not count.
- NVML numbers GPUs by PCI address; CUDA_VISIBLE_DEVICES is applied to that order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from parallax.plugins.topology.description import Device, Link, LinkKind, Node, fabric_of
from parallax.plugins.topology.probes import sysfs
from parallax.plugins.topology.probes.base import Probe, ProbeError, host_name, machine_id
from parallax.plugins.topology.probes.visible import only_visible

INSTALL = "pip install 'lightning-parallax[topology]'"
_WORDS = 64
"""64-bit words asked for in affinity masks: 4096 CPUs or NUMA nodes."""


@dataclass
class _Gpu:
    """One GPU while its links are being counted.

    Attributes:
        handle: NVML's.
        device: what is known of it without its links.
        peers: PCI address of a GPU -> links that end there.
        switch: links that end at a switch.
        rate: GB/s of one link, one way; None when not told.
        mig: whether it is cut into instances.
    """

    handle: Any
    device: Device
    peers: Counter[str] = field(default_factory=Counter)
    switch: int = 0
    rate: float | None = None
    mig: bool = False


class NvmlProbe(Probe):
    """NVIDIA GPUs by NVML.

    Args:
        environ: where CUDA_VISIBLE_DEVICES is looked up.
        sys_root: where /sys is.
    """

    name: ClassVar[str] = "nvml"
    priority: ClassVar[int] = 100

    def __init__(self, environ: Mapping[str, str] = os.environ, sys_root: Path = sysfs.SYS) -> None:
        self._environ = environ
        self._sys = sys_root

    def problem(self) -> str | None:
        """See `Probe`."""
        try:
            nvml = _load()
        except ProbeError as error:
            return str(error)
        try:
            return None if nvml.nvmlDeviceGetCount() else "the driver runs, but no GPU is visible to this process"
        finally:
            nvml.nvmlShutdown()

    def probe(self) -> Node:
        """See `Probe`."""
        nvml = _load()
        try:
            return only_visible(self._read(nvml), self._environ, ["CUDA_VISIBLE_DEVICES"])
        except nvml.NVMLError as error:
            raise ProbeError(f"NVML failed: {error}") from error
        finally:
            nvml.nvmlShutdown()

    def _read(self, nvml: Any) -> Node:
        gpus = [self._gpu(nvml, i) for i in range(nvml.nvmlDeviceGetCount())]
        if not gpus:
            raise ProbeError("the driver runs, but no GPU is visible to this process (container or cgroup limits?)")
        notes: list[str] = []
        links = [
            [_link(nvml, gpus, i, j, notes) if i != j else None for j in range(len(gpus))] for i in range(len(gpus))
        ]
        for gpu in gpus:
            if gpu.mig:
                notes.append(f"GPU {gpu.device.index} is cut into MIG instances: it has no peer access")
        switched = [gpu.switch for gpu in gpus if gpu.switch]
        if len(set(switched)) > 1:
            fewer = [str(gpu.device.index) for gpu in gpus if 0 < gpu.switch < max(switched)]
            notes.append(
                f"GPU {', '.join(fewer)} has fewer than {max(switched)} active links to the switch: some are down"
            )
        if len({gpu.device.name for gpu in gpus}) > 1 and self._environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            notes.append("GPUs of several models: set CUDA_DEVICE_ORDER=PCI_BUS_ID so that CUDA numbers them as here")
        return Node(
            host=host_name(),
            devices=tuple(gpu.device for gpu in gpus),
            links=tuple(map(tuple, links)),
            fabric="nvlink" if any(gpu.device.domain_key or gpu.switch for gpu in gpus) else fabric_of(links),
            source=self.name,
            notes=tuple(dict.fromkeys(notes)),
            machine=machine_id(),
            cpus=sysfs.cpu_counts(self._sys),
        )

    def _gpu(self, nvml: Any, index: int) -> _Gpu:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        ask = _Asker(nvml)
        bus = _bus(nvml.nvmlDeviceGetPciInfo(handle))
        mig = ask(nvml.nvmlDeviceGetMigMode, handle, default=[0, 0])[0] == 1
        peers, switch = ({}, 0) if mig else _count_links(nvml, ask, handle)
        nodes = ask(nvml.nvmlDeviceGetMemoryAffinity, handle, _WORDS, nvml.NVML_AFFINITY_SCOPE_NODE, default=())
        cpus = ask(nvml.nvmlDeviceGetCpuAffinityWithinScope, handle, _WORDS, nvml.NVML_AFFINITY_SCOPE_NODE, default=())
        device = Device(
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            bus_id=bus,
            numa=sysfs.format_list(sysfs.bits(nodes)) or sysfs.numa_node_of(bus, self._sys),
            cpus=sysfs.format_list(sysfs.bits(cpus)),
            domain_key=None if mig else _domain(nvml, ask, handle),
            switch_links=switch,
        )
        return _Gpu(handle, device, Counter(peers), switch, _rate(nvml, ask, handle), mig)


class _Asker:
    """Calls NVML and turns "not supported here" into a default; any other error is raised."""

    def __init__(self, nvml: Any) -> None:
        missing = (
            "NOT_SUPPORTED",
            "FUNCTION_NOT_FOUND",
            "INVALID_ARGUMENT",
            "ARGUMENT_VERSION_MISMATCH",
            "NO_PERMISSION",
        )
        self._error = nvml.NVMLError
        self._missing = {getattr(nvml, f"NVML_ERROR_{name}", None) for name in missing}

    def __call__(self, function: Callable[..., Any], *arguments: Any, default: Any) -> Any:
        try:
            return function(*arguments)
        except self._error as error:
            if error.value in self._missing:
                return default
            raise


def _load() -> Any:
    """pynvml, initialised.

    Raises:
        ProbeError: it is not installed, or there is no driver to talk to.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ProbeError(f"nvidia-ml-py is not installed: {INSTALL}") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ProbeError(_why(pynvml, error)) from error
    return pynvml


def _why(nvml: Any, error: Any) -> str:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return (
            "libnvidia-ml.so.1 is not here: there is no NVIDIA driver, or the container was started without it "
            "(--gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
    if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver and libnvidia-ml.so.1 are of different versions: reboot, or rebuild the container"
    return f"NVML does not start: {error}"


def _count_links(nvml: Any, ask: _Asker, handle: Any) -> tuple[Counter[str], int]:
    """Active links by the PCI address of the GPU at the other end, and those that end at a switch."""
    peers: Counter[str] = Counter()
    switch = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not ask(nvml.nvmlDeviceGetNvLinkState, handle, link, default=0):
            continue
        kind = ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, default=nvml.NVML_NVLINK_DEVICE_TYPE_GPU)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            switch += 1
        elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            remote = ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, default=None)
            if remote is not None:
                peers[_bus(remote)] += 1
    if not peers and not switch:
        switch = _field(nvml, ask, handle, nvml.NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT) or 0
    return peers, switch


def _link(nvml: Any, gpus: Sequence[_Gpu], i: int, j: int, notes: list[str]) -> Link:
    """Best path from `gpus[i]` to `gpus[j]`."""
    a, b = gpus[i], gpus[j]
    there, back = a.peers[b.device.bus_id or ""], b.peers[a.device.bus_id or ""]
    if there != back and i < j:
        notes.append(
            f"GPU {i} has {there} NVLinks to GPU {j}, but {back} lead back: the fewer are taken; some are down"
        )
    direct = min(there, back)
    count = direct or min(a.switch, b.switch)
    if count:
        ask = _Asker(nvml)
        capability = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = ask(nvml.nvmlDeviceGetP2PStatus, a.handle, b.handle, capability, default=nvml.NVML_P2P_STATUS_OK)
        if status == nvml.NVML_P2P_STATUS_OK:
            rates = [gpu.rate for gpu in (a, b) if gpu.rate]
            return Link(LinkKind.NVLINK, count, count * min(rates) if rates else None)
        pair = f"GPU {min(i, j)} and GPU {max(i, j)}"
        notes.append(f"{pair} have NVLinks, but the driver reports no peer access over them (fabric manager?)")
    return Link(_pci_path(nvml, a, b))


def _pci_path(nvml: Any, a: _Gpu, b: _Gpu) -> LinkKind:
    ask = _Asker(nvml)
    level = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, a.handle, b.handle, default=None)
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
        nvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
        nvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
        nvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
        nvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
    }.get(level, LinkKind.UNKNOWN)


def _domain(nvml: Any, ask: _Asker, handle: Any) -> str | None:
    """ "clusterUuid/cliqueId" of a completed multi-node fabric."""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if ask(nvml.nvmlDeviceGetGpuFabricInfoV, handle, byref(info), default=None) is None:
        return None
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return None
    text = cluster.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}/{info.cliqueId}"


def _rate(nvml: Any, ask: _Asker, handle: Any) -> float | None:
    """GB/s of one NVLink, one way."""
    speed = _field(nvml, ask, handle, nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON)
    return speed / 1000 if speed else None


def _field(nvml: Any, ask: _Asker, handle: Any, number: int) -> int | None:
    values = ask(nvml.nvmlDeviceGetFieldValues, handle, [number], default=None)
    if values is None or values[0].nvmlReturn != nvml.NVML_SUCCESS:
        return None
    return int(values[0].value.uiVal)


def _bus(pci: Any) -> str:
    return _text(pci.busId).lower()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
