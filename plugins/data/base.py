"""The contract of a data engine: who keeps gradients, reduces them over the data axis, and steps.

It is: the abstract `DataEngine` and the two small values it works with (`Clip`, `StepResult`). It is
not: any particular engine (`replicated.py`, `deepspeed.py`), and it knows nothing of pipelines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.strategies.accumulation import Accumulation
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale

if TYPE_CHECKING:
    from parallax.strategies.theory import Case, Expected

T = TypeVar("T")

WIDE = (torch.float32, torch.float64)
"""Dtypes a norm can be taken in and an optimizer can step in; anything narrower is widened to fp32."""


@dataclass(frozen=True)
class Clip:
    """How to clip before the step: by the true global L2 norm, or element-wise by value. 0 clips nothing."""

    value: float = 0.0
    algorithm: Literal["norm", "value"] = "norm"


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step.

    Attributes:
        grad_norm: global L2 norm of the unscaled gradient before clipping, over every parameter of the whole
            model, each counted once. A 0-dim tensor on the device (no host sync).
        skipped: True when the step was left out because a gradient was not finite (16-mixed only).
    """

    grad_norm: Tensor
    skipped: bool = False


class DataEngine(ABC):
    """Owns the optimizer step of one rank's part of the model.

    Life of a step, driven by the strategy's engine::

        forward(fn, ...) / backward(scalar)     any number of times, in any order, several forwards in flight
        finalize                                 plugins complete `param.grad` (tied weights, replicated parameters)
        reduce()                                 average over the data axis, once
        step(clip)                               norm, clip, optimizer step, gradients cleared

    Between the first `backward` and `reduce()` every gradient of this rank is whole in `param.grad`, summed over
    the micro-batches, at every ZeRO stage. Whoever completes a gradient there writes into that tensor: to assign
    another one fails under ZeRO-3, where torch compares it with the released, empty, weight. Where nobody does
    (`completed_by_plugins` is False), an engine may reduce gradients as early as in `backward`.
    """

    name: ClassVar[str]
    zero_stages: ClassVar[tuple[int, ...]]
    """ZeRO stages this engine implements."""
    completed_by_plugins: bool = True
    """Whether a plugin completes gradients between `backward` and `reduce`; set before `setup`."""
    accumulation: Accumulation | None = None
    """Lets layers add gradients to `param.grad` in `backward`, where the engine does not need autograd's own sum."""

    @classmethod
    @abstractmethod
    def check(cls, layout: Layout) -> None:
        """Refuse what cannot work (missing package, unsupported stage) before anything is built: ValueError."""

    @abstractmethod
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
        """Take over `module` (this rank's part, real tensors, on its device) and `optimizer`.

        Args:
            module: the user's LightningModule after all plugins were applied.
            optimizer: the user's torch optimizer over the module's parameters; None for evaluation only. Its
                `param_groups` dicts stay the ones learning-rate schedulers write to.
            owned: FQN -> whether this rank counts the parameter in the gradient norm.
            averaged_over: FQN -> the group of ranks that hold replicas of the parameter: "data", or "edp" for what is
                cut over "ep". Gradients are summed over it and divided by the size of "data": a rank's experts have
                seen the samples of its whole "ep" group.
            scale: dynamic loss scale for 16-mixed, else None. Losses arrive already multiplied by it; the engine
                divides gradients by `scale.value`, skips the step when a gradient is not finite anywhere in the
                world, and calls `scale.update(overflow)` once a step, with the same value on every rank.
        """

    @abstractmethod
    def forward(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn(*args)`, which runs (part of) the module's forward, with parameters available."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backward of a scalar; gradients are added to `param.grad`, nothing is reduced."""

    @abstractmethod
    def reduce(self) -> None:
        """Average the accumulated gradients over `mesh["data"]`. Called once before every `step`."""

    @abstractmethod
    def step(self, clip: Clip) -> StepResult:
        """Norm, clip, optimizer step; clears gradients. Collective over the world."""

    @abstractmethod
    def full_grad(self, fqn: str) -> Tensor | None:
        """The reduced gradient (this rank's tp/pp part, whole over the data axis) between `reduce` and `step`.

        Collective over `mesh["data"]`. For checks and tests, not for the hot path.
        """

    @abstractmethod
    def full_param(self, fqn: str) -> Tensor:
        """The parameter's current value (this rank's tp/pp part, whole over the data axis). Collective."""

    @abstractmethod
    def full_state(self, fqn: str) -> dict[str, Tensor]:
        """Optimizer state of a parameter, shaped as it: this rank's tp/pp part, whole over the data axis. Collective.

        Only what has the parameter's shape: moments, not step counts.
        """

    @abstractmethod
    def module_state(self) -> dict[str, Any]:
        """This rank's weights and buffers, as saved at the same layout (its shard only under ZeRO-3)."""

    @abstractmethod
    def load_module_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `module_state`."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """This rank's optimizer state, master weights included."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """The counterpart of `optimizer_state`."""

    def traffic(self, case: Case, out: Expected) -> None:
        """Add to `out` what this rank sends for the engine in one optimizer step, by closed formula.

        Raises:
            NotImplementedError: there is no formula (for `case`); `parallax verify --bytes` then fails and names it.
        """
        raise NotImplementedError(f"data engine {self.name!r} states no formula of what it sends (DataEngine.traffic)")

    def teardown(self) -> None:
        """Release buffers, hooks and patches."""


def local_grad_norm_sq(grads: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of `grads` as a 0-dim fp64 tensor on `device`.

    Each tensor's norm is taken in at least fp32 (fp64 stays fp64); the sum is in fp64 whatever the gradients are,
    so that ranks holding different dtypes, or nothing, can add theirs up and large norms do not overflow.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [torch.linalg.vector_norm(g, dtype=g.dtype if g.dtype in WIDE else torch.float32) for g in grads]
    return torch.stack([n.double() for n in norms]).square().sum()
