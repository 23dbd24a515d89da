"""Which cluster environment serves this process, and how many processes its node has.

It is: one decision, made from environment variables before anything is imported or started. It is not: the
environments themselves (`mpi.py` and Lightning's own).
"""

from __future__ import annotations

import os
import re

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from parallax.plugins.launch.detect import torchelastic
from parallax.plugins.launch.mpi import ParallaxMPIEnvironment
from parallax.plugins.launch.placed import PlacedEnvironment


def choose_environment() -> ClusterEnvironment:
    """The environment of the innermost launcher: torchrun, then mpirun, then Slurm or LSF, else Lightning's own.

    Under mpirun this is collective. Lightning itself asks Slurm before MPI and so mistakes mpirun inside an
    allocation for srun, and it imports mpi4py to find out whether there is MPI.

    Raises:
        ValueError: started by mpirun without a usable mpi4py; see `load_mpi`.
    """
    if torchelastic():
        return TorchElasticEnvironment()
    if ParallaxMPIEnvironment.detect():
        return ParallaxMPIEnvironment()
    if SLURMEnvironment.detect():
        return SLURMEnvironment()
    if LSFEnvironment.detect():
        return LSFEnvironment()
    return LightningEnvironment()


def local_world_size(environment: ClusterEnvironment) -> int | None:
    """Number of processes the launcher has started on this node; None when no launcher has decided it.

    With `Trainer(devices="auto")` on CPU, Lightning takes one device; under a launcher the number of devices must be
    this one.
    """
    if isinstance(environment, PlacedEnvironment):
        return local_world_size(environment.inner)
    if isinstance(environment, ParallaxMPIEnvironment):
        return environment.local_size
    if isinstance(environment, TorchElasticEnvironment):
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if isinstance(environment, SLURMEnvironment):
        return _slurm_tasks(environment.node_rank())
    return None


def node_count(environment: ClusterEnvironment, asked: int) -> int:
    """Number of nodes of the job; `asked` (the Trainer's num_nodes) where no launcher tells.

    It only has to be right about one or more.
    """
    if isinstance(environment, ParallaxMPIEnvironment):
        return environment.num_nodes
    here = local_world_size(environment)
    return asked if here is None else -(-environment.world_size() // here)


def _slurm_tasks(node: int) -> int | None:
    """Tasks of this step on node `node`, from the list Slurm writes as "4(x2),3"."""
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE")
    if listed is None:
        per_node = os.environ.get("SLURM_NTASKS_PER_NODE")
        return None if per_node is None else int(per_node)
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return counts[node]
