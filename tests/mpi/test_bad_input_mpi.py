"""A mistake under a real launcher: its text appears once, the job fails soon, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from parallax.plugins.launch.mpirun import mpirun_command
from tests.mpi.test_mpi import clean_environment, pytestmark  # noqa: F401 - what needs MPI is skipped without

SCRIPT = Path(__file__).parent / "bad_input_script.py"
SOON = 60.0
"""Seconds for the whole job. Imports take most of it (a third of this on two idle cores), a wait in vain 600."""


def run(command: Sequence[str], folder: Path) -> str:
    """Both streams of a command that must fail by itself, and leave nothing running that names `folder`."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SOON + 20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"the job hangs:\n{output}")
    assert process.returncode != 0, output
    assert time.monotonic() - started < SOON, output
    deadline = time.monotonic() + 5
    while (left := _naming(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"still running: {left}"
    return output


def _naming(folder: Path) -> list[str]:
    mine = os.getpid()
    lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]) if p.pid != mine]
    return [line for line in lines if str(folder) in line]


def program(layout: str, case: str, folder: Path) -> list[str]:
    return ["-m", "parallax", "--layout", layout, str(SCRIPT), case, str(folder)]


def test_mpirun(tmp_path: Path) -> None:
    """Met by the last stage, in the first step, while the first stage waits for gradients."""
    output = run(mpirun_command(4, [sys.executable, *program("pp2 mb2", "no_loss", tmp_path)]), tmp_path)
    assert output.count("ValueError: training_step must return the loss, or a dict with 'loss'") == 1, output
    assert output.count("Traceback") == 1, output


def test_torchrun(tmp_path: Path) -> None:
    """Met before the ranks have met."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    output = run([sys.executable, *torchrun, *program("tp3", "layout", tmp_path)], tmp_path)
    assert output.count("ValueError: layout `tp3` needs a multiple of 3 ranks, there are 2; nearest: ") == 1, output


def test_lightnings_own_launcher(tmp_path: Path) -> None:
    """`python -m parallax` with `devices=2`: the children know the strategy and its layout too, and train."""
    output = run([sys.executable, *program("zero1", "loaders", tmp_path)], tmp_path)
    for rank in range(2):
        assert output.count(f"trained dp2 zero1 on rank {rank} of 2") == 1, output
    assert output.count("ValueError: the data loaders differ in length between ranks: 4 batches on rank 0; 6 ") == 1, (
        output
    )
