"""The C library behind `amdsmi`, replaced by a description of a machine.

It is: what `libamd_smi.so` would write through the pointers that the real Python package hands it, so that the
package's own structures, checks and exceptions run. It is not: recorded from hardware.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

SUCCESS, NOT_SUPPORTED, DRIVER_NOT_LOADED = 0, 2, 34
LINK_NUMBERS = {"INTERNAL": 0, "PCIE": 1, "XGMI": 2, "NOT_APPLICABLE": 3, "UNKNOWN": 4}
_REAL_CDLL = ctypes.CDLL


class _Function:
    """A function of the library; the package sets its result and argument types."""

    def __init__(self, run: Callable[..., int]) -> None:
        self._run = run
        self.restype: Any = None
        self.argtypes: Sequence[Any] = ()

    def __call__(self, *arguments: Any) -> int:
        return self._run(*arguments)


@dataclass
class FakeRocm:
    """Stands in for the loaded library.

    Attributes:
        gpus: how many; each is a socket of one processor.
        link: name of the link type of two GPUs.
        numa: of each GPU.
        peer: whether two GPUs may reach each other.
        bandwidth: the most between two GPUs, MB/s.
        without: functions that are not supported here.
        absent: functions that an older library lacks.
        start: what initialisation returns.
        numbers: of the link types; they differ between releases.
    """

    gpus: int
    link: Callable[[int, int], str] = lambda i, j: "XGMI"
    numa: Callable[[int], int] = lambda i: i // 4
    peer: Callable[[int, int], bool] = lambda i, j: True
    bandwidth: int = 50000
    without: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    start: int = SUCCESS
    functions: dict[str, _Function] = field(default_factory=dict)

    def __getattr__(self, name: str) -> _Function:
        if name.startswith("__") or name in self.absent:
            raise AttributeError(name)
        if name not in self.functions:
            run = getattr(type(self), f"_{name}", None)
            known = run is not None and name not in self.without
            self.functions[name] = _Function(run.__get__(self) if known and run else lambda *_: NOT_SUPPORTED)
        return self.functions[name]

    def _amdsmi_init(self, flags: int) -> int:
        return self.start

    def _amdsmi_shut_down(self) -> int:
        return SUCCESS

    def _amdsmi_get_socket_handles(self, count: Any, handles: Any) -> int:
        return self._list(range(self.gpus), count, handles)

    def _amdsmi_get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        return self._list([_number(socket)], count, handles)

    def _list(self, numbers: Sequence[int], count: Any, handles: Any) -> int:
        count._obj.value = len(numbers)
        if isinstance(handles, ctypes.Array):
            for k, number in enumerate(numbers):
                handles[k] = number + 1
        return SUCCESS

    def _amdsmi_get_gpu_device_bdf(self, gpu: Any, bdf: Any) -> int:
        fields = bdf._obj.struct_amdsmi_bdf_t
        fields.bus_number = 0x20 + _number(gpu)
        return SUCCESS

    def _amdsmi_get_gpu_device_uuid(self, gpu: Any, length: Any, text: Any) -> int:
        text.value = f"uuid-{_number(gpu)}".encode()
        return SUCCESS

    def _amdsmi_get_gpu_asic_info(self, gpu: Any, info: Any) -> int:
        info._obj.market_name = b"Made-up GPU"
        return SUCCESS

    def _amdsmi_get_gpu_topo_numa_affinity(self, gpu: Any, node: Any) -> int:
        node._obj.value = self.numa(_number(gpu))
        return SUCCESS

    def _amdsmi_topo_get_link_type(self, a: Any, b: Any, hops: Any, kind: Any) -> int:
        hops._obj.value, kind._obj.value = 1, LINK_NUMBERS[self.link(_number(a), _number(b))]
        return SUCCESS

    def _amdsmi_is_P2P_accessible(self, a: Any, b: Any, answer: Any) -> int:  # noqa: N802 - the library's name
        answer._obj.value = self.peer(_number(a), _number(b))
        return SUCCESS

    def _amdsmi_get_minmax_bandwidth_between_processors(self, a: Any, b: Any, least: Any, most: Any) -> int:
        least._obj.value, most._obj.value = self.bandwidth, self.bandwidth
        return SUCCESS


def _number(handle: Any) -> int:
    value = ctypes.cast(handle, ctypes.c_void_p).value
    assert value is not None
    return value - 1


@contextmanager
def installed(library: FakeRocm | None) -> Iterator[None]:
    """The package `amdsmi`, imported anew over `library`; over none, as on a machine without ROCm."""

    def load(name: Any, *arguments: Any, **options: Any) -> Any:
        if "libamd_smi" not in str(name):
            return _REAL_CDLL(name, *arguments, **options)
        if library is None:
            raise OSError("libamd_smi.so: cannot open shared object file: No such file or directory")
        return library

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
            patch.delitem(sys.modules, name)
        patch.setattr(ctypes, "CDLL", load)
        try:
            yield
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
                del sys.modules[name]
