"""Tensor parallelism: matrices cut over the ranks of the axis "tp" (Shoeybi et al. 2019, "Megatron-LM")."""

from parallax.plugins.tensor.plugin import TensorParallel

__all__ = ["TensorParallel"]
