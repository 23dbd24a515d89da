"""The most memory this process has used since a moment.

It is: the allocator's own peak on a GPU, the kernel's on a CPU. It is not: an estimate.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Bytes, from the time this object is made.

    On a GPU: allocated by torch on `device`. On a CPU: resident, above what was resident at the start, so that the
    interpreter and the libraries do not count; where the kernel does not tell, from the process's highest peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _CLEAR.write_text("5")  # the peak starts again from what is resident now
        except OSError:
            pass
        self._base = _resident("VmRSS")

    def read(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, _resident("VmHWM") - self._base)


def _resident(field: str) -> int:
    try:
        (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
