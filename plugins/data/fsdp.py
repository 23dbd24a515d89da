"""The data engine on torch's own FSDP2: weights, gradients and optimizer states sharded over the data axis.

It is: `torch.distributed.fsdp.fully_shard` on the blocks of the model, driven so that several forwards may be in
flight, plugins find whole gradients, and norm, clipping, loss scale and fp32 main weights are those of the other
engines. It is not: FSDP's own mixed precision, offloading or clipping.

At zero_stage 3 the weights of a block are gathered for its forward and again for its backward, and its gradients are
reduced in each backward, or after the last one where a plugin has to complete them. At 2 weights are gathered and
gradients reduced once a step: fewer bytes, more memory. Between steps a rank holds its share only, at both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.plugins.data.base import WIDE, Clip, DataEngine, StepResult, T
from parallax.plugins.data.buckets import GradBuckets
from parallax.plugins.data.checks import check_optimizer, one_dtype
from parallax.plugins.data.clipping import apply_plan, plan_step
from parallax.plugins.data.fsdp_units import find_units
from parallax.plugins.data.masters import MasterWeights
from parallax.plugins.data.state import cloned, load_tensors, trained_names
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale
from parallax.strategies.theory import Case, Expected


class FSDPEngine(DataEngine):
    """FSDP2 over `mesh["data"]`, and over "edp" for experts.

    The user's optimizer works on this rank's shares as plain tensors; of narrow ones it has fp32 copies. A parameter
    that no backward reached counts as having a zero gradient. Data ranks run the same blocks in every step, since a
    block is gathered when it is called. Without an optimizer nothing is sharded.
    """

    name: ClassVar[str] = "fsdp"
    zero_stages: ClassVar[tuple[int, ...]] = (2, 3)

    @classmethod
    def check(cls, layout: Layout) -> None:
        if layout.zero_stage not in cls.zero_stages:
            raise ValueError(
                f"data engine 'fsdp' shards weights, gradients and optimizer states; the layout asks for zero_stage "
                f"{layout.zero_stage}. Write 'zero3 fsdp' (weights gathered for each forward and backward of a block) "
                f"or 'zero2 fsdp' (gathered once a step), or use 'zero{layout.zero_stage}' without 'fsdp'"
            )
        from torch.distributed import fsdp

        if not hasattr(getattr(fsdp, "FSDPModule", None), "set_reduce_scatter_unused_params"):
            raise ValueError(
                f"data engine 'fsdp' needs torch 2.13 or later, torch {torch.__version__} is installed; upgrade it or "
                f"use 'zero{layout.zero_stage}' without 'fsdp'"
            )

    def setup(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        *,
        mesh: Mesh,
        layout: Layout,
        owned: Callable[[str], bool],
        averaged_over: Callable[[str], str] = lambda fqn: "data",
        scale: LossScale | None = None,
    ) -> None:
        self.module, self.optimizer, self.mesh, self.scale = module, optimizer, mesh, scale
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.sharded: Any = None
        self.trained: dict[str, nn.Parameter] = {}
        self.buckets: list[GradBuckets] = []
        if optimizer is None:
            return
        from parallax.plugins.data.fsdp_shards import ShardedModule, is_cut

        check_optimizer(optimizer)
        whole = {n: p for n, p in trained_names(module, optimizer).items() if p.numel()}
        one_dtype(whole)
        groups: dict[Tensor, str] = {p: averaged_over(name) for name, p in module.named_parameters()}
        self.sharded = ShardedModule(
            module,
            find_units(module),
            mesh=mesh,
            device=self.device,
            group_of=groups.__getitem__,
            keep=layout.zero_stage == 2,
            prefetch=layout.pipeline_parallel_size == 1,
            early=layout.zero_stage == 3 and not self.completed_by_plugins,
        )
        self.trained = {n: nn.Parameter(self.sharded.share(n)) if is_cut(p) else p for n, p in whole.items()}
        self._exchange(optimizer, {p: name for name, p in whole.items()})
        self.masters = MasterWeights(optimizer)
        for group in ("data", "edp"):
            if scalars := [p for p in whole.values() if not is_cut(p) and groups[p] == group]:
                self.buckets.append(GradBuckets(scalars, mesh[group], average_of=mesh.size("data")))
        here = {name: is_cut(p) or mesh[groups[p]].is_first for name, p in whole.items()}
        self.owned = [share for name, share in self.trained.items() if owned(name) and here[name]]

    def _exchange(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        """Put shares in the place of whole parameters in the optimizer's groups, and in what it already keeps."""
        for group in optimizer.param_groups:
            group["params"] = [self.trained[names[p]] for p in group["params"] if p in names]
        for param in [p for p in optimizer.state if p in names]:
            name, state = names[param], optimizer.state.pop(param)
            cut = {k for k, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape and param.dim()}
            optimizer.state[self.trained[name]] = {
                k: self.sharded.cut(name, v) if k in cut else v for k, v in state.items()
            }

    # One step

    def forward(self, fn: Callable[..., T], *args: Any) -> T:
        if self.sharded is None:
            return fn(*args)
        result: T = self.sharded.run(fn, *args)
        return result

    def backward(self, loss: Tensor) -> None:
        if self.sharded is None:
            raise ValueError("backward and step need an optimizer; this engine was set up without one (evaluation)")
        loss.backward()
        self.sharded.after_backward()

    @torch.no_grad()
    def reduce(self) -> None:
        self.sharded.reduce()
        for buckets in self.buckets:
            buckets.reduce()
        grads = []
        for name in self.sharded.params:
            grad = self.sharded.take_grad(name)
            if grad is not None and name in self.trained:
                self.trained[name].grad = grad
                grads.append(grad)
        if grads:
            torch._foreach_div_(grads, self.mesh.size("data"))

    @torch.no_grad()
    def step(self, clip: Clip) -> StepResult:
        assert self.optimizer is not None
        counted = [p.grad for p in self.owned if p.grad is not None]
        plan = plan_step(counted, clip, self.scale, mesh=self.mesh, device=self.device, sharded=True)
        if not plan.overflow:
            narrow = self.masters.take_grads()
            wide = [p.grad for p in self.trained.values() if p.grad is not None and p.dtype in WIDE]
            apply_plan(narrow + wide, plan)
            self.optimizer.step()
            self.masters.write_back()
        if self.scale is not None:
            self.scale.update(plan.overflow)
        for param in (*self.trained.values(), *self.module.parameters()):
            param.grad = None
        for buckets in self.buckets:
            buckets.clear()
        return StepResult(plan.norm, plan.overflow)

    # Looking in

    def _whole(self, fqn: str, share: Tensor) -> Tensor:
        whole: Tensor = self.sharded.whole(fqn, share) if fqn in self.sharded.params else share.detach().clone()
        return whole

    def full_grad(self, fqn: str) -> Tensor | None:
        """The reduced gradient, with the loss scale taken out; None when frozen."""
        param = self.trained.get(fqn)
        if param is None or param.grad is None:
            return None
        whole = self._whole(fqn, param.grad)
        return whole if self.scale is None else whole.div_(self.scale.value)

    def full_param(self, fqn: str) -> Tensor:
        if self.sharded is None or fqn not in self.sharded.params:
            return self.module.get_parameter(fqn).detach().clone()
        return self._whole(fqn, self.sharded.share(fqn))

    def full_state(self, fqn: str) -> dict[str, Tensor]:
        param = self.trained.get(fqn)
        if param is None or self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.masters.pairs.get(param, param), {})
        shaped = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape}
        return {k: self._whole(fqn, v) for k, v in sorted(shaped.items())}

    # Saving

    def _stored(self) -> dict[str, Any]:
        """This rank's shares and buffers under the module's names, as they lie in memory."""
        state = self.module.state_dict(keep_vars=True)
        if self.sharded is None:
            return state
        return {k: self.sharded.share(k) if k in self.sharded.params else v for k, v in state.items()}

    def module_state(self) -> dict[str, Any]:
        return dict(cloned(self._stored()))

    @torch.no_grad()
    def load_module_state(self, state: dict[str, Any]) -> None:
        load_tensors(self.module, self._stored(), state)
        if self.optimizer is not None:
            self.masters.refresh()

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state dict over this rank's shares and, for narrow ones, their fp32 copies by name."""
        if self.optimizer is None:
            return {}
        return self.masters.saved(self.optimizer, self.trained)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.optimizer is None:
            return
        self.masters.load(self.optimizer, self.trained, state)

    def traffic(self, case: Case, out: Expected) -> None:
        """See `fsdp_formula.py`."""
        from parallax.plugins.data.fsdp_formula import add_sharded

        add_sharded(case, out)

    def teardown(self) -> None:
        """Make the module an ordinary one again, with whole weights.

        Gathers them over the data axis, unless an exception is on its way: the other ranks may not come. The module
        then keeps its shares.
        """
        if self.sharded is None:
            return
        for buckets in self.buckets:
            buckets.release()
        self.sharded.release(gather=dist.is_initialized() and sys.exc_info()[0] is None)
        self.sharded, self.optimizer, self.trained = None, None, {}
