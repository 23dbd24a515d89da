"""The whole model's weights and optimizer state, as one process has them, put together from the parts of all ranks.

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


class Export:
    """Puts tensors together from the parts of all ranks; what it gives is whole on rank 0 and empty elsewhere.

    Collective over the world.

    Args:
        module: this rank's part of the uncut module.
        data: holds its parameters.
        shard_of: how a parameter sits in the whole one.
        averaged_over: the mesh group that holds replicas of it.
    """

    def __init__(
        self,
        module: nn.Module,
        data: DataEngine,
        *,
        mesh: Mesh,
        shard_of: Callable[[str], ParamShard | None],
        averaged_over: Callable[[str], str],
    ) -> None:
        self._module, self._data, self._mesh = module, data, mesh
        self._shard_of, self._averaged_over = shard_of, averaged_over

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the uncut module, on the CPU."""
        module = self._module
        params = {fqn for fqn, _ in module.named_parameters(remove_duplicate=False)}
        kept = module.state_dict().keys()
        buffers = {fqn: buffer for fqn, buffer in module.named_buffers() if fqn in kept}
        out: dict[str, Tensor] = {}
        for fqn in self._everyones({*params & kept, *buffers}):
            if fqn in buffers:
                self._collect(out, fqn, (None, buffers[fqn].cpu()))
            else:
                self._collect(out, fqn, self._part(fqn, self._data.full_param(fqn)) if fqn in params else None)
        return out

    @torch.no_grad()
    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Name of a parameter -> what the optimizer keeps in its shape (Adam's moments), on the CPU."""
        names = {fqn for fqn, _ in self._module.named_parameters()}
        out: dict[str, dict[str, Tensor]] = {}
        for fqn in self._everyones(names):
            mine = self._data.full_state(fqn) if fqn in names else {}
            whole: dict[str, Tensor] = {}
            for key in self._everyones(set(mine)):
                self._collect(whole, key, self._part(fqn, mine[key]) if key in mine else None)
            if whole:
                out[fqn] = whole
        return out

    def _everyones(self, names: set[str]) -> list[str]:
        return sorted({name for found in self._mesh["control"].gather_objects([*names]) for name in found})

    def _part(self, fqn: str, local: Tensor) -> tuple[ParamShard | None, Tensor] | None:
        """This rank's part and how it sits in the whole; None when another rank brings the same."""
        shard = self._shard_of(fqn)
        counts = self._mesh.index(self._averaged_over(fqn)) == 0
        if not counts or (self._mesh.index("tp") != 0 and (shard is None or shard.dim is None)):
            return None
        return shard, local.cpu()

    def _collect(self, out: dict[str, Tensor], key: str, part: tuple[ParamShard | None, Tensor] | None) -> None:
        for shard, tensor in filter(None, self._mesh["control"].gather_objects(part)):
            if self._mesh.rank == 0:
                shard = shard or ParamShard(tuple(tensor.shape))
                shard.put(out.setdefault(key, tensor.new_empty(shard.shape)), tensor)
