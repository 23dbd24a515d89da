"""The rules in `conftest.py`: a test that leaves something behind or does not end must fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

BAD = """
import os, subprocess, time
import pytest
import torch.distributed as dist

def test_variable():
    os.environ["PARALLAX_LEAK"] = "1"

def test_process():
    subprocess.Popen(["sleep", "100"])

def test_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1)

@pytest.mark.limit(0.5)
def test_slow():
    time.sleep(60)

def test_after_all_that():
    assert "PARALLAX_LEAK" not in os.environ and not dist.is_initialized()
"""


def test_leaks_and_hangs_fail_and_do_not_spread(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import _rules, pytest_configure  # noqa: F401\n")
    (tmp_path / "test_bad.py").write_text(BAD)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    for line in (
        "leaked environment variables: PARALLAX_LEAK: None -> '1'",
        "leaked child processes: ",
        "leaked process group: ",
        "the test did not end within its time limit",
    ):
        assert line in done.stdout, done.stdout
    assert "ERROR test_bad.py::test_variable" in done.stdout and "FAILED test_bad.py::test_slow" in done.stdout
    assert "1 failed, 4 passed, 3 errors" in done.stdout, done.stdout
