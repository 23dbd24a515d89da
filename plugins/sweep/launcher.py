"""The work of `hydra/launcher=parallax`: what a sweeper proposes is filtered, run, recorded and shown.

It is: the meeting of Hydra's sweep with the filter, the folder and the runner. It is not: a sweeper: Hydra's own,
optuna and others propose the points, of a space from which the impossible ones have gone.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from parallax.conf.reading import explain, read, relative_paths
from parallax.conf.schema import RunConf
from parallax.plugins.launch.watchdog import Limits
from parallax.plugins.sweep.filter import Filter, Point
from parallax.plugins.sweep.folder import SweepFolder, read_record
from parallax.plugins.sweep.job import Program, job_command
from parallax.plugins.sweep.page import write_page
from parallax.plugins.sweep.places import Places
from parallax.plugins.sweep.progress import Progress
from parallax.plugins.sweep.results import MORE_IS_BETTER
from parallax.plugins.sweep.runner import Runner
from parallax.plugins.sweep.space import space


@dataclass(frozen=True)
class Options:
    """As in `hydra_plugins.hydra_parallax.launcher.ParallaxLauncherConf`."""

    jobs: int = 1
    slots: int | None = None
    time_limit: float | None = 1800.0
    hang_limit: float | None = None
    retry_failed: bool = False
    objective: str = "step_time_s"

    def __post_init__(self) -> None:
        for name in ("jobs", "slots", "time_limit", "hang_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"hydra.launcher.{name}={value} must be at least 1")


class SweepLauncher:
    """One sweep. `setup` once, then `launch` for every batch of points."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._limits = Limits(options.time_limit, options.hang_limit)
        self._progress = Progress(sys.stdout)
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._shown = False

    def setup(self, loader: Any, config: DictConfig) -> None:
        """Check the sweep as a whole and take impossible values out of its space, before any sweeper reads it.

        Raises:
            ValueError: nothing is left, another sweep's folder, a missing launcher, or paths that would not be found.
        """
        self._loader, self._config, self._filter = loader, config, Filter()
        _refuse(config)
        self._program = _program()
        arguments: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        params = OmegaConf.select(config, "hydra.sweeper.params") or {}
        try:
            self._space = space(dict(params), arguments, loader)
            points = [self._point(overrides) for overrides in self._space.points()]
        except OmegaConfBaseException as error:
            raise explain(error) from None
        kept = self._filter.sift(points)
        self._progress.dropped(points)
        if points and not kept:
            raise ValueError("the sweep is empty: every point was dropped (the reasons are above)")
        if kept:
            self._check(kept[0])
        left = self._space.narrowed([point.overrides for point in kept]) if points else {}
        others = [text for text in arguments if text.partition("=")[0] not in left]
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = [*others, *left.values()]
        identity = {"script": " ".join(self._program.script), "arguments": arguments}
        self._folder = SweepFolder(Path(config.hydra.sweep.dir), identity)
        places = Places(self._slots(config), self._devices(config), self._options.jobs)
        self._runner = Runner(self._folder, self._program, self._limits, places, self._progress)
        self._progress.resumed(sum(self._is_done(point) for point in kept), self._folder.path)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run these points, except those that are impossible, repeated, or have a record already."""
        points = [self._point(tuple(overrides)) for overrides in job_overrides]
        wanted: dict[str, tuple[int, Point]] = {}
        for number, point in enumerate(points, initial_job_idx):
            self._filter.judge(point)
            if point.layout is not None and not self._is_done(point):
                wanted.setdefault(point.digest, (number, point))
        self._runner.run(list(wanted.values()))
        if wanted or not self._shown:
            self._progress.say(f"sweep: results in {write_page(self._folder.path)}")
            self._shown = True
        return [self._return(point) for point in points]

    def close(self) -> None:
        """Give the sweep's folder free; the end of the process does so too."""
        self._folder.close()

    def _is_done(self, point: Point) -> bool:
        record = read_record(self._folder.job(point))
        return record is not None and (record["status"] == "ok" or not self._options.retry_failed)

    def _point(self, overrides: tuple[str, ...]) -> Point:
        if overrides not in self._composed:
            self._composed[overrides] = self._loader.load_sweep_config(self._config, list(overrides))
        return Point(overrides, self._composed[overrides], self._space.varied(overrides))

    def _return(self, point: Point) -> JobReturn:
        """What the sweeper sees. A job that failed, or was impossible, is as bad as can be; it ends nothing."""
        record = read_record(self._folder.job(point)) if point.layout is not None else None
        name = self._options.objective
        worst = -math.inf if name in MORE_IS_BETTER else math.inf
        value = record.get(name, worst) if record is not None and record["status"] == "ok" else worst
        done = JobReturn(overrides=list(point.overrides), cfg=point.config, status=JobStatus.COMPLETED)
        done.return_value = float(value)
        return done

    def _check(self, point: Point) -> None:
        """That a job could be started at all."""
        job_command(self._program, point, Path("."), self._limits)
        if self._options.jobs > 1 and OmegaConf.select(point.config, "cluster.hostfile") is not None:
            raise ValueError("hydra.launcher.jobs=1 is needed with cluster.hostfile: each job takes all machines")

    def _devices(self, config: DictConfig) -> tuple[str, ...]:
        """The GPUs to share out, when several jobs run at the same time and train on them."""
        if self._options.jobs == 1 or OmegaConf.select(config, "trainer.accelerator") == "cpu":
            return ()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return tuple(shown.split(",")) if shown else tuple(str(i) for i in range(torch.cuda.device_count()))

    def _slots(self, config: DictConfig) -> int:
        return self._options.slots or len(self._devices(config)) or os.cpu_count() or 1


def _refuse(config: DictConfig) -> None:
    """Raise ValueError for settings of Hydra that a sweep of processes cannot follow."""
    if OmegaConf.select(config, "output_dir") is not None:
        raise ValueError("output_dir is the job's folder in a sweep: leave it out, and set hydra.sweep.dir instead")
    if config.hydra.mode != RunMode.MULTIRUN:
        raise ValueError("hydra/launcher=parallax runs sweeps: add --multirun")
    if config.hydra.job.chdir and OmegaConf.get_type(config) is RunConf:
        for name, path in relative_paths(read(config)):
            raise ValueError(
                f"{name}={path} is relative, and hydra.job.chdir=True runs each job in a folder of its own: write "
                f"{name}={path.absolute()}, or leave hydra.job.chdir out"
            )


def _program() -> Program:
    """How this sweep was started, without its points: the script, and Hydra's flags that choose the configuration."""
    import __main__

    spec = getattr(__main__, "__spec__", None)
    script = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [os.path.abspath(sys.argv[0])]
    flags = []
    for index, text in enumerate(sys.argv[1:], 1):
        name, equals, _ = text.partition("=")
        if name in ("--config-name", "-cn", "--config-dir", "-cd", "--config-path", "-cp"):
            flags += [text] if equals else sys.argv[index : index + 2]
    return Program(script, flags)
