"""Context parallelism: one sequence over several ranks."""

from parallax.plugins.context.plugin import ContextParallel

__all__ = ["ContextParallel"]
