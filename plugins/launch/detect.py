"""Who started this process, read from environment variables alone.

It is: pure functions of a mapping of variables; nothing is imported, no MPI is started. It is not: the cluster
environment built from the answer (`mpi.py`, `choose.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MPILaunch:
    """What an MPI launcher says about this process.

    Attributes:
        launcher: "Open MPI", "MPICH", "Intel MPI" (both use Hydra; Intel's sets I_MPI_ variables) or "PMIx".
        rank: rank in MPI_COMM_WORLD.
        size: size of MPI_COMM_WORLD; None when the launcher does not say (PMIx alone).
        local_rank: slot on this node; None when the launcher does not say.
    """

    launcher: str
    rank: int
    size: int | None
    local_rank: int | None

    @property
    def is_parallel(self) -> bool:
        """More than one process, or a launcher that does not tell."""
        return self.size is None or self.size > 1


def mpi_launch(environ: Mapping[str, str] | None = None) -> MPILaunch | None:
    """The MPI launcher that started this process, None when there is none.

    `srun` alone also sets PMI and PMIx variables; it counts as Slurm, not as MPI. Inside a Slurm allocation
    mpirun starts its daemons with srun, so Slurm's variables alone do not say who started the process.
    """
    env = os.environ if environ is None else environ
    if "OMPI_COMM_WORLD_SIZE" in env and "OMPI_COMM_WORLD_RANK" in env:
        return MPILaunch(
            "Open MPI",
            int(env["OMPI_COMM_WORLD_RANK"]),
            int(env["OMPI_COMM_WORLD_SIZE"]),
            _optional(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        )
    if "PMI_RANK" in env and "PMI_SIZE" in env and "MPI_LOCALNRANKS" in env:
        intel = any(key.startswith("I_MPI_") and key != "I_MPI_ROOT" for key in env)  # ROOT: merely installed
        name = "Intel MPI" if intel else "MPICH"
        return MPILaunch(name, int(env["PMI_RANK"]), int(env["PMI_SIZE"]), _optional(env, "MPI_LOCALRANKID"))
    if "PMIX_RANK" in env and "SLURM_STEP_ID" not in env:
        return MPILaunch("PMIx", int(env["PMIX_RANK"]), None, None)
    return None


def torchelastic(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun started this process."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env


def launched_rank(environ: Mapping[str, str] | None = None) -> tuple[int, int | None] | None:
    """(global rank, number of processes or None if unknown) as the launcher numbers them; None without a launcher.

    The innermost launcher counts: mpirun may start torchrun, never the other way round. Processes that
    Lightning's own launcher starts carry LOCAL_RANK and NODE_RANK; their parent, rank 0, carries nothing.
    """
    env = os.environ if environ is None else environ
    if torchelastic(env):
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    if (mpi := mpi_launch(env)) is not None and mpi.is_parallel:
        return mpi.rank, mpi.size
    if "RANK" in env:
        return int(env["RANK"]), _optional(env, "WORLD_SIZE")
    if "LOCAL_RANK" in env:
        local, node, world = int(env["LOCAL_RANK"]), int(env.get("NODE_RANK", 0)), _optional(env, "WORLD_SIZE")
        # the number of processes per node is not told: on later nodes only "not rank 0" is certain
        return (local if node == 0 else max(1, local)), world
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env:
        return int(env["SLURM_PROCID"]), _optional(env, "SLURM_NTASKS")
    return None


def _optional(env: Mapping[str, str], key: str) -> int | None:
    value = env.get(key)
    return None if value is None else int(value)
