"""The data engine that shards over the data axis: DeepSpeed's ZeRO stages 1, 2 and 3.

It is: DeepSpeed's partitioning, reduction and gathering, driven so that several forwards may be in flight and
every gradient stays in `param.grad` until it is reduced, once. It is not: DeepSpeed's accumulation, clipping, loss
scaling, mixed precision or pipeline; those are done here or by the strategy, in the same way for every stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.plugins.data import deepspeed_shims as shims
from parallax.plugins.data import deepspeed_shims_step as running
from parallax.plugins.data.base import Clip, DataEngine, StepResult, T
from parallax.plugins.data.checks import check_optimizer, one_dtype
from parallax.plugins.data.clipping import apply_plan, plan_step
from parallax.plugins.data.deepspeed_checks import check_installed, fill_groups
from parallax.plugins.data.deepspeed_config import ModelSize, zero_config
from parallax.plugins.data.deepspeed_experts import ExpertGroups
from parallax.plugins.data.deepspeed_restore import Restore
from parallax.plugins.data.deepspeed_shards import PartitionedStates, PartitionedWeights, Shards
from parallax.plugins.data.deepspeed_traffic import counted
from parallax.plugins.data.state import cloned, load_tensors, trained_names
from parallax.plugins.data.zero_traffic import add_sharded
from parallax.strategies.accumulating import accumulate_in, restore
from parallax.strategies.accumulation import Accumulation
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale
from parallax.strategies.theory import Case, Expected
from parallax.strategies.tree import flatten, unflatten


class DeepSpeedEngine(DataEngine):
    """ZeRO over `mesh["data"]`.

    A parameter that no backward reached counts as having a zero gradient: its flat partition is stepped like the
    rest, so weight decay and momentum act on it (in one process it would be skipped). All trainable parameters
    of a rank have one dtype: fp32, bf16 (fp32 masters) or fp64. Without an optimizer nothing is sharded and the
    module runs as it is, at every stage.

    Args:
        prefetch: whether ZeRO-3 gathers ahead; None: where it may. See `ParallaxStrategy`.
    """

    name: ClassVar[str] = "deepspeed"
    zero_stages: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def __init__(self, prefetch: bool | None = None) -> None:
        self._prefetch = prefetch

    def _gathers_ahead(self, layout: Layout) -> bool:
        """Whether ZeRO-3 gathers by a recorded order."""
        return self._prefetch is not False and layout.may_gather_ahead

    @classmethod
    def check(cls, layout: Layout) -> None:
        if layout.zero_stage not in cls.zero_stages:
            raise ValueError(
                f"data engine 'deepspeed' implements zero_stage 1, 2 and 3, the layout asks for {layout.zero_stage}; "
                f"use data_engine='ddp' for zero_stage 0"
            )
        check_installed(layout.zero_stage)

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
        self.engine: Any = None
        self.open_step: ExitStack | None = None
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.trained: dict[str, nn.Parameter] = {}
        self.accumulation = None
        if optimizer is None:
            return
        check_optimizer(optimizer)
        self.trained = {n: p for n, p in trained_names(module, optimizer).items() if p.numel()}
        self.owned = {p for name, p in self.trained.items() if owned(name)}
        dtype = one_dtype(self.trained)
        # Frozen ones, too: of what is not marked DeepSpeed gives every data rank rank 0's values.
        found = [p for name, p in module.named_parameters() if averaged_over(name) == "edp" and p.numel()]
        self.experts = ExpertGroups(found, optimizer, mesh, layout.zero_stage)
        self.step_module = _Step(module, fill_groups(optimizer, dtype, self.device))
        self.restore = Restore(self.step_module)
        sizes = [p.numel() for p in self.step_module.parameters() if p.requires_grad]
        config = zero_config(
            layout.zero_stage, dtype, ModelSize(sum(sizes), max(sizes)), cuda=self.device.type == "cuda"
        )
        with self.experts.shown():
            self.engine = shims.build_engine(
                self.step_module,
                optimizer,
                config,
                mesh=mesh,
                dtype=dtype,
                device=self.device,
                experts=self.experts.split,
            )
        self.restore.mark()
        self._adopt(optimizer, layout)

    def _adopt(self, optimizer: Optimizer, layout: Layout) -> None:
        zero = self.engine.optimizer
        if zero.optimizer is not optimizer:  # DeepSpeed makes a new Adagrad; its state belongs to the user's
            optimizer.state = zero.optimizer.state
            zero.optimizer = self.engine.basic_optimizer = optimizer
        kind = PartitionedWeights if layout.zero_stage == 3 else PartitionedStates
        self.shards: Shards = kind(zero, lambda p: self.mesh["edp" if p in self.experts.params else "data"])
        self.overflow = False
        running.own_norm(zero, lambda: torch.tensor(-1.0 if self.overflow else 0.0))
        if layout.zero_stage < 3 and not zero.use_grad_accum_attribute:  # else it takes gradients away as they come
            # DeepSpeed's hook on a parameter reduces, and reductions are held back until all backwards are over.
            self.accumulation = Accumulation(self.trained.values(), hooks=1)
            self.accumulating = accumulate_in(self.module)
        if layout.zero_stage == 3:
            running.scope_trace(zero, self.mesh["data"], traced=self._gathers_ahead(layout))

    # One step

    def forward(self, fn: Callable[..., T], *args: Any) -> T:
        """See the contract. Tensors of the result that DeepSpeed must see are found in tuples, lists and dicts."""
        if self.engine is None:
            return fn(*args)
        leaves: list[Any] = []
        spec: Any = None
        autocast = _current_autocast(self.device.type)

        def run() -> tuple[Tensor, ...]:
            nonlocal leaves, spec
            with autocast(), running.unwound_forward(self.engine.optimizer, self.step_module):
                leaves, spec = flatten(fn(*args))
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

        self.step_module.run = run
        with shims.quiet(), counted(self.mesh):
            seen = iter(self.engine())
        self.step_module.run = None
        result: T = unflatten([next(seen) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        return result

    def backward(self, loss: Tensor) -> None:
        self._open()
        adding = nullcontext() if self.accumulation is None else self.accumulation.during(loss)
        with adding, running.unwound_recompute(self.engine.optimizer), counted(self.mesh):
            self.engine.backward(loss, scale_wrt_gas=False)

    def _open(self) -> ExitStack:
        """Hold DeepSpeed's reductions back until `reduce`."""
        if self.engine is None:
            raise ValueError("backward and step need an optimizer; this engine was set up without one (evaluation)")
        if self.open_step is None:
            self.open_step = ExitStack()
            self.open_step.enter_context(self.engine.coalesce_grad_reduction())
        return self.open_step

    @torch.no_grad()
    def reduce(self) -> None:
        held = self._open()
        for param in self.step_module.parameters():
            # Every data rank must reduce the same parameters, and ZeRO-3 would take last step's gradient for this one.
            if param.requires_grad and param.grad is None:
                param.grad = torch.empty_like(param)  # torch compares it with the weight, which may be released
                param.grad.data = torch.zeros(_shape(param), dtype=param.dtype, device=param.device)
        self.open_step = None
        with self.experts.shown(), counted(self.mesh):
            held.close()

    @torch.no_grad()
    def step(self, clip: Clip) -> StepResult:
        plan = plan_step(
            self.shards.grads(self.owned), clip, self.scale, mesh=self.mesh, device=self.device, sharded=True
        )
        apply_plan(self.shards.grads(), plan)
        self.overflow = plan.overflow
        with shims.quiet(), self.experts.shown(), counted(self.mesh):
            self.engine.step()
        if self.scale is not None:
            self.scale.update(plan.overflow)
        for param in self.module.parameters():
            param.grad = None
        return StepResult(plan.norm, plan.overflow)

    # Looking in

    def full_grad(self, fqn: str) -> Tensor | None:
        """The reduced gradient, in the masters' dtype and with the loss scale taken out; None when frozen."""
        param = self.trained.get(fqn)
        if param is None:
            return None
        whole = self.shards.full_grad(param, _shape(param))
        return whole.div_(1.0 if self.scale is None else self.scale.value)

    def full_param(self, fqn: str) -> Tensor:
        param = self.module.get_parameter(fqn)
        return param.detach().clone() if self.engine is None else self.shards.full_param(param)

    def full_state(self, fqn: str) -> dict[str, Tensor]:
        param = self.trained.get(fqn)
        return {} if param is None or self.engine is None else self.shards.full_state(param, _shape(param))

    # Saving

    def _stored(self) -> dict[str, Any]:
        state = self.module.state_dict(keep_vars=True)
        if self.engine is None:
            return state
        return {k: self.shards.stored(v) if isinstance(v, nn.Parameter) else v for k, v in state.items()}

    def module_state(self) -> dict[str, Any]:
        return dict(cloned(self._stored()))

    @torch.no_grad()
    def load_module_state(self, state: dict[str, Any]) -> None:
        load_tensors(self.module, self._stored(), state)
        if self.engine is not None:
            self.shards.refresh_masters()

    def optimizer_state(self) -> dict[str, Any]:
        """The user's optimizer's state dict over this rank's flat partitions, and the partitions themselves."""
        if self.optimizer is None:
            return {}
        with self.experts.shown(), self.shards.optimizer_params():
            return dict(cloned({"optimizer": self.optimizer.state_dict(), "masters": self.shards.masters}))

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.optimizer is None:
            return
        with self.experts.shown(), self.shards.optimizer_params():
            self.optimizer.load_state_dict(state["optimizer"])
        for master, saved in zip(self.shards.masters, state["masters"], strict=True):
            if master.shape != saved.shape:
                raise ValueError(
                    f"the saved partition has {saved.numel()} elements, this layout's has {master.numel()}; "
                    f"optimizer states can only be loaded at the layout they were saved at"
                )
            master.copy_(saved)
        self.shards.publish_masters()

    def traffic(self, case: Case, out: Expected) -> None:
        """See `zero_traffic.py`."""
        add_sharded(case, out, prefetch=self._gathers_ahead(case.layout))

    def teardown(self) -> None:
        """Remove hooks and patches and make the module an ordinary one again.

        Gathers the weights of ZeRO-3 over the data axis, unless an exception is on its way: the other ranks may not
        come. The module then keeps its shares.
        """
        if self.engine is None:
            return
        if self.accumulation is not None:
            restore(self.accumulating)
            self.accumulation.release()
        if self.open_step is not None:  # an interrupted step: without gradients closing it sends nothing
            for param in self.step_module.parameters():
                param.grad = None
            self.open_step.close()
        self.engine.destroy()
        running.forget_module(self.step_module)
        gathering = isinstance(self.shards, PartitionedWeights)
        if not gathering or (dist.is_initialized() and sys.exc_info()[0] is None):
            self.restore.run(self.shards.full_param)
        self.engine = None


class _Step(nn.Module):
    """What DeepSpeed sees: the user's module, whose forward is whatever part of a step runs now."""

    def __init__(self, module: nn.Module, fill: list[nn.Parameter]) -> None:
        super().__init__()
        self.module = module
        self.fill = nn.ParameterList(fill)
        self.run: Callable[[], tuple[Tensor, ...]] | None = None

    def forward(self) -> tuple[Tensor, ...]:
        assert self.run is not None
        return self.run()


def _current_autocast(kind: str) -> Callable[[], Any]:
    """The caller's autocast, to be entered again: DeepSpeed switches it off around its forward."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype)


def _shape(param: Any) -> torch.Size:
    """Shape of a whole parameter, also while ZeRO-3 has it released."""
    return torch.Size(getattr(param, "ds_shape", param.shape))
