"""Several nodes on one machine, real launchers: ranks dealt to them in turn are put back where they belong.

Nodes are network namespaces with host names of their own, joined by cables (`tests/netns_cluster`). Only bytes and
values are asserted, never times: the nodes share the cores.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mpi.node_job import FLOATS, TIMES
from tests.mpi.test_mpi import pytestmark as needs_mpi
from tests.netns_cluster import Cluster, supported
from tests.parity import reference

WHY_NOT = supported()
LIMIT = 100.0
PORT = 29517

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no nodes can be made on this machine: {WHY_NOT}")


def reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank saw, in the launcher's order."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def check(found: list[dict[str, Any]], hosts: list[str], order: list[int], tp: int) -> None:
    """Ranks dealt to two nodes in turn have been given `order`, and everybody believes in it."""
    n = len(found)
    losses = reference.train("plain", torch.float64).losses
    for launched, seen in enumerate(found):
        rank = order[launched]
        assert seen["host"] == hosts[launched % 2]
        assert seen["order"] == order
        assert seen["rank"] == rank  # torch's
        assert seen["early"] == {"rank": rank, "printing": rank, "first": rank == 0}  # before training
        assert seen["variables"]["RANK"] == str(rank)
        assert seen["tp"] == list(range(rank // tp * tp, rank // tp * tp + tp))
        assert seen["sampler"] == rank // tp  # ranks of one tp group read the same samples
        torch.testing.assert_close(torch.tensor(seen["losses"]), torch.tensor(losses), rtol=1e-9, atol=0.0)
    host_of = {order[launched]: seen["host"] for launched, seen in enumerate(found)}
    for first in range(0, n, tp):
        assert len({host_of[rank] for rank in range(first, first + tp)}) == 1, "a tp group leaves its node"
    # torch sorts the ranks of a group: those of one node are neighbours in the ring of an all-reduce, two edges cross
    crossing = n // tp * 2 * (2 * (tp - 1) / tp) * FLOATS * 4 * TIMES
    for seen in found:
        assert seen["cable"]["launched"] == pytest.approx(crossing, rel=0.05)
        assert seen["cable"]["placed"] < 0.01 * crossing


@needs_mpi
def test_mpirun_deals_ranks_out_and_they_train_in_a_better_order(tmp_path: Path) -> None:
    with Cluster("px-mpi", nodes=2, slots=4, rate="200mbit") as nodes:
        command = [sys.executable, "-m", "tests.mpi.node_job", "tp4 dp2", str(tmp_path)]
        done = nodes.mpirun(command, np=8, by_node=True, timeout=LIMIT)
        sent = sum(cable["tx"] for cable in nodes.counters().values())
    assert done.returncode == 0, done.stdout + done.stderr
    found = reports(tmp_path, 8)
    check(found, ["px-mpi-0", "px-mpi-1"], [0, 4, 1, 5, 2, 6, 3, 7], tp=4)
    for launched, seen in enumerate(found):
        assert seen["hosts"] == ["px-mpi-0", "px-mpi-1"]
        assert seen["node_of"] == [0, 1] * 4
        assert (seen["local_rank"], seen["node_rank"]) == (launched // 2, launched % 2)  # the slot is not permuted
        assert seen["variables"]["MASTER_ADDR"] == nodes_address(0)
    # all else on the cables (start, meeting, gradients of this small model, agreement) is less than that comparison
    assert found[0]["cable"]["launched"] < sent < 2 * found[0]["cable"]["launched"]
    assert "ranks reordered: the launcher's 0 2 4 6 1 3 5 7 are now 0 to 7" in done.stdout
    assert done.stdout.count("tp4 dp2 on 8 ranks") == 1  # by one rank


def test_torchrun_with_two_agents_on_each_node(tmp_path: Path) -> None:
    """Agents 0 and 2 are on the first node, 1 and 3 on the second, each with one rank."""

    def agent(number: int) -> Any:
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "4", "--nproc-per-node", "1"]
        where = ["--node-rank", str(number), "--master-addr", nodes_address(0), "--master-port", str(PORT)]
        job = ["-m", "tests.mpi.node_job", "tp2 dp2", str(tmp_path)]
        command = [sys.executable, *torchrun, *where, *job]
        return nodes.exec(number % 2, command, timeout=LIMIT, env={"GLOO_SOCKET_IFNAME": "eth0"})

    with Cluster("px-run", nodes=2, slots=4) as nodes, ThreadPoolExecutor(4) as threads:
        done = list(threads.map(agent, range(4)))
    assert [each.returncode for each in done] == [0] * 4, "".join(each.stdout + each.stderr for each in done)
    found = reports(tmp_path, 4)
    check(found, ["px-run-0", "px-run-1"], [0, 2, 1, 3], tp=2)
    assert [seen["local_rank"] for seen in found] == [0] * 4  # one slot for each agent
    assert [seen["node_rank"] for seen in found] == [0, 2, 1, 3]  # agents are what torchrun calls nodes


def nodes_address(number: int) -> str:
    return f"198.18.77.{10 + number}"
