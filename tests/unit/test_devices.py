"""Which device a process takes."""

from __future__ import annotations

import pytest
import torch

from parallax.strategies.processes import pick_device

GPUS = [torch.device("cuda", i) for i in range(4)]


def test_the_slot_picks_the_gpu() -> None:
    assert [pick_device(GPUS, slot, seen=4) for slot in range(4)] == GPUS


def test_a_process_that_is_shown_one_gpu_takes_it() -> None:
    assert [pick_device(GPUS[:1], slot, seen=1) for slot in range(4)] == GPUS[:1] * 4


def test_processes_share_the_cpu() -> None:
    cpu = torch.device("cpu")
    assert pick_device([cpu], 3, seen=0) == pick_device([cpu] * 2, 3, seen=0) == cpu


def test_too_few_devices_are_refused() -> None:
    assert pick_device(GPUS[:1], 0, seen=4) == GPUS[0]
    with pytest.raises(ValueError, match=r"slot 1 of this node, but the Trainer has 1 device.*devices='auto'"):
        pick_device(GPUS[:1], 1, seen=4)
