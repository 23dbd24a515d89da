"""The order of the ranks of a running job, settled before its process group exists.

It is: when to look at the machines, what to do with the plan, and what to do when they cannot be described. It is not:
the plan (`parallax.plugins.topology`), nor the environments that carry it out (`mpi.py`, `placed.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from parallax.plugins.launch.errors import mark_shared, same_on_every_rank
from parallax.plugins.launch.mpi import ParallaxMPIEnvironment
from parallax.plugins.launch.placed import PlacedEnvironment
from parallax.strategies.layout import Layout

if TYPE_CHECKING:
    from parallax.plugins.topology.job import Plan

REORDER = (True, False, "auto", "measure")
CHECKS = ("warn", "error", "off")


@dataclass(frozen=True)
class OrderOptions:
    """What the user wants of the order.

    Attributes:
        reorder: True: the best order, or an error when the machines cannot be described. False: the launcher's. "auto":
            the best one where there is more than one node or the ranks use accelerators, the launcher's when the
            machines cannot be described. "measure": as True, with the rate of the network measured, for up to 10 s. A
            sequence: the new global rank of each of the launcher's ranks.
        check: what to do when tp or ep leaves the fast domain: "warn", "error" or "off". Where "auto" would not look
            at the machines, nothing is checked.

    Raises:
        ValueError: another value.
    """

    reorder: bool | str | Sequence[int] = "auto"
    check: str = "warn"

    def __post_init__(self) -> None:
        given = isinstance(self.reorder, Sequence) and not isinstance(self.reorder, str)
        if not given and (self.reorder not in REORDER or type(self.reorder) is int):  # 1 equals True
            raise ValueError(
                "reorder_ranks must be True, False, 'auto', 'measure' or the new rank of each of the launcher's ranks; "
                f"got {self.reorder!r}"
            )
        if self.check not in CHECKS:
            raise ValueError(f"topology must be one of {', '.join(CHECKS)}; got {self.check!r}")

    @property
    def given(self) -> tuple[int, ...] | None:
        """The order that the user gave by hand."""
        return None if isinstance(self.reorder, (str, bool)) else tuple(self.reorder)

    @property
    def wanted(self) -> bool:
        """Whether leaving the launcher's order in place without a word would ignore what was asked for."""
        return self.reorder not in (False, "auto")


@dataclass(frozen=True)
class Order:
    """What was settled.

    Attributes:
        environment: of this rank, in the new order.
        new_rank_of: new global rank of each of the launcher's ranks.
        speedup: predicted; None when nothing was predicted.
    """

    environment: ClusterEnvironment
    new_rank_of: tuple[int, ...]
    speedup: float | None

    def describe(self) -> str | None:
        """One line for a person; None when the launcher's order is kept."""
        old = sorted(range(len(self.new_rank_of)), key=self.new_rank_of.__getitem__)
        if old == list(range(len(old))):
            return None
        listed = " ".join(map(str, old[:16])) + (" ..." if len(old) > 16 else "")
        gain = f"; communication {self.speedup:.3g} times as fast by prediction" if self.speedup else ""
        return f"ranks reordered: the launcher's {listed} are now 0 to {len(old) - 1}{gain}"


def settle_order(
    environment: ClusterEnvironment,
    layout: Layout,
    options: OrderOptions,
    *,
    device: int | None,
    nodes: int,
    timeout: timedelta,
) -> Order | None:
    """Settle the order of the ranks of `environment`. Collective where there is something to settle; else None.

    Args:
        environment: as the launcher numbers its ranks.
        layout: need not be resolved; one that does not fit the job is left for others to refuse.
        options: see there.
        device: number of this rank's accelerator among those it sees; None for a rank on the CPU.
        nodes: number of nodes.
        timeout: how long ranks wait for each other.

    Raises:
        ValueError: the same on every rank: an order was asked for that cannot be had; tp or ep leaves the fast domain
            and the check is "error".
    """
    size = environment.world_size()
    looks = options.wanted or nodes > 1 or device is not None
    if size == 1 or not looks or (options.reorder is False and options.check == "off"):
        return None
    with same_on_every_rank():
        ours = _orderable(environment, options, timeout)
        if ours is None or not _fits(layout, size):
            return None
        if options.given is not None:
            ours.reorder(options.given)
            return Order(ours, options.given, None)
        plan = _plan(ours, layout, options, device)
    if plan is None:
        return Order(ours, tuple(range(size)), None)
    ours.reorder(plan.new_rank_of)
    if plan.misfits and options.check != "off":
        text = "; ".join(plan.misfits)
        if options.check == "error":
            raise mark_shared(ValueError(f"{text}. To run it all the same: topology='warn'"))
        _warn(ours, text)
    return Order(ours, plan.new_rank_of, plan.speedup)


def _orderable(
    environment: ClusterEnvironment, options: OrderOptions, timeout: timedelta
) -> ParallaxMPIEnvironment | PlacedEnvironment | None:
    ours: ParallaxMPIEnvironment | PlacedEnvironment | None
    if isinstance(environment, ParallaxMPIEnvironment):
        ours, why = (None, "has an order already") if environment.reordered else (environment, "")
    else:
        ours, why = PlacedEnvironment.around(environment, timeout), "is not one of a launcher that Parallax knows"
    if dist.is_initialized():
        ours, why = None, "is too late: the process group exists"
    if ours is None and options.wanted:
        raise ValueError(f"reorder_ranks={options.reorder!r}, but {type(environment).__name__} {why}: leave it out")
    return ours


def _fits(layout: Layout, size: int) -> bool:
    try:
        layout.resolve(size)
    except ValueError:
        return False
    return True


def _plan(
    environment: ParallaxMPIEnvironment | PlacedEnvironment, layout: Layout, options: OrderOptions, device: int | None
) -> Plan | None:
    from parallax.plugins.topology.job import job_plan

    comm = environment.communicator()
    keep = options.reorder is False
    if options.reorder == "measure":
        with _transport(environment) as transport:
            return job_plan(comm, device, layout, transport=transport)
    try:
        return job_plan(comm, device, layout, keep=keep)
    except ValueError as error:
        if options.wanted or options.check == "error":
            raise
        _warn(environment, f"ranks keep the launcher's order: {error}")
        return None


class _transport:  # noqa: N801 - used like a function
    """Messages between the launcher's ranks, for the time of a measurement: over MPI, or a passing gloo group."""

    def __init__(self, environment: ParallaxMPIEnvironment | PlacedEnvironment) -> None:
        self._environment = environment

    def __enter__(self) -> Any:
        from parallax.plugins.topology.measure import MpiTransport, TorchTransport

        if isinstance(self._environment, ParallaxMPIEnvironment):
            return MpiTransport(self._environment.communicator())
        comm = self._environment.communicator()
        dist.init_process_group("gloo", store=self._environment.store(), rank=comm.rank, world_size=comm.size)
        return TorchTransport()

    def __exit__(self, *error: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _warn(environment: ClusterEnvironment, text: str) -> None:
    if environment.global_rank() == 0:
        warnings.warn(text, stacklevel=2)
