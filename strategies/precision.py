"""What each `precision` means here, and the dynamic loss scale of 16-mixed.

It is: the mapping from Lightning's words to parameter dtype and autocast dtype, `LossScale`, and the
Lightning precision plugin that hands backward, clipping and stepping to the engine. It is not: the
arithmetic itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.fabric.plugins.precision.utils import _convert_fp_tensor, _DtypeContextManager
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

if TYPE_CHECKING:
    from parallax.plugins.data.base import Clip

PARAMETER_DTYPE: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "32-true": torch.float32,
        "bf16-mixed": torch.float32,
        "16-mixed": torch.float32,
        "bf16-true": torch.bfloat16,
        "64-true": torch.float64,
    }
)
"""Dtype of the weights in forward and backward. bf16-true keeps fp32 master weights in the optimizer."""

AUTOCAST_DTYPE: Mapping[str, torch.dtype] = MappingProxyType({"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16})


class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, section 3.2; constants as torch.amp.GradScaler).

    Attributes:
        value: what losses are multiplied by now.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000, factor: float = 2.0) -> None:
        self.value = value
        self.growth_interval = growth_interval
        self.factor = factor
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Halve after an overflow, double after `growth_interval` good steps in a row."""
        if overflow:
            self.value, self.good_steps = max(self.value / self.factor, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * self.factor, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["value"], int(state["good_steps"])


class Stepper(Protocol):
    """What the precision plugin needs of the engine."""

    def finish_gradients(self) -> None: ...

    def step(self, clip: Clip) -> Any: ...


class ParallaxPrecision(Precision):
    """Hands the optimizer step to the engine; knows dtypes and autocast.

    Args:
        precision: one of `PARAMETER_DTYPE`.
        device_type: "cpu" or "cuda", for autocast.
    """

    def __init__(self, precision: str = "32-true", device_type: str = "cpu") -> None:
        if precision not in PARAMETER_DTYPE:
            raise ValueError(f"precision={precision!r} is not supported; use one of {', '.join(PARAMETER_DTYPE)}")
        self.precision = precision  # type: ignore[assignment]
        self.device_type = device_type
        self.scale = LossScale() if precision == "16-mixed" else None
        self.engine: Callable[[], Stepper] | None = None
        self._clip: Clip | None = None

    @classmethod
    def from_lightning(cls, plugin: Precision | None) -> ParallaxPrecision:
        """The plugin that means what Lightning's `plugin` means.

        Raises:
            MisconfigurationException: a precision plugin without a counterpart.
        """
        if plugin is None or isinstance(plugin, cls):
            return plugin or cls()
        if type(plugin) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision):
            device = getattr(plugin, "device", "cpu") if isinstance(plugin, MixedPrecision) else "cpu"
            return cls(str(plugin.precision), device)
        raise MisconfigurationException(
            f"{type(plugin).__name__} is not supported by Parallax; use precision={' | '.join(PARAMETER_DTYPE)}"
        )

    @property
    def dtype(self) -> torch.dtype:
        return PARAMETER_DTYPE[str(self.precision)]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Weights to their dtype; a mixed or 32-true module is left as the user built it."""
        return module.to(self.dtype) if self.dtype != torch.float32 else module

    def convert_input(self, data: Any) -> Any:
        if self.dtype == torch.float32:
            return data
        return apply_to_collection(data, function=_convert_fp_tensor, dtype=Tensor, dst_type=self.dtype)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else _DtypeContextManager(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_DTYPE.get(str(self.precision))
        if dtype is not None:
            # The cache would keep casts of weights that ZeRO-3 has released since.
            return torch.autocast(self.device_type, dtype=dtype, cache_enabled=False)
        return self.tensor_init_context()

    # Backward has run inside the training step; Lightning's hooks around it still fire.

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if is_overridden("backward", model):
            raise MisconfigurationException(
                "LightningModule.backward is overridden, but Parallax runs backward inside the schedule; remove it"
            )

    def optimizer_step(  # type: ignore[override] # as in lightning's own precision plugins
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        from parallax.plugins.data.base import Clip

        result = closure()
        assert self.engine is not None
        engine = self.engine()
        engine.finish_gradients()
        self._clip = Clip()
        self._after_closure(model, optimizer)  # the user's hooks, which end in `clip_gradients`
        engine.step(self._clip)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Only notes what is wanted: the norm is known after the reduction over all axes, in the engine."""
        from parallax.plugins.data.base import Clip

        if clip_val:
            algorithm: Any = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"
            self._clip = Clip(float(clip_val), algorithm)

    def state_dict(self) -> dict[str, Any]:
        return self.scale.state_dict() if self.scale is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scale is not None:
            self.scale.load_state_dict(state_dict)
