"""What a model may look at of a module that lives on another pipeline stage: its form.

It is: a module's plain attributes, and shape, dtype and device of its parameters (`images.to(embed.weight.dtype)`), in
objects that refuse everything else. It is not: the part that a stub takes in a step (`stage.py`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


class Elsewhere:
    """The form of a parameter that lives on another stage.

    Args:
        like: the parameter.
        refusal: what to say to who wants its values.

    Attributes:
        shape, requires_grad: the parameter's.
    """

    def __init__(self, like: Tensor, refusal: str) -> None:
        self.shape, self.requires_grad = like.shape, like.requires_grad
        self._refusal, self._form = refusal, torch.empty(0, dtype=like.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._form.dtype

    @property
    def device(self) -> torch.device:
        return self._form.device

    def follow(self, change: Callable[[Tensor], Tensor]) -> None:
        """A change of dtype or device that parameters go through (`Module.to`)."""
        self._form = change(self._form)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(vars(self).get("_refusal", name))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        raise ValueError(one._refusal)


class Foreign(nn.Module):
    """A module that lives on another stage: no parameters, no state, only a role.

    Args:
        fqn: its name in the model.
        state: shared `StageState` of this rank.
        like: the module it stands for; its plain attributes are kept, since some models read them in the
            loop over the layers (`layer.attention_type`), and so is the form of its parameters.
        home: where it lives, in words; None takes the class's.
    """

    is_foreign = True
    home = "another stage"

    def __init__(self, fqn: str, state: Any, like: nn.Module, home: str | None = None) -> None:
        super().__init__()
        for name, value in vars(like).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool, tuple, type(None))):
                setattr(self, name, value)
        self.fqn, self.home = fqn, home or self.home
        # No attributes of a module: the state is shared, parts are not this rank's, and no checkpoint has them.
        self.__dict__["state"] = state
        self.__dict__["parts"] = {
            **{name: Foreign(f"{fqn}.{name}", state, part, self.home) for name, part in like.named_children()},
            **{name: Elsewhere(p, self._refusal(name)) for name, p in like.named_parameters(recurse=False)},
        }

    def _refusal(self, name: str) -> str:
        return (
            f"{self.fqn!r} lives on {self.home} of the pipeline, so its {name!r} cannot be used here. If the model "
            f"uses it outside the module's own forward, tie it through a module instead (head.weight = "
            f"embedding.weight) or use pipeline_parallel_size=1"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (part := self.parts.get(name)) is not None:
                return part
            raise AttributeError(self._refusal(name)) from None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for part in self.parts.values():
            part.follow(fn) if isinstance(part, Elsewhere) else part._apply(fn)
        return super()._apply(fn, recurse)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(self._refusal("forward"))

    def extra_repr(self) -> str:
        return f"{self.fqn}, on {self.home}"


def spread(model: nn.Module) -> list[nn.Module]:
    """Modules of which parts live on other stages."""
    real = [m for m in model.modules() if not isinstance(m, Foreign)]
    return [m for m in real if any(isinstance(part, Foreign) for part in m.modules())]


@contextmanager
def sums_refused(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, going through the parameters of `modules`, which are `spread`, is refused after the first of them.

    Code looks at the first for dtype and device; whoever goes on computes something of all of them, such as a penalty
    on weights, and would get this stage's part of it.
    """

    def named_parameters(
        self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for at, entry in enumerate(type(self).named_parameters(self, prefix, recurse, remove_duplicate)):
            if at and recurse:
                raise ValueError(
                    f"the step goes through the parameters of {type(self).__name__}, of which this pipeline stage "
                    f"holds a part: a penalty or a norm would be that of the part. Use the optimizer's weight_decay "
                    f"for a penalty, trainer.strategy.last_step.grad_norm for the gradients' norm, or "
                    f"pipeline_parallel_size=1"
                )
            yield entry

    for module in modules:
        vars(module)["named_parameters"] = MethodType(named_parameters, module)  # torch.compile wants a method
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["named_parameters"]
