"""The rank helper itself: results, errors, hangs and leaks must be seen, or no other test can be trusted."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from tests.procs import RankError, RankTimeout, run_ranks


def _sum(rank: int, world: int, scale: float) -> tuple[int, torch.Tensor]:
    value = torch.tensor([scale * (rank + 1)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def test_results_come_back_by_rank() -> None:
    results = run_ranks(3, _sum, 10.0)
    assert [r for r, _ in results] == [0, 1, 2]
    assert all(torch.equal(v, torch.tensor([60.0])) for _, v in results)  # 10 + 20 + 30


def test_a_warm_start_is_quick() -> None:
    run_ranks(1, _environment)
    began = time.monotonic()
    run_ranks(2, _environment)
    assert time.monotonic() - began < 10  # about 0.3 s on an idle machine; a spawn takes over 10


def _environment(rank: int, world: int) -> tuple[int, str | None, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), os.environ.get("HF_HUB_OFFLINE")


def test_ranks_run_on_one_thread_and_offline() -> None:
    assert run_ranks(2, _environment) == [(1, "1", "1")] * 2


def _raise_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("seven is not a prime minister")
    dist.barrier()


def test_an_exception_names_its_rank_and_shows_the_traceback() -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match="^rank 1 of 2 failed: ValueError: seven is not a prime") as caught:
        run_ranks(2, _raise_on_one)
    assert "in _raise_on_one" in str(caught.value)
    assert caught.value.errors[1][0] == "ValueError"
    assert time.monotonic() - began < 20  # the peer in the barrier does not hold it up for the whole limit


def _stuck_outside_torch(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(1000)


def test_a_hang_is_ended_with_a_stack() -> None:
    began = time.monotonic()
    with pytest.raises(RankTimeout, match="1 of 2 ranks not done after 3 s") as caught:
        run_ranks(2, _stuck_outside_torch, timeout=3)
    assert "rank 1 of 2 was still running" in str(caught.value)
    assert "in _stuck_outside_torch" in str(caught.value)
    assert time.monotonic() - began < 15


def _stuck_in_a_collective(rank: int, world: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


def test_a_collective_gives_up_before_the_limit() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed") as caught:
        run_ranks(2, _stuck_in_a_collective, timeout=5)
    assert "dist.barrier()" in str(caught.value)
    assert "rank 1 of 2 was still running" in str(caught.value) and "in _stuck_in_a_collective" in str(caught.value)


def _die(rank: int, world: int) -> None:
    if rank == 0:
        print("last words", flush=True)
        os._exit(7)


def test_a_process_that_dies_is_reported_with_its_output() -> None:
    with pytest.raises(RankError, match="exit code 7") as caught:
        run_ranks(2, _die)
    assert "last words" in str(caught.value)


def _replace_group(rank: int, world: int) -> None:
    dist.destroy_process_group()


def _leave_group(rank: int, world: int) -> None:
    dist.init_process_group("gloo")


def _leave_variable(rank: int, world: int) -> None:
    os.environ["PARALLAX_LEAK"] = "1"


def _leave_process(rank: int, world: int) -> int:
    return subprocess.Popen(["sleep", "100"]).pid


@pytest.mark.parametrize(
    ("fn", "init", "message"),
    [
        (_replace_group, True, "process group of the test was destroyed"),
        (_leave_group, False, "a process group is still initialised"),
        (_leave_variable, True, "PARALLAX_LEAK: None -> '1'"),
        (_leave_process, True, "sleep 100"),
    ],
)
def test_leaks_fail(fn, init, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RankError, match=message):
        run_ranks(2, fn, init=init)


def _own_group(rank: int, world: int) -> tuple[int, int, str]:
    dist.init_process_group("gloo")  # env://
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        return dist.get_rank(), int(total.item()), os.environ["COLOUR"]
    finally:
        dist.destroy_process_group()


def test_ranks_can_make_their_own_group() -> None:
    assert run_ranks(2, _own_group, init=False, env={"COLOUR": "blue{rank}"}) == [(0, 2, "blue0"), (1, 2, "blue1")]


def _speak(rank: int, world: int) -> None:
    print(f"I am {rank}")


def test_outputs_are_kept() -> None:
    texts: list[str] = []
    run_ranks(2, _speak, outputs=texts)
    assert [t.strip() for t in texts] == ["I am 0", "I am 1"]


def _unpicklable(rank: int, world: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankError, match="cannot be pickled"):
        run_ranks(1, _unpicklable)
