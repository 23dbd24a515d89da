"""The order of the ranks under torchrun's variables: who is told which rank, and what happens when it cannot be had."""

from __future__ import annotations

import os
import socket
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__
from torch.utils.data import DataLoader

from parallax import ParallaxStrategy
from parallax.plugins.launch import choose_environment, init_distributed
from parallax.plugins.launch.errors import is_shared
from parallax.plugins.launch.order import OrderOptions, settle_order
from parallax.strategies.layout import Layout
from tests.procs import run_ranks
from tests.unit.test_placement_cli import PAIRS

WAIT = timedelta(seconds=20)
BY_HAND = (2, 0, 1)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(layout: str, **options: Any) -> dict[str, Any]:
    """One rank's view of itself, from everybody who has one."""
    strategy = ParallaxStrategy(layout, timeout=WAIT, **options)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = trainer.global_rank
    module = Lit()
    trainer.fit(module, DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=2))  # type: ignore[arg-type]
    import deepspeed

    seen = {
        "before fit": before,
        "lightning": trainer.global_rank,
        "printing": rank_zero_only.rank,
        "torch": dist.get_rank(),
        "mesh": strategy.mesh.rank,
        "sampler": trainer.train_dataloader.sampler.rank,  # type: ignore[union-attr]
        "variable": int(os.environ["RANK"]),
        "deepspeed": deepspeed.comm.get_rank() if "zero" in layout else dist.get_rank(),
    }
    assert trainer.local_rank == int(os.environ["LOCAL_RANK"])
    strategy.close()
    return {"ranks": sorted(set(seen.values())), "slot": trainer.local_rank, "order": strategy._order is not None}


def _orders_by_hand(rank: int, world: int) -> list[dict[str, Any]]:
    """Three strategies of one process, one after the other: by hand, the launcher's, by hand again."""
    return [_fit("zero1", reorder_ranks=BY_HAND), _fit("dp3"), _fit("dp3", reorder_ranks=BY_HAND)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("agent", [True, False])
def test_everybody_is_told_the_same_rank(agent: bool) -> None:
    """With torchrun's store, and without, where the launcher's rank 0 opens one."""
    own = {} if agent else {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(_free_port())}
    texts: list[str] = []
    found = run_ranks(3, _orders_by_hand, init=False, env=own, outputs=texts)
    for launched, told in enumerate(found):
        new = {"ranks": [BY_HAND[launched]], "slot": launched, "order": True}
        assert told == [new, {"ranks": [launched], "slot": launched, "order": False}, new]
    line = "ranks reordered: the launcher's 1 2 0 are now 0 to 2\n"
    assert [text.count(line) for text in texts] == [0, 2, 0]  # on the rank that is 0 now


def _join_while_the_old_store_closes(rank: int, world: int) -> int:
    """Rank 0 still holds a store of before at MASTER_PORT when rank 1 comes, and closes it under rank 1."""
    if rank == 0:
        old = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        before, end = old.num_keys(), time.monotonic() + 15
        while old.num_keys() == before:  # until rank 1 has left its address there
            assert time.monotonic() < end
            time.sleep(0.01)
        del old
    connection = init_distributed(choose_environment(), "gloo", WAIT)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    connection.close()
    return int(total)


def test_an_old_store_at_the_same_port() -> None:
    own = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(_free_port())}
    assert run_ranks(2, _join_while_the_old_store_closes, init=False, env=own) == [3, 3]


def _settle(rank: int, world: int, cases: list[tuple[str, Any, str, int | None]]) -> list[Any]:
    """For each (layout, reorder, check, device or own slot): this rank's new rank, or the error; and its warnings."""
    found: list[Any] = []
    for layout, reorder, check, device in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                order = settle_order(
                    choose_environment(),
                    Layout.parse(layout),
                    OrderOptions(reorder, check),
                    device=rank if device is None else device,
                    nodes=1,
                    timeout=WAIT,
                )
                told: Any = None if order is None else order.environment.global_rank()
                if order is not None:
                    connection = init_distributed(order.environment, "gloo", WAIT)
                    assert dist.get_rank() == told
                    dist.barrier()  # a peer may still be connecting
                    connection.close()
            except ValueError as error:
                assert is_shared(error)
                told = str(error)
        assert not dist.is_initialized()
        found.append((told, [str(w.message) for w in caught if w.category is UserWarning]))
    return found


def test_what_the_machine_says_decides(tmp_path: Path) -> None:
    """Four GPUs in two bridged pairs, 0 with 2 and 1 with 3, as a stand-in for `nvidia-smi` tells."""
    (tmp_path / "matrix.txt").write_text(PAIRS)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = topo ] && exec cat "{tmp_path}/matrix.txt"\nexit 3\n')
    tool.chmod(0o755)
    cases = [
        ("tp2", "auto", "error", None),
        ("tp2", "measure", "warn", None),
        ("tp2", False, "warn", None),
        ("tp4", "auto", "warn", None),
        ("tp4", "auto", "off", None),
        ("tp4", "auto", "error", None),
        ("tp3", "auto", "error", None),
        ("tp2", "auto", "warn", 0),
        ("tp2", True, "warn", 0),
        ("tp2", (0, 0, 1, 2), "warn", None),
    ]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = run_ranks(4, _settle, cases, init=False, env=env)
    by_case = [[each[k] for each in found] for k in range(len(cases))]
    pairs, plain = [0, 2, 1, 3], [0, 1, 2, 3]
    leaves = "groups leave the fast domain, the largest of which has 2 devices"
    for k, order, warns in (
        (0, pairs, None),
        (1, pairs, None),
        (2, plain, f"tp2: 2 of 2 {leaves}"),
        (3, plain, f"tp4: 1 of 1 {leaves}"),
        (4, plain, None),
        (7, plain, "ranks keep the launcher's order: ranks 0 and 1 both use GPU 0"),
    ):
        assert [told for told, _ in by_case[k]] == order, cases[k]
        assert [len(words) for _, words in by_case[k]] == [warns is not None, 0, 0, 0], cases[k]  # on rank 0 alone
        assert warns is None or by_case[k][0][1][0].startswith(warns), by_case[k][0]
    assert by_case[6] == [(None, [])] * 4  # a layout that does not fit is refused where all layouts are
    for k, words in (
        (5, "tp4: 1 of 1 " + leaves),
        (8, "ranks 0 and 1 both use GPU 0"),
        (9, "the order of the ranks must hold each of 0..3 once, got [0, 0, 1, 2]"),
    ):
        assert len({told for told, _ in by_case[k]}) == 1 and words in by_case[k][0][0], by_case[k]
    assert "To run it all the same: topology='warn'" in by_case[5][0][0]


def _too_late(rank: int, world: int) -> list[Any]:
    """The helper has made the process group already."""
    os.environ.update(TORCHELASTIC_RUN_ID="x", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    given = {"device": None, "nodes": 2, "timeout": WAIT}
    found: list[Any] = []
    try:
        for reorder in ("auto", True):
            try:
                found.append(settle_order(choose_environment(), Layout(), OrderOptions(reorder), **given))  # type: ignore[arg-type]
            except ValueError as error:
                found.append(str(error))
    finally:
        for key in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[key]
    return found


def test_after_the_process_group_it_is_too_late() -> None:
    text = "reorder_ranks=True, but TorchElasticEnvironment is too late: the process group exists: leave it out"
    assert run_ranks(2, _too_late) == [[None, text]] * 2
