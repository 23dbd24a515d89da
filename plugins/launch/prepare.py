"""What `import parallax` does for a process that a launcher has started, before any Trainer exists.

It is: the right rank for Lightning's rank-zero messages, the excepthook, and a named strategy that gets our cluster
environment. It is not: a start of MPI or of a process group; nothing here communicates.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from functools import wraps
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from parallax.plugins.launch.choose import choose_environment
from parallax.plugins.launch.detect import launched_rank, mpi_launch
from parallax.plugins.launch.errors import install_excepthook
from parallax.plugins.launch.rank_zero import set_printing_rank

_WRAPPED = "_parallax_strategies"


def prepare_process(strategies: Collection[str]) -> None:
    """Call once from the package's `__init__`; calling it again does nothing more.

    Args:
        strategies: the names under which Parallax is registered with Lightning.
    """
    place = launched_rank()
    if place is not None:
        set_printing_rank(place[0])  # Lightning does not know mpirun's variables: every rank would be "zero"
    install_excepthook()
    if mpi_launch() is not None:
        widen_terminal()
    use_own_environment(strategies)


def widen_terminal(columns: int = 110) -> None:
    """Give a terminal that claims to be 0 columns wide some width.

    Open MPI connects the output of each rank to such a terminal, and progress bars cut their lines to nothing there.
    """
    if not sys.stdout.isatty() or os.get_terminal_size(sys.stdout.fileno()).columns:
        return
    import fcntl
    import struct
    import termios

    size = struct.pack("HHHH", 24, int(os.environ.get("COLUMNS", columns)), 0, 0)
    fcntl.ioctl(sys.stdout.fileno(), termios.TIOCSWINSZ, size)


def use_own_environment(strategies: Collection[str]) -> None:
    """Make `Trainer(strategy=<one of these names>)` ask `choose_environment` instead of Lightning's own list.

    A strategy given by name is made only after Lightning has chosen an environment, and choosing may already end
    the program: it imports mpi4py (RuntimeError without an MPI library) and takes mpirun in a Slurm allocation for
    srun. Written against lightning 2.6; other strategies are left alone, and so is an environment given as a plugin.
    """
    original = _AcceleratorConnector._choose_and_init_cluster_environment
    if hasattr(original, _WRAPPED):
        getattr(original, _WRAPPED).update(strategies)
        return
    names = set(strategies)

    @wraps(original)
    def choose(self: Any) -> ClusterEnvironment:
        given = isinstance(self._cluster_environment_flag, ClusterEnvironment)
        if not given and isinstance(self._strategy_flag, str) and self._strategy_flag in names:
            return choose_environment()
        return original(self)

    setattr(choose, _WRAPPED, names)
    _AcceleratorConnector._choose_and_init_cluster_environment = choose  # type: ignore[method-assign]
