"""Pretrained weights for a module that exists: each rank reads only the slices it holds.

It is: `load_pretrained`. It is not: `from_pretrained` inside `configure_model`, nor how Hugging Face models name
their weights (both `pretrained_hf.py`), nor the files themselves (`weight_files.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from parallax.strategies.materialize import ShardOf, like
from parallax.strategies.module_tensors import replace_tensors
from parallax.strategies.pretrained_hf import stored_names
from parallax.strategies.weight_files import WeightFiles, match


def load_pretrained(
    module: nn.Module,
    folder: str | Path,
    shard_of: ShardOf = lambda fqn: None,
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
) -> int:
    """Fill the parameters and persistent buffers of `module` from a folder; returns the bytes read.

    Real tensors are filled in place, meta ones are replaced by tensors on `device`; values are cast to the tensor's
    dtype. Keys are the module's own names, or, for a `transformers` model, what it maps to them.

    Args:
        shard_of: FQN -> how the module's tensor sits in the stored one; None where it is all of it.
        strict: keys the module has no tensor for are an error. False for a module of which parts were dropped.

    Raises:
        ValueError: names or shapes do not fit, all listed.
    """
    files = WeightFiles(folder)
    tensors: dict[str, Tensor] = {
        fqn: value for fqn, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }
    shards = {fqn: shard_of(fqn) for fqn in tensors}
    shapes = {fqn: shard.shape if shard else tuple(tensors[fqn].shape) for fqn, shard in shards.items()}
    names, missing_allowed = stored_names(module, files, tensors)
    made: dict[int, Tensor] = {}
    chosen = match(files, names, tensors, shapes=shapes, missing_allowed=missing_allowed, strict=strict)
    for fqn, key in chosen.items():
        target, local = tensors[fqn], files.read(key, shards[fqn])
        if target.is_meta:
            made[id(target)] = like(target, local.to(device, target.dtype))
        else:
            with torch.no_grad():
                target.copy_(local)
    replace_tensors(module, lambda tensor: made.get(id(tensor), tensor))
    return files.bytes_read
