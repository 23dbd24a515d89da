"""Join the process group of the job, whatever started it, and leave it again.

It is: one call for every cluster environment, and the few variables that torch and DeepSpeed read, put back on
`close`. It is not: the mesh; groups along axes are made from what this sets up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # not in its __all__

from parallax.plugins.launch.mpi import ParallaxMPIEnvironment
from parallax.plugins.launch.placed import PlacedEnvironment
from parallax.plugins.launch.shared_store import join_store


@dataclass
class Connection:
    """This process's membership in the process group of the world.

    Attributes:
        rank, world_size: as torch numbers them.
        owned: whether `init_distributed` made the group; a group that was already there is left alone.
    """

    rank: int
    world_size: int
    owned: bool
    _before: dict[str, str | None] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Destroy the group and put the variables back. A second call does nothing."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
        self.owned = False
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._before.clear()


def init_distributed(environment: ClusterEnvironment, backend: str, timeout: timedelta) -> Connection:
    """Make the process group of the world, or check the one that is there and leave everything as it is.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All five are needed: when one is missing, DeepSpeed
    looks MPI up by itself, with MPI's ranks. Use `deepspeed.init_distributed(auto_mpi_discovery=False)` after it.

    Args:
        environment: knows its global rank and world size (Lightning's own after `set_global_rank`).
        backend: "gloo", "nccl", ...
        timeout: of every collective.

    Raises:
        ValueError: a group exists already with other ranks than the environment's.
        RuntimeError: the peers were not there within `timeout`.
    """
    rank, size = environment.global_rank(), environment.world_size()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise ValueError(
                f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"{type(environment).__name__} says rank {rank} of {size}: destroy that process group first"
            )
        return Connection(rank, size, owned=False)
    wanted = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(environment.local_rank()),
        "MASTER_ADDR": environment.main_address,
        "MASTER_PORT": str(environment.main_port),
    }
    if isinstance(environment, (ParallaxMPIEnvironment, PlacedEnvironment)):
        wanted["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # whoever else reads these joins our store and opens none
    connection = Connection(rank, size, True, {key: os.environ.get(key) for key in wanted})
    os.environ.update(wanted)
    try:
        _join(environment, backend, timeout, rank, size)
    except BaseException:
        connection.close()
        raise
    if dist.get_rank() != environment.global_rank():
        raise RuntimeError(f"torch has given rank {dist.get_rank()} to the process of rank {environment.global_rank()}")
    return connection


def _join(environment: ClusterEnvironment, backend: str, timeout: timedelta, rank: int, size: int) -> None:
    if isinstance(environment, (ParallaxMPIEnvironment, PlacedEnvironment)):
        store = environment.store()
    else:
        store = PrefixStore("default_pg", join_store("env://", rank, size, timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
