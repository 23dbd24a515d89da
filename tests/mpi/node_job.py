"""What the ranks of the tests on several nodes run: `python -m tests.mpi.node_job LAYOUT FOLDER`, by any launcher.

Each rank trains the plain model with a real Trainer at a layout, in whatever order Parallax settles, then moves 1 MiB a
few times in the groups of that order and in those that the launcher's order would have had. What it saw goes to
FOLDER/RANK.json, RANK being the launcher's.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DistributedSampler

from parallax import ParallaxStrategy
from parallax.plugins.launch.detect import launched_rank, mpi_launch
from parallax.plugins.topology.job import job_cluster
from parallax.strategies.mesh import coordinates, members
from tests.parity.harness import Lit, Watch, loader

CABLE = Path("/sys/class/net/eth0/statistics/tx_bytes")
TIMES, FLOATS = 4, 2**18


def describe_nodes() -> dict[str, Any]:
    """What Parallax makes of the machines, under mpirun."""
    if mpi_launch() is None:
        return {}
    from mpi4py import MPI

    cluster = job_cluster(MPI.COMM_WORLD, None)
    return {"hosts": [node.host for node in cluster.nodes], "node_of": [slot.node for slot in cluster.slots]}


def cable_bytes(control: Any, act: Callable[[], None]) -> int:
    """Bytes that all nodes sent over their cables while all ranks did `act`."""
    control.barrier()
    before = int(CABLE.read_text())
    control.barrier()
    act()
    control.barrier()
    sent = dict(control.gather_objects((socket.gethostname(), int(CABLE.read_text()) - before)))
    return sum(sent.values())


def train(layout: str) -> dict[str, Any]:
    """One rank's report. Its rank is final as soon as there is a Trainer."""
    launched = launched_rank()
    assert launched is not None
    strategy = ParallaxStrategy(layout, timeout=timedelta(seconds=90))
    watch = Watch()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    early = {"rank": trainer.global_rank, "printing": rank_zero_only.rank, "first": trainer.is_global_zero}
    sizes = strategy.requested_layout.resolve(trainer.world_size).axis_sizes()
    module = Lit("plain", torch.float64)
    trainer.fit(module, loader("plain", sizes["dp"], coordinates(trainer.global_rank, sizes)["dp"]))
    mesh = strategy.mesh
    report = {
        "launched": launched[0],
        "host": socket.gethostname(),
        "early": early,
        "rank": dist.get_rank(),
        "local_rank": trainer.local_rank,
        "node_rank": trainer.node_rank,
        "variables": {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "MASTER_ADDR")},
        "order": None if strategy._order is None else strategy._order.new_rank_of,
        "tp": mesh["tp"].ranks,
        "sampler": DistributedSampler(range(8), **strategy.distributed_sampler_kwargs, shuffle=False).rank,  # type: ignore[arg-type]
        "losses": watch.run.losses,
    }
    if CABLE.exists():
        report["cable"] = compare_cables(mesh, report["order"])
    strategy.close()
    return report


def compare_cables(mesh: Any, order: list[int]) -> dict[str, int]:
    """Bytes over all cables of all-reduces over tp, in both orders of the ranks."""
    sizes = mesh.layout.axis_sizes()
    old = {members(("tp",), rank, sizes) for rank in range(mesh.layout.world_size)}
    groups = {group: dist.new_group([order[rank] for rank in group]) for group in sorted(old)}
    here = next(group for group in groups.values() if dist.get_rank(group) >= 0)
    data = torch.ones(FLOATS)

    def placed() -> None:
        for _ in range(TIMES):
            mesh["tp"].all_reduce(data.fill_(1.0))

    def launched() -> None:
        for _ in range(TIMES):
            dist.all_reduce(data.fill_(1.0), group=here)

    return {name: cable_bytes(mesh["control"], act) for name, act in (("placed", placed), ("launched", launched))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    nodes = describe_nodes()
    found = train(sys.argv[1]) | nodes
    (Path(sys.argv[2]) / f"{found['launched']}.json").write_text(json.dumps(found))
