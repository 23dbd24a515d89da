"""`parallax launch` over two nodes: nothing but mpirun's agent leads to the second one, and its cable may come out."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.mpi.test_launch_command import JOB
from tests.mpi.test_mpi import ROOT, clean_environment
from tests.mpi.test_mpi import pytestmark as needs_mpi
from tests.netns_cluster import Cluster, supported

WHY_NOT = supported()
HANG = 3.0
LAUNCH = """
import sys
import parallax.plugins.launch.launch_command as launch
launch.rank_program = lambda script, *flags: [sys.executable, *flags, *script]  # started in a moment
sys.exit(launch.main(sys.argv[1:]))
"""

pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no nodes can be made on this machine: {WHY_NOT}"),
    needs_mpi,
]


def start(nodes: Cluster, folder: Path) -> subprocess.Popen[str]:
    """The launcher, on the first node."""
    hosts = folder / "hosts.txt"
    hosts.write_text("".join(f"{nodes.name}-{k} slots=4\n" for k in range(2)))
    agent = f"--prtemca plm_ssh_agent {nodes.state / 'rsh'} --mca btl_tcp_if_include eth0"
    options = ["--hostfile", str(hosts), "--ppn", "2", "--hang-timeout", f"{HANG:g}", "--mpirun-args", agent]
    return subprocess.Popen(
        nodes.exec_cmd(0, [sys.executable, "-c", LAUNCH, *options, JOB, "sleep", str(folder)], cwd=str(ROOT)),
        env={**clean_environment(), "NCCL_GREETING": "hello, hello"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def alive(pids: list[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if lives(pid)]


def wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def test_a_node_whose_cable_is_out_ends_the_job(tmp_path: Path) -> None:
    """mpirun alone would wait for ever. The first node is free at once, the second one when it hears of it."""
    with Cluster("px-lost", nodes=2, slots=4) as nodes:
        launcher = start(nodes, tmp_path)
        try:
            wait(lambda: len(list(tmp_path.glob("*.pid"))) == 4, 60)
            time.sleep(1)
            ranks = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(4)]
            nodes.link(node=1, plugged=False)
            out, err = launcher.communicate(timeout=HANG + 20)
            wait(lambda: not alive(ranks[:2]), 5)
            nodes.link(node=1, plugged=True)
            wait(lambda: not alive(ranks), 20)
        finally:
            launcher.kill()
            launcher.communicate()
    assert launcher.returncode == 1, out + err
    expected = [f"[rank {r} px-lost-{r // 2}] rank {r} says hello, hello" for r in range(4)]
    assert sorted(line for line in out.splitlines() if "says" in line) == expected
    assert "NCCL_GREETING" in err and "hello, hello" not in err
    assert re.search(r"first error: rank [23] on px-lost-1 at \S+: no sign of life for 3 s: hung, or its node", err), (
        err
    )
