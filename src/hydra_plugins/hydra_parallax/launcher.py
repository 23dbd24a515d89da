"""`hydra/launcher=parallax`: each job of a sweep is a process group of its own.

It is: the launcher's options and the class Hydra makes. It is not: how jobs run (`parallax.plugins.sweep.launcher`).
"""

# No postponed annotations here: Hydra runs this file before it is in sys.modules, where dataclasses look for them.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class ParallaxLauncherConf:
    """Options of `hydra/launcher=parallax`."""

    _target_: str = "hydra_plugins.hydra_parallax.launcher.ParallaxLauncher"

    jobs: int = 1
    """Most jobs at the same time. Jobs that share a machine slow each other down, so their times are worth less.
    Unit: jobs."""

    slots: int | None = None
    """Most ranks at the same time; a job that needs more runs alone. Unit: ranks. Default None: the GPUs, else the
    cores, of this machine."""

    time_limit: float | None = 1800.0
    """After which a job is ended and recorded as "timeout"; null for none. Unit: seconds."""

    hang_limit: float | None = None
    """After which a job whose rank is stopped or unreachable is ended. Unit: seconds. Default None: not looked at."""

    retry_failed: bool = False
    """Whether a resumed sweep runs its failed jobs again."""

    objective: str = "step_time_s"
    """The number of a job's record that a sweeper such as optuna sees; of a failed job it sees infinity."""


class ParallaxLauncher(Launcher):
    """Runs jobs under mpirun or torchrun; see `parallax.plugins.sweep.launcher.SweepLauncher`."""

    def __init__(self, **options: Any) -> None:
        from parallax.plugins.sweep.launcher import Options, SweepLauncher

        self._launcher = SweepLauncher(Options(**options))

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launcher.setup(hydra_context.config_loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self._launcher.launch(job_overrides, initial_job_idx)


ConfigStore.instance().store(group="hydra/launcher", name="parallax", node=ParallaxLauncherConf, provider="parallax")
