"""The data engine without sharding: every data rank holds the whole of its part and they average gradients.

It is: ZeRO stage 0 (plain data parallelism, "ddp"), with fp32 master weights for narrow parameters and the
loss scale of 16-mixed. It is not: built on `DistributedDataParallel`, whose reducer expects one forward and
one backward at a time; under a pipeline several micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.plugins.data.base import WIDE, Clip, DataEngine, StepResult, T
from parallax.plugins.data.buckets import GradBuckets, PlainGrads
from parallax.plugins.data.clipping import apply_plan, plan_step
from parallax.plugins.data.masters import MasterWeights
from parallax.plugins.data.state import cloned, trained_names
from parallax.plugins.data.traffic import add_replicated
from parallax.strategies.accumulating import accumulate_in, restore
from parallax.strategies.accumulation import Accumulation
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale
from parallax.strategies.theory import Case, Expected


class ReplicatedEngine(DataEngine):
    """Averages flat gradient buffers over the data axis and runs the user's optimizer as it is.

    A parameter that no backward reached on any data rank keeps `grad None`: the optimizer skips it, as in one
    process. Frozen parameters and parameters outside the optimizer are not reduced. `requires_grad` is read at
    set-up; a parameter unfrozen later is not trained.
    """

    name: ClassVar[str] = "ddp"
    zero_stages: ClassVar[tuple[int, ...]] = (0,)

    @classmethod
    def check(cls, layout: Layout) -> None:
        if layout.zero_stage not in cls.zero_stages:
            raise ValueError(
                f"data engine 'ddp' keeps everything on every data rank (zero_stage 0), but the layout asks for "
                f"zero_stage {layout.zero_stage}; use data_engine='deepspeed' or zero_stage=0"
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
        self.trained = {} if optimizer is None else trained_names(module, optimizer)
        experts = {name for name in self.trained if averaged_over(name) == "edp"}
        self.owned = [p for name, p in self.trained.items() if owned(name) and name not in experts]
        self.owned_experts = [p for name, p in self.trained.items() if owned(name) and name in experts]
        self.buckets: list[GradBuckets | PlainGrads] = []
        for group in ("data", "edp"):
            if params := [p for name, p in self.trained.items() if (name in experts) == (group == "edp")]:
                alone = mesh.size("data") == mesh.size(group) == 1
                made = PlainGrads(params) if alone else GradBuckets(params, mesh[group], average_of=mesh.size("data"))
                self.buckets.append(made)
        home: dict[Tensor, GradBuckets] = {p: b for b in self.buckets if isinstance(b, GradBuckets) for p in b.views}
        touch = (lambda param: home[param].touch(param)) if home else None
        self.accumulation: Accumulation = Accumulation(self.trained.values(), touch)
        self.accumulating = accumulate_in(module)
        self.masters = None if optimizer is None else MasterWeights(optimizer)
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))

    def forward(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)

    def backward(self, loss: Tensor) -> None:
        with self.accumulation.during(loss):
            loss.backward()

    def reduce(self) -> None:
        for buckets in self.buckets:
            buckets.reduce()

    @torch.no_grad()
    def step(self, clip: Clip) -> StepResult:
        if self.optimizer is None or self.masters is None:
            raise ValueError("step needs an optimizer, and this engine was set up without one (evaluation only)")
        counted, experts = ([p.grad for p in ps if p.grad is not None] for ps in (self.owned, self.owned_experts))
        plan = plan_step(
            counted, clip, self.scale, mesh=self.mesh, device=self.device, sharded=False, experts=experts
        )
        if not plan.overflow:
            narrow = self.masters.take_grads()
            apply_plan(narrow + [g for b in self.buckets for g in b.grads if g.dtype in WIDE], plan)
            self.optimizer.step()
            self.masters.write_back()
        if self.scale is not None:
            self.scale.update(plan.overflow)
        kept = {p for buckets in self.buckets for p in buckets.views}
        for buckets in self.buckets:
            buckets.clear()
        for p in self.module.parameters():
            if p not in kept:
                p.grad = None
        return StepResult(plan.norm, plan.overflow)

    def full_grad(self, fqn: str) -> Tensor | None:
        """The reduced gradient, with the loss scale taken out; None when frozen or unused in this step."""
        param = self.trained.get(fqn)
        if param is None or param.grad is None:
            return None
        return param.grad.clone() if self.scale is None else param.grad / self.scale.value

    def full_param(self, fqn: str) -> Tensor:
        return self.module.get_parameter(fqn).detach().clone()

    def full_state(self, fqn: str) -> dict[str, Tensor]:
        param = self.trained.get(fqn)
        if param is None or self.optimizer is None or self.masters is None:
            return {}
        state = self.optimizer.state.get(self.masters.pairs.get(param, param), {})
        return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor) and v.shape == param.shape}

    def module_state(self) -> dict[str, Any]:
        return dict(cloned(dict(self.module.state_dict())))

    def load_module_state(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)
        if self.masters is not None:
            self.masters.refresh()

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's own state dict and, for narrow parameters, the masters by name."""
        if self.optimizer is None or self.masters is None:
            return {}
        return self.masters.saved(self.optimizer, self.trained)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.optimizer is None or self.masters is None:
            return
        self.masters.load(self.optimizer, self.trained, state)

    def traffic(self, case: Case, out: Expected) -> None:
        add_replicated(case, out)

    def teardown(self) -> None:
        restore(self.accumulating)
        self.accumulation.release()
        for buckets in self.buckets:
            buckets.release()
