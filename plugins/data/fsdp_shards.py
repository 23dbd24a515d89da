"""FSDP2 (`torch.distributed.fsdp.fully_shard`) applied to a module, and read.

It is: who is sharded over what, where the shares are, when units are gathered and reduced; with `fsdp_restore.py`
everything in this project that touches torch's bookkeeping of FSDP. It is not: the step (`fsdp.py`).

Gradients are summed: torch's own division happens once, twice or not at all, as dtype and group size have it, so its
factor is 1 and the engine divides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from parallax.plugins.data.base import T
from parallax.plugins.data.fsdp_restore import forget
from parallax.plugins.data.fsdp_traffic import CountedAllGather, CountedReduceScatter
from parallax.strategies.comm import AxisComm
from parallax.strategies.mesh import Mesh


class ShardedModule:
    """`module`, sharded over the data axis: each unit is gathered and reduced as one, and the root for the rest.

    A tensor is cut along its first dim, in equal parts of which the last ones may be padding or empty; one with fewer
    rows than there are ranks (the experts of a rank, say) along the first dim that divides.

    Args:
        module: the user's, with real tensors on `device`.
        units: modules in it, none inside another.
        group_of: the mesh group a parameter is shared over: "data", or "edp" for experts.
        keep: gather every weight once a step, at its first use, and let go of it when gradients are reduced (ZeRO-2);
            else around each forward and each backward of a unit (ZeRO-3). The root's own weights, which both ends of a
            model need, stay for the step in either case.
        prefetch: gather the next unit of a backward while one is computed; with several forwards in flight torch would
            gather the wrong one.
        early: reduce a unit's gradients in every backward, else once, in `reduce`.

    Attributes:
        params: name in `module` -> torch's record of the sharded parameter. Scalars, which cannot be cut, have none.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        *,
        mesh: Mesh,
        device: torch.device,
        group_of: Callable[[nn.Parameter], str],
        keep: bool,
        prefetch: bool,
        early: bool,
    ) -> None:
        self._root: Any = _Root(module)
        self._units: list[Any] = [*units, self._root]
        self._keep, self._early = keep, early
        before = dict(module.named_parameters(remove_duplicate=False))
        self._attributes = {name: dict(vars(p)) for name, p in before.items()}
        for param in before.values():
            param.data = param.data.contiguous()
        infos = {name: _mesh_info(mesh, name, device) for name in ("data", "edp")}

        def place(param: nn.Parameter) -> ShardPlacementResult:
            group = group_of(param)
            return ShardPlacementResult(Shard(dim_of(param.shape, mesh.size(group))), infos[group])

        for unit in self._units:
            fully_shard(
                unit,
                mesh=infos["data"].mesh,
                reshard_after_forward=not keep and unit is not self._root,
                shard_placement_fn=place,
                ignored_params={p for p in before.values() if not is_cut(p)},
            )
            if not prefetch:
                unit.set_modules_to_backward_prefetch([unit])
        self._comms: dict[Any, AxisComm] = {}
        for group in self._groups():
            comm = mesh["edp" if group.mesh_info is infos["edp"] else "data"]
            group._all_gather_comm, group._reduce_scatter_comm = CountedAllGather(comm), CountedReduceScatter(comm)
            group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True
            self._comms.update(dict.fromkeys(group.fsdp_params, comm))
        self._begin()
        records = {id(record.sharded_param): record for record in self._comms}
        after = module.named_parameters(remove_duplicate=False)
        self.params: dict[str, Any] = {name: records[id(p)] for name, p in after if id(p) in records}
        for name, record in self.params.items():
            for param in (record.sharded_param, record.unsharded_param):
                vars(param).update(self._attributes[name])

    def _groups(self) -> list[Any]:
        """Torch's parameter groups: of a unit, those shared over one group of ranks."""
        return [g for unit in self._units for g in fully_shard.state(unit)._fsdp_param_groups]  # type: ignore[attr-defined]

    @property
    def _state(self) -> Any:
        return fully_shard.state(self._root)  # type: ignore[attr-defined]

    def _begin(self) -> None:
        """Gather every unit once: what torch makes then could not be trained if it were made in inference mode."""
        self._state._lazy_init()
        self._root.set_reduce_scatter_unused_params(True)
        for unit in self._units:
            unit.unshard()
            unit.reshard()
        self._hold()

    def _hold(self) -> None:
        """Until the next `reduce`: gradients stay whole, unless early, and so do the weights that are kept."""
        self._root.set_requires_gradient_sync(self._early)
        self._root.set_reshard_after_backward(not self._keep)
        self._root.set_reshard_after_backward(False, recurse=False)

    # Running

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """`fn(*args)`, inside which the module's units can be called. Out of training nothing stays whole after."""
        result: T = self._root(fn, *args)
        if torch.is_inference_mode_enabled() or not (torch.is_grad_enabled() or self._root.module.training):
            self._root.reset_iter_state()  # a stage that will be recomputed is in training, and only without gradients
        return result

    def after_backward(self) -> None:
        """Make the parameters that hold this rank's whole gradients the module's, where their weights are put away.

        Their memory is released, their shape is not; plugins write into `param.grad`.
        """
        for record in self._comms if not self._early else ():
            record._setattr_on_modules(record.unsharded_param)

    def reduce(self) -> None:
        """Sum the gradients of every unit over its group, each rank receiving its share, and put all weights away."""
        if self._early:
            for unit in self._units:
                unit.reshard()
            return
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        self._state._root_post_backward_final_callback()
        for record in self._comms:
            record._setattr_on_modules(record.sharded_param)
        self._hold()

    # Shares

    def share(self, name: str) -> Tensor:
        """This rank's share of a parameter, as it lies in memory."""
        local: Tensor = self.params[name].sharded_param._local_tensor
        return local

    def take_grad(self, name: str) -> Tensor | None:
        """This rank's share of the reduced gradient; torch's own reference to it is dropped."""
        param = self.params[name].sharded_param
        grad: Tensor | None = None if param.grad is None else param.grad._local_tensor
        param.grad = None
        return grad

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's share of a tensor shaped as the whole parameter, a new tensor."""
        record = self.params[name]
        dim, comm = record.fsdp_placement.dim, self._comms[record]
        length = record.padded_sharded_param_size[dim]
        start = min(comm.index * length, whole.shape[dim])
        return whole.narrow(dim, start, min(length, whole.shape[dim] - start)).clone()

    def whole(self, name: str, share: Tensor) -> Tensor:
        """The whole tensor that `share` is this rank's share of, a new tensor. Collective over the parameter's axis."""
        record = self.params[name]
        dim, comm = record.fsdp_placement.dim, self._comms[record]
        padded = share.new_zeros(record.padded_sharded_param_size)
        padded.narrow(dim, 0, share.shape[dim]).copy_(share)
        parts = share.new_empty((comm.size, *padded.shape))
        comm.all_gather_into(parts, padded)
        return torch.cat(parts.unbind(0), dim).narrow(dim, 0, record._orig_size[dim]).clone()

    # The end

    def release(self, *, gather: bool) -> None:
        """Make the module an ordinary one. With `gather`, collective, its weights are whole; else they stay shares."""
        self._root.reset_iter_state()
        for name, record in {id(r): (n, r) for n, r in self.params.items()}.values():
            record.unsharded_param.grad = record.sharded_param.grad = None
            if gather:
                kept = record.sharded_param.requires_grad
                plain = nn.Parameter(self.whole(name, self.share(name)), requires_grad=kept)
                vars(plain).update(self._attributes[name])
                record._setattr_on_modules(plain)
        for unit in self._units:
            forget(unit, fully_shard.state(unit))  # type: ignore[attr-defined]


class _Root(nn.Module):
    """What FSDP takes for the model: its forward is whatever part of a step runs now."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)


def is_cut(param: nn.Parameter) -> bool:
    """Whether FSDP can share `param` out: a scalar has no dim, and an empty tensor nothing to share."""
    return bool(param.dim() and param.numel())


def dim_of(shape: Sequence[int], size: int) -> int:
    """The dim a tensor of `shape` is cut along over `size` ranks."""
    fitting = (dim for dim, length in enumerate(shape) if length % size == 0)
    return 0 if shape[0] >= size else next(fitting, 0)


def _mesh_info(mesh: Mesh, name: str, device: torch.device) -> FSDPMeshInfo:
    return FSDPMeshInfo(DeviceMesh.from_group(mesh.real_group(name), device.type), shard_mesh_dim=0)
