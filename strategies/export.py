"""The whole model's weights, as one process has them, put together from the parts of all ranks.

It is: the collection of tensors cut over tp, etp, ep and ZeRO and spread over stages, one parameter at a time, on
rank 0. It is not: a checkpoint to resume from, which every rank writes for itself (`checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parallax.plugins.base import ParamShard
from parallax.plugins.data.base import DataEngine
from parallax.strategies.mesh import Mesh


@torch.no_grad()
def whole_state_dict(
    module: nn.Module,
    data: DataEngine,
    *,
    mesh: Mesh,
    shard_of: Callable[[str], ParamShard | None],
    averaged_over: Callable[[str], str],
) -> dict[str, Tensor]:
    """On rank 0 the state dict of the uncut `module`, on the CPU; empty elsewhere. Collective over the world.

    Args:
        module: this rank's part.
        data: holds its parameters.
        shard_of: how a parameter sits in the whole one.
        averaged_over: the mesh group that holds replicas of it.
    """
    params = {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)}
    kept = module.state_dict().keys()
    buffers = {fqn: buffer for fqn, buffer in module.named_buffers() if fqn in kept}
    out: dict[str, Tensor] = {}
    everyones = mesh["control"].gather_objects([*params & kept, *buffers])
    for fqn in sorted({fqn for names in everyones for fqn in names}):
        part: tuple[ParamShard | None, Tensor] | None = None
        if fqn in buffers:
            part = None, buffers[fqn].cpu()
        elif fqn in params:
            local, shard = data.full_param(fqn), shard_of(fqn)
            counts = mesh.index(averaged_over(fqn)) == 0
            if counts and (mesh.index("tp") == 0 or (shard is not None and shard.dim is not None)):
                part = shard, local.cpu()
        for shard, tensor in filter(None, mesh["control"].gather_objects(part)):
            if mesh.rank == 0:
                shard = shard or ParamShard(tuple(tensor.shape))
                shard.put(out.setdefault(fqn, tensor.new_empty(shard.shape)), tensor)
    return out
