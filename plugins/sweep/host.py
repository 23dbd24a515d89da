"""On what and with what a run was made: processors, memory, GPUs, versions.

It is: a description for people who compare numbers. It is not: a probe of the topology (`plugins/topology`), and it
holds no host name.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("lightning-parallax", "torch", "lightning", "deepspeed", "transformers", "mpi4py", "hydra-core")


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed; Python's too."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe_host() -> str:
    """This machine in a line: "Linux x86_64, 2 cores (AMD EPYC ...), 24 GB, no GPU"."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{platform.system()} {platform.machine()}", f"{cores} cores{_processor()}"]
    if memory := _memory():
        parts.append(f"{memory / 2**30:.0f} GiB")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        parts += [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    else:
        parts.append("no GPU")
    return ", ".join(parts)


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f" ({found[1].strip()})" if found else ""


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
