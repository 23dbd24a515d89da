"""Rules for every test: one thread, a fixed seed, a time limit, and nothing left behind.

`@pytest.mark.limit(seconds)` changes the time limit of one test.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest

from tests.guards import TEST_ENV, leaked_group, problems, restore_variables

os.environ.update(TEST_ENV)  # before any test module imports torch

LIMIT = 120.0
LAST_RESORT = 30.0
"""Seconds after its limit at which a test stuck in C code ends the whole run, with every thread's stack."""

_stderr: list[int] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="run every combination of layouts, not a selection")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `all_layouts` unless asked for."""
    if config.getoption("--all-layouts"):
        return
    left_out = [item for item in items if item.get_closest_marker("all_layouts")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("all_layouts")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "limit(seconds): time limit of this test instead of the usual one")
    config.addinivalue_line("markers", "all_layouts: run with --all-layouts only")
    _stderr.append(os.dup(2))  # the real one: pytest captures descriptor 2 while tests run


def _too_late(signum: int, frame: FrameType | None) -> NoReturn:
    pytest.fail("the test did not end within its time limit")


@pytest.fixture(autouse=True)
def _rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed, time limit, and the guards afterwards."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    marker = request.node.get_closest_marker("limit")
    limit = float(marker.args[0]) if marker else LIMIT
    before = dict(os.environ)
    faulthandler.dump_traceback_later(limit + LAST_RESORT, exit=True, file=_stderr[0])
    old = signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()
        left = problems(before, grace=0.5)
        restore_variables(before)
        _destroy_group()
    if left:
        pytest.fail("the test left something behind: " + "\n".join(left), pytrace=False)


def _destroy_group() -> None:
    """So that one leak fails one test, not all that follow."""
    if leaked_group():
        import torch.distributed as dist

        dist.destroy_process_group()
