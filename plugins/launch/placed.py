"""An order of our own for processes that torchrun, srun or Lightning started: what `mpi.py` is for mpirun.

It is: a cluster environment around the launcher's, with permuted ranks, and the talk of the ranks before there is a
process group, over the store at the launcher's meeting point. It is not: the decision which rank sits where.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # not in its __all__

from parallax.plugins.launch.errors import same_on_every_rank
from parallax.plugins.launch.rank_zero import set_printing_rank
from parallax.plugins.launch.shared_store import join_store
from parallax.plugins.topology.gather import store_exchange

KNOWN = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, LightningEnvironment)
"""Environments whose ranks come from a launcher, which has no opinion of their order beyond counting."""


class StoreCommunicator:
    """All-gather and broadcast of JSON values (sequences arrive as lists) over a store that only this object uses."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._exchange, self._calls = store, store_exchange(store, rank, size), count()

    def allgather(self, value: Any) -> list[Any]:
        return list(self._exchange(value))

    def bcast(self, value: Any, root: int = 0) -> Any:
        key = f"bcast/{next(self._calls)}"
        if self.rank == root:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._store.get(key))


class PlacedEnvironment(ClusterEnvironment):
    """Processes of another launcher, in an order of our own.

    Slots are not permuted: `local_rank` is the launcher's, because it picks the device. The store is where the
    launcher put it, whichever rank sits there now.

    Args:
        inner: knows its rank and size by now.
        timeout: how long ranks wait for each other.
    """

    def __init__(self, inner: ClusterEnvironment, timeout: timedelta) -> None:
        super().__init__()
        self.inner = inner
        self._timeout = timeout
        self._launched, self._size = inner.global_rank(), inner.world_size()
        self._rank, self._node_rank = self._launched, inner.node_rank()
        self._joined: Store | None = None
        self._meetings = 0

    @staticmethod
    def around(environment: ClusterEnvironment, timeout: timedelta) -> PlacedEnvironment | None:
        """None for an environment that is not one of `KNOWN`, such as one that a user has written."""
        return PlacedEnvironment(environment, timeout) if type(environment) in KNOWN else None

    def communicator(self) -> StoreCommunicator:
        """Between the ranks as the launcher numbers them. Collective."""
        return StoreCommunicator(self.store(), self._launched, self._size)

    def reorder(self, new_rank_of: Sequence[int]) -> None:
        """Take the ranks `new_rank_of` the launcher's, the same list on every rank. Collective.

        Nodes are numbered anew too, by their lowest rank.

        Raises:
            ValueError: not a permutation.
        """
        order = list(new_rank_of)
        with same_on_every_rank():
            check_permutation(order, self._size)
        self._rank = order[self._launched]
        nodes = self.communicator().allgather(self.inner.node_rank())
        first = {node: min(order[k] for k in range(self._size) if nodes[k] == node) for node in set(nodes)}
        self._node_rank = sorted(first, key=first.__getitem__).index(self.inner.node_rank())
        set_printing_rank(self._rank)

    def store(self) -> Store:
        """A store all ranks share, empty for the n-th call on each rank. It lives until `teardown`."""
        if self._joined is None:
            address = self.inner.main_address
            host = f"[{address}]" if ":" in address else address
            shared = join_store(f"tcp://{host}:{self.inner.main_port}", self._launched, self._size, self._timeout)
            # the launcher's store outlives this object: each rank counts there how many it has seen
            number = shared.add(f"parallax/joined/{self._launched}", 1)
            self._joined = PrefixStore(f"parallax/{number}", shared)
        self._meetings += 1
        return PrefixStore(f"meeting-{self._meetings}", self._joined)

    def teardown(self) -> None:
        """Leave the store. The process group made from it must be gone; a later `store` joins again."""
        self._joined = None
        self.inner.teardown()

    @property
    def creates_processes_externally(self) -> bool:
        return self.inner.creates_processes_externally

    @property
    def main_address(self) -> str:
        return self.inner.main_address

    @property
    def main_port(self) -> int:
        return self.inner.main_port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """The launcher decides."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """The permutation decides; what Lightning computes from node and slot would undo it."""

    def local_rank(self) -> int:
        return self.inner.local_rank()

    def node_rank(self) -> int:
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.inner.validate_settings(num_devices, num_nodes)

    def __repr__(self) -> str:
        return f"PlacedEnvironment(rank {self._rank} of {self._size}, launched as {self._launched} by {self.inner!r})"


def check_permutation(order: Sequence[int], size: int) -> None:
    """
    Raises:
        ValueError: `order` is not one of 0..size-1.
    """
    if sorted(order) != list(range(size)):
        raise ValueError(f"the order of the ranks must hold each of 0..{size - 1} once, got {list(order)}")
