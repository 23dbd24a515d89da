"""The running job: what its ranks see together, and the order they should have.

It is: the collective calls that the command line and the launcher make, over MPI or anything with `allgather` and
`bcast` of objects. It is not: the description (`probes`, `gather.py`), the decision (`placement.py`) or its execution.
"""

from __future__ import annotations

from typing import Any, Protocol

from parallax.plugins.topology.description import Cluster, Node
from parallax.plugins.topology.fit import check_fit
from parallax.plugins.topology.gather import gather_cluster
from parallax.plugins.topology.placement import place
from parallax.plugins.topology.probes import ProbeError, probe_node
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.traffic import ModelShape, traffic_of
from parallax.strategies.layout import Layout


class Communicator(Protocol):
    """The part of an mpi4py communicator that is used."""

    rank: int

    def allgather(self, value: Any) -> list[Any]: ...

    def bcast(self, value: Any, root: int = 0) -> Any: ...


def job_cluster(comm: Communicator, local_rank: int, probe: str | None = None) -> Cluster:
    """The cluster with a slot for each rank of `comm`, the same on every rank. Collective.

    Args:
        comm: of the launcher, in its order.
        local_rank: the slot the launcher gave this process on its node: the number of its device among those it sees,
            unless it sees only one.
        probe: name of the probe; default: the best that works on the machine of each rank.

    Raises:
        ValueError: the same on every rank: no probe works, or ranks and devices do not match.
    """
    node: Node | None = None
    problem = None
    try:
        node = probe_node(probe)
    except ProbeError as error:
        problem = str(error)
    device = None
    if node is not None and node.devices:
        device = 0 if len(node.devices) == 1 else local_rank
    return gather_cluster(node, comm.allgather, device, problem)


def job_order(
    comm: Communicator,
    local_rank: int,
    layout: Layout,
    *,
    probe: str | None = None,
    on_misfit: str = "warn",
    model: ModelShape | None = None,
    rates: Rates | None = None,
) -> tuple[int, ...]:
    """New global rank of each rank of `comm`: what `ParallaxMPIEnvironment` takes. Collective.

    Rank 0 decides; an error of its own is raised on every rank.

    Args:
        comm, local_rank, probe: as for `job_cluster`.
        layout: need not be resolved.
        on_misfit: "refuse", "warn" (on rank 0) or "allow", when tp or ep leaves the fast domain; see `check_fit`.
        model, rates: for the prediction; default: assumed ones.

    Raises:
        ValueError: the same on every rank: as `job_cluster`, `place` and `check_fit`.
    """
    cluster = job_cluster(comm, local_rank, probe)
    answer: tuple[tuple[int, ...], str | None] = ((), None)
    if comm.rank == 0:
        try:
            resolved = layout.resolve(len(cluster.slots))
            found = place(cluster, cluster.slots, resolved, traffic_of(resolved, model), rates)
            check_fit(cluster, cluster.slots, layout, on_misfit=on_misfit, placement=found, model=model, rates=rates)
            answer = found.new_rank_of, None
        except ValueError as error:
            answer = (), str(error)
    order, problem = comm.bcast(answer)
    if problem is not None:
        raise ValueError(problem)
    return tuple(order)
