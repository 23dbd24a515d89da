"""The C library behind pynvml, replaced by a description of a machine.

It is: what `libnvidia-ml.so.1` would write into pynvml's structures, so that pynvml's own wrappers, versions and error
codes run. It is not: recorded from hardware; the machines described with it are made by hand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU.

    Attributes:
        bus: its PCI address.
        links: for each active NVLink the PCI address at the other end, or "switch".
        numa, cpus: set bits of its affinity masks.
        cluster, clique, state: of the fabric.
        mig: whether it is cut into instances.
        name: model.
        speed: MB/s of one link.
    """

    bus: str
    links: Sequence[str] = ()
    numa: Sequence[int] = (0,)
    cpus: Sequence[int] = (0, 1, 2, 3)
    cluster: bytes = bytes(16)
    clique: int = 0
    state: int = 0
    mig: bool = False
    name: str = "Made-up GPU"
    speed: int = 25000


@dataclass
class FakeLib:
    """Stands in for the loaded library.

    Attributes:
        gpus: by NVML's index.
        level: common ancestor of two GPUs by index.
        p2p: peer status over NVLink of two GPUs by index.
        without: functions that an older driver lacks.
        start: what initialisation returns.
    """

    gpus: list[FakeGpu]
    level: Callable[[int, int], int] = lambda i, j: pynvml.NVML_TOPOLOGY_SYSTEM
    p2p: Callable[[int, int], int] = lambda i, j: pynvml.NVML_P2P_STATUS_OK
    without: frozenset[str] = frozenset()
    start: int = pynvml.NVML_SUCCESS
    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__") or name in self.without:
            raise AttributeError(name)
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            result: int = function(self, *arguments)
            return result

        return call

    def _gpu(self, handle: Any) -> FakeGpu:
        return self.gpus[ctypes.cast(handle, ctypes.c_void_p).value - 1]

    def _index(self, handle: Any) -> int:
        return ctypes.cast(handle, ctypes.c_void_p).value - 1

    def _nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802 - the library's name
        return self.start

    def _nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def _nvmlErrorString(self, code: int) -> bytes:  # noqa: N802
        return f"error {code}".encode()

    def _nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = index.value + 1
        return 0

    def _nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = self._gpu(handle).name.encode()
        return 0

    def _nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = f"GPU-{self._index(handle):08x}-0000".encode()
        return 0

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:  # noqa: N802
        pci._obj.busId = self._gpu(handle).bus.encode()
        return 0

    def _nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:  # noqa: N802
        current._obj.value = pending._obj.value = int(self._gpu(handle).mig)
        return 0

    def _nvmlDeviceGetMemoryAffinity(self, handle: Any, size: int, words: Any, scope: Any) -> int:  # noqa: N802
        return self._bits(self._gpu(handle).numa, words)

    def _nvmlDeviceGetCpuAffinityWithinScope(self, handle: Any, size: int, words: Any, scope: Any) -> int:  # noqa: N802
        return self._bits(self._gpu(handle).cpus, words)

    @staticmethod
    def _bits(numbers: Sequence[int], words: Any) -> int:
        for number in numbers:
            words._obj[number // 64] |= 1 << (number % 64)
        return 0

    def _nvmlDeviceGetNvLinkState(self, handle: Any, link: int, active: Any) -> int:  # noqa: N802
        links = self._gpu(handle).links
        if not links:
            return int(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= 18:
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        active._obj.value = int(link < len(links))
        return 0

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int, kind: Any) -> int:  # noqa: N802
        switch = self._gpu(handle).links[link] == "switch"
        kind._obj.value = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        return 0

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: int, pci: Any) -> int:  # noqa: N802
        pci._obj.busId = self._gpu(handle).links[link].encode()
        return 0

    def _nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:  # noqa: N802
        for value in values._obj:
            known = value.fieldId == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
            value.nvmlReturn = 0 if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            value.value.uiVal = self._gpu(handle).speed if known else 0
        return 0

    def _nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any, level: Any) -> int:  # noqa: N802
        level._obj.value = self.level(self._index(a), self._index(b))
        return 0

    def _nvmlDeviceGetP2PStatus(self, a: Any, b: Any, what: int, status: Any) -> int:  # noqa: N802
        assert what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        status._obj.value = self.p2p(self._index(a), self._index(b))
        return 0

    def _nvmlDeviceGetGpuFabricInfoV(self, handle: Any, info: Any) -> int:  # noqa: N802
        gpu = self._gpu(handle)
        if info._obj.version != pynvml.nvmlGpuFabricInfo_v2:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        for k, byte in enumerate(gpu.cluster):
            info._obj.clusterUuid[k] = byte
        info._obj.cliqueId, info._obj.state = gpu.clique, gpu.state
        return 0


@contextmanager
def installed(library: FakeLib) -> Iterator[None]:
    """pynvml over `library` in place of the system's."""
    before = pynvml.nvmlLib
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
