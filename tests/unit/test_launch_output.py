"""One rank under its guard, and the reading of what many of them print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from parallax.plugins.launch import errors, guard
from parallax.plugins.launch.launch_command import guarded
from parallax.plugins.launch.rank_zero import printing_rank, set_printing_rank
from parallax.plugins.launch.ranklog import FailureLog, Line, LineReader
from parallax.plugins.launch.watchdog import Limits

RANK = {"OMPI_COMM_WORLD_RANK": "7"}
HOST = guard.socket.gethostname().split(".")[0]


def under_guard(code: str, hang: float | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        guarded([sys.executable, "-S", "-u", "-c", code], Limits(hang=hang)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **RANK},
    )


def run(code: str) -> tuple[int, str, str]:
    process = under_guard(code)
    out, err = process.communicate(timeout=20)
    return process.returncode, out.decode(), err.decode()


def test_every_line_is_labelled_and_the_end_of_a_failed_program_told() -> None:
    status, out, err = run("import sys; print('a\\n\\nb'); print('é', end=''); sys.stderr.write('bad\\n'); sys.exit(3)")
    assert status == 3
    assert out == "".join(f"[rank 7 {HOST}] {text}\n" for text in ("a", "", "b", "é"))
    assert re.fullmatch(rf"\[rank 7 {HOST}\] bad\n\[rank 7 {HOST} ended\] with status 3 at \d\d:\d\d:\d\d\n", err)
    assert run("print(1)") == (0, f"[rank 7 {HOST}] 1\n", "")


def test_a_signal_ends_the_guard_as_it_ended_the_program() -> None:
    status, _, err = run("import os; os.kill(os.getpid(), 9)")
    assert status == -signal.SIGKILL
    assert f"[rank 7 {HOST} ended] by signal 9 (SIGKILL) at " in err


def test_a_progress_bar_is_thinned_out() -> None:
    """200 states in 1 s: its first state, at most two a second after that, and the last one as a line."""
    code = (
        "import sys, time\nfor i in range(201):\n sys.stdout.write(f'\\r{i}/200'); time.sleep(0.005)\n"
        "sys.stdout.write('\\r\\ndone\\n')"
    )
    _, out, _ = run(code)
    shown = re.findall(r"(\d+)/200(.)", out, re.DOTALL)
    assert shown[0] == ("0", "\r") and shown[-1] == ("200", "\n")
    assert 2 <= len(shown) <= 12
    assert out.endswith(f"[rank 7 {HOST}] done\n")


def test_a_long_line_is_cut_and_none_of_it_lost() -> None:
    _, out, _ = run("print('x' * 10000)")
    assert max(map(len, out.splitlines())) < 4096
    assert out.count("x") == 10000


def test_a_stopped_program_is_told_from_a_living_one() -> None:
    process = under_guard("import os, time; print(os.getpid()); time.sleep(60)", hang=1)
    assert process.stdout is not None
    seen = iter(process.stdout.readline, b"")
    pid = next(int(line.split()[-1]) for line in seen if b"alive" not in line)
    os.kill(pid, signal.SIGSTOP)
    assert any(line.endswith(b"stopped]\n") for line in seen)
    os.kill(pid, signal.SIGCONT)
    assert any(line.endswith(b"alive]\n") for line in seen)
    os.kill(process.pid, signal.SIGKILL)  # the program dies with its guard
    process.communicate()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_sigterm_is_passed_on_and_no_failure_of_the_rank() -> None:
    process = under_guard("import time; print('here'); time.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM
    assert b"ended" not in err


def lines(*pieces: str) -> list[Line]:
    reader = LineReader()
    return [line for piece in pieces for line in reader.feed(piece.encode())] + list(reader.close())


def test_lines_are_read_whatever_the_pieces() -> None:
    text = "[rank 0 a] one\n[rank 11 b-2] two\rno label\n[rank 1 a alive]\n[rank 1 a ended] with status 1 at 10:00:00\n"
    expected = [
        Line(0, "a", "text", "one"),
        Line(11, "b-2", "text", "two", redrawn=True),
        Line(None, "", "text", "no label"),
        Line(1, "a", "alive", ""),
        Line(1, "a", "ended", "with status 1 at 10:00:00"),
    ]
    assert lines(text) == lines(*text) == expected
    assert "".join(line.labelled + "\n" for line in expected[:1]) == text[:15]


def test_a_line_that_mpirun_tore_is_put_together() -> None:
    """Two ranks' pieces alternate in the middle of a line, and in the middle of a label."""
    assert lines("[rank 0 a] first ha", "[rank 1 a] whole\n[rank 1 a] se", "lf\n", "cond\n")[0].text == "whole"
    found = lines("[rank 0 a] first ha", "[rank 1 a] whole\n", "lf\n[rank 2 a] x\n")
    assert [(line.rank, line.text) for line in found] == [(1, "whole"), (0, "first half"), (2, "x")]
    found = lines("[rank 0 ", "[rank 1 a] whole\n", "a] late\n")
    assert [(line.rank, line.text) for line in found] == [(1, "whole"), (0, "late")]


def seen(*texts: str) -> FailureLog:
    log = FailureLog()
    for k, line in enumerate(lines(*(text + "\n" for text in texts))):
        log.see(line, float(k))
    return log


def test_the_first_failure_is_the_first_that_came_to_stay() -> None:
    log = seen(
        "[rank 2 a] Traceback (most recent call last):",  # caught by the program: rank 2 goes on
        "[rank 2 a] ValueError: caught",
        "[rank 1 a] rank 5 of 8 (started as rank 1) on a failed at 10:00:00:",
        "[rank 0 a] rank 0 of 8 on a failed at 10:00:01:",
        "[rank 1 a] Traceback (most recent call last):",
        '[rank 1 a]   File "x.py", line 1, in <module>',
        "[rank 1 a] RuntimeError: the culprit",
        "[rank 1 a] in two lines",
        "[rank 0 a] RuntimeError: Connection closed by peer",
        "[rank 1 a ended] with status 1 at 10:00:02",
    )
    first = log.first()
    assert log.any and first is not None
    assert first.describe() == "rank 1 on a at 10:00:00: RuntimeError: the culprit"
    assert first.lines[0].startswith("Traceback") and len(first.lines) == 4


def test_a_traceback_counts_when_its_rank_ends_soon_after() -> None:
    trace = ["[rank 1 a] Traceback (most recent call last):", '[rank 1 a]   File "x"', "[rank 1 a] KeyError: 'lr'"]
    log = seen(*trace)
    assert not log.any and log.first() is None
    end = "[rank 1 a ended] with status 1 at 10:00:02"
    first = seen(*trace, "[rank 0 a ended] by signal 9 (SIGKILL) at 10:00:01", end).first()
    assert first is not None and first.describe() == "rank 1 on a at 10:00:02: KeyError: 'lr'"
    old = seen(*trace, *["[rank 0 a] working"] * 100, end).first()
    assert old is not None and old.reason == "ended with status 1"


@pytest.mark.parametrize(("status", "words"), [(3 << 8, "with status 3"), (11, "by signal 11 (SIGSEGV)")])
def test_ends_in_words(status: int, words: str) -> None:
    assert guard.describe(status) == words


def test_a_rank_that_was_numbered_anew_is_told_by_both_numbers() -> None:
    """Labels carry the launcher's number, which mpirun's own messages use too."""
    before = printing_rank()
    set_printing_rank(5)
    try:
        title = errors._title((1, 8))
    finally:
        set_printing_rank(before)
    assert title.startswith("rank 5 of 8 (started as rank 1) on ")
    first = seen(f"[rank 1 a] {title}", "[rank 1 a] KeyError: 'lr'").first()
    assert first is not None and (first.rank, first.reason) == (1, "KeyError: 'lr'")
