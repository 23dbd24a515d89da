"""What the ranks of the MPI tests run: `python -m tests.mpi.jobs NAME FOLDER`, under mpirun.

Each rank writes what it saw to FOLDER/RANK.json, RANK being MPI's, so that nothing has to be read from mixed output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallax.plugins.launch import (
    Connection,
    ParallaxMPIEnvironment,
    choose_environment,
    init_distributed,
    local_world_size,
    prepare_process,
    same_on_every_rank,
)
from parallax.plugins.launch.rank_zero import printing_rank

WAIT = timedelta(seconds=60)
NEW_RANK_OF = [3, 1, 0, 2]


def _connect(environment: ParallaxMPIEnvironment) -> tuple[Connection, dict[str, Any]]:
    connection = init_distributed(environment, "gloo", WAIT)
    ranks = [torch.zeros(1) for _ in range(environment.world_size())]
    dist.all_gather(ranks, torch.tensor([float(os.environ["OMPI_COMM_WORLD_RANK"])]))
    return connection, {
        "rank": environment.global_rank(),
        "torch_rank": dist.get_rank(),
        "printing_rank": printing_rank(),
        "size": environment.world_size(),
        "local_rank": environment.local_rank(),
        "local_size": local_world_size(environment),
        "node_rank": environment.node_rank(),
        "mpi_rank_of_torch_rank": [int(t.item()) for t in ranks],
        "variables": {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")},
    }


def order(folder: Path) -> None:
    """MPI's order, then a permutation, twice: the group is made, left and made again from one environment."""
    seen = [printing_rank()]
    plain = choose_environment()
    assert isinstance(plain, ParallaxMPIEnvironment)
    connection, first = _connect(plain)
    connection.close()
    connection, _ = _connect(plain)  # the same store serves again
    connection.close()
    environment = ParallaxMPIEnvironment(NEW_RANK_OF)
    connection, second = _connect(environment)
    connection.close()
    environment.teardown()
    connection, third = _connect(environment)
    connection.close()
    try:
        environment.validate_settings(num_devices=2, num_nodes=1)
        refused = ""
    except ValueError as error:
        refused = str(error)
    report = {"before": seen, "plain": first, "permuted": second, "again": third, "refused": refused}
    (folder / f"{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(report))


def crash(folder: Path) -> None:
    """Rank 1 raises; the others are in a collective with it and then asleep for longer than the test."""
    environment = choose_environment()
    init_distributed(environment, "gloo", WAIT)
    dist.barrier()
    if environment.global_rank() == 1:
        (folder / "raised").write_text(str(time.time()))
        raise RuntimeError(" ".join(["the", "culprit"]))
    if environment.global_rank() == 0:
        time.sleep(1000)
    dist.barrier()


def mistake(folder: Path) -> None:
    """A mistake that every rank finds by itself."""
    choose_environment()
    with same_on_every_rank():
        raise ValueError(" ".join(["impossible", "layout"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_process([])
    globals()[sys.argv[1]](Path(sys.argv[2]))
