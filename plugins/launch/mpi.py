"""Lightning's view of processes started by mpirun, in an order of our own.

It is: the cluster environment for MPI. MPI serves the control plane only: who is there, who sits where, and where
to meet; tensors go over the process group made in `connect.py`. It is not: the decision which rank sits where,
which comes in as a permutation.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # not in its __all__

from parallax.plugins.launch import rendezvous
from parallax.plugins.launch.detect import MPILaunch, mpi_launch
from parallax.plugins.launch.errors import mark_shared, same_on_every_rank
from parallax.plugins.launch.placed import check_permutation
from parallax.plugins.launch.rank_zero import set_printing_rank

INSTALL = "pip install 'lightning-parallax[mpi]'"


def load_mpi(launch: MPILaunch | None) -> Any:
    """The module `mpi4py.MPI`, checked against what the launcher says.

    Raises:
        ValueError: mpi4py or an MPI library is missing, or the library does not belong to the mpirun that started
            this process (then every process believes that it is alone).
    """
    started = "" if launch is None else f"this process was started by {launch.launcher}'s launcher, but "
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise mark_shared(ValueError(f"{started}mpi4py cannot be imported ({error}): {INSTALL}")) from error
    except RuntimeError as error:  # raised by the import when there is no libmpi
        text = f"{started}mpi4py finds no MPI library ({str(error).splitlines()[0]}): {INSTALL}"
        raise mark_shared(ValueError(text)) from error
    size = MPI.COMM_WORLD.size
    alone = launch is not None and size == 1 and (launch.size or launch.rank + 1) > 1
    if launch is not None and (alone or launch.size not in (None, size)):
        library = MPI.Get_library_version().split("\x00")[0].splitlines()[0]
        raise mark_shared(
            ValueError(
                f"{launch.launcher}'s launcher started {launch.size or 'several'} processes, but the MPI library "
                f"({library.strip()}) sees {size}: mpirun and library are of different makes. Start with the mpirun "
                f"that belongs to the library: `parallax run -n {launch.size or 'N'} ...`, or the one in "
                f"{Path(sys.executable).parent}"
            )
        )
    return MPI


class ParallaxMPIEnvironment(ClusterEnvironment):
    """Processes started by mpirun. Making one is collective over MPI_COMM_WORLD, and so is the first `store`.

    Ranks are permuted, slots are not: `local_rank` stays the launcher's, because it picks the device, and because
    DeepSpeed insists that it equals OMPI_COMM_WORLD_LOCAL_RANK.

    Args:
        new_rank_of: the global rank of each MPI rank, the same list on every rank; None keeps MPI's order for now.
        timeout: how long ranks wait for the meeting point.

    Raises:
        ValueError: no usable MPI, or not a permutation.
    """

    def __init__(self, new_rank_of: Sequence[int] | None = None, timeout: timedelta = timedelta(minutes=5)) -> None:
        super().__init__()
        launch = mpi_launch()
        mpi = load_mpi(launch)
        world = mpi.COMM_WORLD
        self._world = world
        self._node = world.Split_type(mpi.COMM_TYPE_SHARED)
        self.local_size: int = self._node.size
        slot = None if launch is None else launch.local_rank
        self._local_rank: int = self._node.rank if slot is None else slot
        self._timeout = timeout
        self._meetings = 0
        self._meeting: rendezvous.Meeting | None = None
        self.reorder(range(world.size) if new_rank_of is None else new_rank_of)
        self.reordered = new_rank_of is not None

    def reorder(self, new_rank_of: Sequence[int]) -> None:
        """Take the ranks `new_rank_of` MPI's, the same list on every rank, before `store` is asked for. Collective.

        Nodes are numbered by their lowest rank.

        Raises:
            ValueError: not a permutation.
        """
        order = list(new_rank_of)
        with same_on_every_rank():
            check_permutation(order, self._world.size)
        assert self._meeting is None
        self._comm: Any = self._world.Split(0, key=order[self._world.rank])
        lowest = min(self._node.allgather(self._comm.rank))
        nodes = sorted(set(self._world.allgather(lowest)))
        self._node_rank = nodes.index(lowest)
        self.num_nodes = len(nodes)
        self.reordered = True
        set_printing_rank(self._comm.rank)  # mpirun sets none of the variables Lightning looks at

    def communicator(self) -> Any:
        """The MPI communicator of the launcher's order."""
        return self._world

    @property
    def comm(self) -> Any:
        """The MPI communicator in which rank and global rank agree."""
        return self._comm

    def store(self) -> Store:
        """A store all ranks share, empty for the n-th call on each rank. It lives until `teardown`.

        Collective the first time, as are `main_address` and `main_port`: so no port is open before it is needed.
        """
        self._meetings += 1
        return PrefixStore(f"meeting-{self._meetings}", self._meet().store)

    def _meet(self) -> rendezvous.Meeting:
        if self._meeting is None:
            self._meeting = rendezvous.meet(self._comm, one_node=self.num_nodes == 1, timeout=self._timeout)
        return self._meeting

    def teardown(self) -> None:
        """Close the store. The process group made from it must be gone; a later `store` opens a new one."""
        self._meeting = None

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._meet().address

    @property
    def main_port(self) -> int:
        return self._meet().port

    @staticmethod
    def detect() -> bool:
        launch = mpi_launch()
        return launch is not None and launch.is_parallel

    def world_size(self) -> int:
        return int(self._comm.size)

    def set_world_size(self, size: int) -> None:
        """MPI decides."""

    def global_rank(self) -> int:
        return int(self._comm.rank)

    def set_global_rank(self, rank: int) -> None:
        """The permutation decides; what Lightning computes from node and slot would undo it."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        as_started = (num_devices, num_nodes) == (self.local_size, self.num_nodes)  # nodes may be uneven
        if not as_started and num_devices * num_nodes != self.world_size():
            raise mark_shared(
                ValueError(
                    f"Trainer(devices={num_devices}, num_nodes={num_nodes}) asks for {num_devices * num_nodes} "
                    f"processes, but mpirun started {self.world_size()} on {self.num_nodes} node(s): leave both out, "
                    f"or start {num_devices * num_nodes} with mpirun -n"
                )
            )

    def __repr__(self) -> str:
        return (
            f"ParallaxMPIEnvironment(rank {self.global_rank()} of {self.world_size()}, slot {self._local_rank} of "
            f"{self.local_size} on {socket.gethostname()})"
        )
