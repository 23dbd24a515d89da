"""The DeepSpeed configuration this project runs with, and the sizes in it that follow from the model.

It is: one function from (stage, dtype, model size) to DeepSpeed's config dict. It is not: a way to pass
DeepSpeed options through; whatever DeepSpeed could do besides sharding (accumulating, scaling, clipping,
scheduling, mixed precision) is done by the engine or the strategy and switched off here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MAX_BUCKET = 2**25
"""Elements of the largest reduction buffer (128 MiB of fp32)."""
MAX_PREFETCH = 5 * 10**7
MAX_PERSISTENT = 10**5
NEVER = 2**31 - 1


@dataclass(frozen=True)
class ModelSize:
    """Number of elements of a rank's trainable parameters: of all, and of the largest one."""

    total: int
    largest: int


def zero_config(stage: int, dtype: torch.dtype, size: ModelSize, *, cuda: bool) -> dict[str, Any]:
    """DeepSpeed's config for ZeRO `stage` (1 to 3) over trainable parameters of `dtype`.

    Every key that has a default with an effect on the numbers is written out: in 0.19.8 an absent
    `gradient_clipping` clips at 1.0.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,  # never used: batches are the strategy's
        "gradient_accumulation_steps": 1,  # micro-batches are ours
        "gradient_clipping": 0.0,  # the engine clips: fp64 norm over exactly the owned parameters
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "prescale_gradients": False,
        "steps_per_print": NEVER,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},  # they synchronise the device every step
        "fp16": {"enabled": False},
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": False},
        "data_types": {"keep_in_fp32_modules": []},  # dtypes of buffers are the strategy's
        "zero_optimization": _sharding(stage, dtype, size, cuda),
    }


def _sharding(stage: int, dtype: torch.dtype, size: ModelSize, cuda: bool) -> dict[str, Any]:
    bucket = min(max(size.total, 1), MAX_BUCKET)
    common = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "contiguous_gradients": True,
        "overlap_comm": stage == 3 and cuda,  # stages 1, 2 reduce once, after the last backward: nothing to overlap
        "reduce_scatter": dtype != torch.float64,  # refused for fp64, which is all-reduced: same values, more bytes
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
        "memory_efficient_linear": False,  # would replace torch.nn.functional.linear for the whole process
        "override_module_apply": False,  # likewise nn.Module.apply
    }
    if stage < 3:
        return common
    return common | {
        # The defaults are absolute numbers that keep a model below 1e9 elements whole. Small parameters stay whole
        # as long as all of them together are a small part of the model: a thousandth each at most.
        "stage3_param_persistence_threshold": min(size.total // 1000, MAX_PERSISTENT),
        "stage3_prefetch_bucket_size": min(max(size.largest, size.total // 20), MAX_PREFETCH),
        "stage3_max_live_parameters": max(2 * size.largest, size.total // 4, 1),
        "stage3_max_reuse_distance": size.largest,
        "leaf_module": {"classes": []},  # the default gathers a block of experts as one in three models of transformers
    }
