"""Pipeline parallelism: schedules as data, one executor, the user's step unchanged."""

from parallax.plugins.pipeline.plugin import PipelineParallel

__all__ = ["PipelineParallel"]
