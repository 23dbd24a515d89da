"""Give a module built under `deferred_init` its values: this rank's part of each, one whole tensor at a time.

It is: the walk over meta parameters, buffers and plain tensor attributes. It is not: how a value is computed
(`recording.py`), read (`pretrained.py`), or which part of it a rank holds (the plugins say, as `ParamShard`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallax.plugins.base import ParamShard
from parallax.strategies.module_tensors import named_tensors, replace_tensors
from parallax.strategies.recording import Recording

ShardOf = Callable[[str], ParamShard | None]


def materialize(
    module: nn.Module,
    recording: Recording,
    *,
    shard_of: ShardOf,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Replace every meta tensor of `module` by its value on `device`; real tensors stay as they are.

    A stored weight is read only in the ranges this rank holds. Anything else is computed whole, then cut: the peak
    is one whole tensor and what it is computed from. Tied tensors stay tied; `requires_grad` and Python attributes
    of parameters are kept.

    Args:
        module: this rank's part of the model, after plugins have dropped modules and cut parameters.
        recording: its recording, captured before they did.
        shard_of: FQN -> how the local tensor sits in the whole one; None where this rank holds all of it.
        seed: base seed of the initial values.
        dtype: cast floating-point parameters to it; buffers and attributes keep theirs.

    Raises:
        ValueError: a meta tensor of unknown origin, or a local shape that differs from the module's.
    """
    device = torch.device(device)
    made: dict[int, Tensor] = {}
    for fqn, tensor in named_tensors(module):
        if tensor.is_meta and id(tensor) not in made:
            cast = dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else None
            local = _local_value(fqn, recording, shard_of(fqn), seed, device)
            made[id(tensor)] = like(tensor, _checked(fqn, local, tensor).to(cast or tensor.dtype))
    replace_tensors(module, lambda tensor: made.get(id(tensor), tensor))
    left = [fqn for fqn, tensor in named_tensors(module) if tensor.is_meta]
    if left:
        raise ValueError(f"still on the meta device after materialisation: {', '.join(left)}")


def like(old: Tensor, value: Tensor) -> Tensor:
    """`value` as the successor of `old`: a Parameter for a Parameter, same requires_grad, same Python attributes."""
    new: Tensor = value.detach()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        new.requires_grad_(old.requires_grad)
    vars(new).update(vars(old))
    return new


def _local_value(fqn: str, recording: Recording, shard: ParamShard | None, seed: int, device: torch.device) -> Tensor:
    source = recording.source(fqn)
    if source is not None:
        return source.read(shard).to(device)
    whole = recording.replay(fqn, seed=seed, device=device)
    return whole if shard is None else shard.take(whole)


def _checked(fqn: str, local: Tensor, meta: Tensor) -> Tensor:
    if local.shape != meta.shape:
        raise ValueError(
            f"{fqn}: this rank's part of the initial value has shape {tuple(local.shape)}, the module expects "
            f"{tuple(meta.shape)}; the plugin that cut the parameter and its param_shard() disagree"
        )
    return local
