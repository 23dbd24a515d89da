"""How processes come to be and find each other: launchers, cluster environments, the process group, errors of ranks.

It is: everything between the command a user types and an initialised `torch.distributed`. It is not: the mesh
(`strategies/mesh.py`) nor the choice of which rank sits where.
"""

from __future__ import annotations

from parallax.plugins.launch.choose import choose_environment, local_world_size
from parallax.plugins.launch.connect import Connection, init_distributed
from parallax.plugins.launch.errors import install_excepthook, mark_shared, same_on_every_rank
from parallax.plugins.launch.mpi import ParallaxMPIEnvironment
from parallax.plugins.launch.prepare import prepare_process

__all__ = [
    "Connection",
    "ParallaxMPIEnvironment",
    "choose_environment",
    "init_distributed",
    "install_excepthook",
    "local_world_size",
    "mark_shared",
    "prepare_process",
    "same_on_every_rank",
]
