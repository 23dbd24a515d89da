"""The running job: what its ranks see together, and the order they should have.

It is: the collective calls that the command line and the launcher make, over MPI or anything with `allgather` and
`bcast` of objects. It is not: the description (`probes`, `gather.py`), the decision (`placement.py`) or its execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parallax.plugins.topology.description import Cluster, Node
from parallax.plugins.topology.fit import check_fit
from parallax.plugins.topology.gather import gather_cluster
from parallax.plugins.topology.measure import Transport, correct, measure, plan_rounds
from parallax.plugins.topology.placement import Placement, place
from parallax.plugins.topology.probes import ProbeError, probe_node
from parallax.plugins.topology.rates import Rates
from parallax.plugins.topology.traffic import ModelShape, traffic_of
from parallax.strategies.layout import Layout


class Communicator(Protocol):
    """The part of an mpi4py communicator that is used."""

    rank: int

    def allgather(self, value: Any) -> list[Any]: ...

    def bcast(self, value: Any, root: int = 0) -> Any: ...


def job_cluster(comm: Communicator, local_rank: int | None, probe: str | None = None) -> Cluster:
    """The cluster with a slot for each rank of `comm`, the same on every rank. Collective.

    Args:
        comm: of the launcher, in its order.
        local_rank: number of this process's device among those it sees, unless it sees only one: where each process
            takes the device of its slot, the slot that the launcher gave it. None: it uses none.
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
    if local_rank is not None and node is not None and node.devices:
        device = 0 if len(node.devices) == 1 else local_rank
    return gather_cluster(node, comm.allgather, device, problem)


@dataclass(frozen=True)
class Plan:
    """What the ranks of a job are told.

    Attributes:
        new_rank_of: new global rank of each rank of the launcher.
        speedup: predicted time of communication in the launcher's order over that in this one.
        misfits: a sentence for each axis that leaves the fast domain; see `check_fit`.
    """

    new_rank_of: tuple[int, ...]
    speedup: float = 1.0
    misfits: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        return any(new != old for old, new in enumerate(self.new_rank_of))


def job_plan(
    comm: Communicator,
    local_rank: int | None,
    layout: Layout,
    *,
    keep: bool = False,
    probe: str | None = None,
    transport: Transport | None = None,
    on_misfit: str = "allow",
    model: ModelShape | None = None,
    rates: Rates | None = None,
) -> Plan:
    """The order that the ranks of `comm` should have, and whether tp and ep fit. Collective.

    Rank 0 decides; an error of its own is raised on every rank.

    Args:
        comm, local_rank, probe: as for `job_cluster`.
        layout: need not be resolved.
        keep: judge the launcher's order, change nothing.
        transport: between the same ranks in host memory: the network is measured first. None: rates are assumed.
        on_misfit: "refuse", "warn" (on rank 0) or "allow", when tp or ep leaves the fast domain; see `check_fit`.
        model, rates: for the prediction; default: assumed ones.

    Raises:
        ValueError: the same on every rank: as `job_cluster`, `place` and `check_fit`.
    """
    cluster = job_cluster(comm, local_rank, probe)
    if transport is not None:
        samples = measure(transport, plan_rounds([slot.node for slot in cluster.slots]))
        cluster, rates, _ = correct(cluster, cluster.slots, samples, rates, devices=False)
    answer: tuple[Sequence[int], float, Sequence[str], str | None] = (), 1.0, (), None
    if comm.rank == 0:
        try:
            resolved = layout.resolve(len(cluster.slots))
            found = place(cluster, cluster.slots, resolved, traffic_of(resolved, model), rates)
            if keep:
                found = Placement(tuple(range(len(cluster.slots))), found.before, found.before)
            misfits = check_fit(
                cluster, cluster.slots, layout, on_misfit=on_misfit, placement=found, model=model, rates=rates
            )
            answer = found.new_rank_of, found.speedup, [misfit.describe(layout) for misfit in misfits], None
        except ValueError as error:
            answer = (), 1.0, (), str(error)
        except Exception as error:  # the others wait for this answer: a fault of ours must reach them too
            answer = (), 1.0, (), f"planning the order of ranks failed with {type(error).__name__}: {error}"
    order, speedup, sentences, problem = comm.bcast(answer)
    if problem is not None:
        raise ValueError(problem)
    return Plan(tuple(order), speedup, tuple(sentences))


def job_order(
    comm: Communicator, local_rank: int | None, layout: Layout, *, on_misfit: str = "warn", **options: Any
) -> tuple[int, ...]:
    """`job_plan`'s order alone: what `ParallaxMPIEnvironment` takes."""
    return job_plan(comm, local_rank, layout, on_misfit=on_misfit, **options).new_rank_of
