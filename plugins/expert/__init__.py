"""Expert parallelism: whole experts on different ranks, tokens sent to them and back."""

from parallax.plugins.expert.plugin import ExpertParallel

__all__ = ["ExpertParallel"]
