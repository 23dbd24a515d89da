"""What a test must leave as it found it: process groups, environment variables, child processes.

It is: snapshots and comparisons, used by the test process (`conftest.py`) and inside every rank (`procs.py`).
It is not: a clean-up of the product's own making; whoever leaks gets a failed test.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import time
from collections.abc import Mapping

import psutil

TEST_ENV: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "DS_ACCELERATOR": "cpu",
    "DS_SKIP_CUDA_CHECK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set before anything is imported, in the test process and in the fork server."""

SET_BY_LIBRARIES = frozenset(
    {
        "PYTORCH_NVML_BASED_CUDA_CHECK",  # import deepspeed
        "TORCHINDUCTOR_CACHE_DIR",  # import lightning
        "PYTEST_CURRENT_TEST",
    }
)
"""Keys that imports of torch, deepspeed, lightning and pytest set for good; found by running them."""


def changed_variables(before: Mapping[str, str], allow: frozenset[str] = frozenset()) -> list[str]:
    """One line for each environment variable added, changed or removed since `before`."""
    now = dict(os.environ)
    lines = []
    for key in sorted((before.keys() | now.keys()) - SET_BY_LIBRARIES - allow):
        if before.get(key) != now.get(key):
            lines.append(f"{key}: {before.get(key)!r} -> {now.get(key)!r}")
    return lines


def restore_variables(before: Mapping[str, str]) -> None:
    """Put the variables back, except those that imports set for good."""
    for key in os.environ.keys() - before.keys() - SET_BY_LIBRARIES:
        del os.environ[key]
    os.environ.update({k: v for k, v in before.items() if os.environ.get(k) != v})


def live_children() -> list[psutil.Process]:
    """Child processes that still run, without multiprocessing's own two helpers."""
    helpers = {
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
    }
    found = []
    for child in psutil.Process().children(recursive=True):
        if helpers & {child.pid, *_ancestors(child)}:
            continue
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


def _ancestors(process: psutil.Process) -> set[int]:
    try:
        return {p.pid for p in process.parents()}
    except psutil.NoSuchProcess:
        return set()


def leaked_children(grace: float = 1.0) -> list[str]:
    """Kill the child processes that outlive `grace` seconds; one line for each, with its command."""
    deadline = time.monotonic() + grace
    while (children := live_children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for child in children:
        try:
            lines.append(f"{child.pid}: {' '.join(child.cmdline())[:200]}")
            child.kill()
        except psutil.NoSuchProcess:
            pass
    return lines


def leaked_group(allowed: object = None) -> str | None:
    """What is wrong with the default process group: anything but `allowed` is a leak."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    here = dist.group.WORLD if dist.is_initialized() else None
    if here is allowed:
        return None
    if allowed is None:
        return "a process group is still initialised; whoever made it must destroy it"
    return "the process group of the test was destroyed or replaced"


def problems(
    before: Mapping[str, str], *, group: object = None, allow: frozenset[str] = frozenset(), grace: float = 1.0
) -> list[str]:
    """Everything a test left behind since `before` was taken; child processes are killed on the way."""
    found = []
    if leak := leaked_group(group):
        found.append("leaked process group: " + leak)
    if lines := changed_variables(before, allow):
        found.append("leaked environment variables: " + "; ".join(lines))
    if lines := leaked_children(grace):
        found.append("leaked child processes: " + "; ".join(lines))
    return found
