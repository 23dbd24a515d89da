"""The recording of a deferred construction, and the recipe of every named tensor in it.

It is: which steps each parameter, buffer and plain tensor attribute depends on, and the seed of every random step. It
is not: the modes that record (`deferred.py`) nor the tape's memory model and execution (`replay.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.module_tensors import named_tensors
from parallax.strategies.replay import Step, Tape, WeightSource, Window, derive_seed

IN_INIT = "build the model in `__init__` instead of `configure_model`, where its tensors are real"


@dataclass(frozen=True)
class Recipe:
    """How to compute one tensor of the model: the steps it depends on, or None for a tensor of unknown origin."""

    window: Window | None
    order: tuple[int, ...] = ()


class Recording:
    """What was done under `deferred_init`, and, after `capture`, how to compute each named tensor of the model."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._recipes: dict[str, Recipe] = {}
        self._draws: dict[int, tuple[str, int]] = {}  # random step -> (first name that needs it, ordinal there)

    def capture(self, module: nn.Module) -> None:
        """Fix name -> recipe for every meta parameter, buffer and plain tensor attribute of `module`.

        Call it once the model is built and before anything replaces its parameters. Tied names share a recipe. A
        random step is seeded by the first name that needs it, parameters before buffers before attributes.
        """
        self._recipes, self._draws = {}, {}
        known: dict[Window, Recipe] = {}
        for fqn, tensor in named_tensors(module):
            if not tensor.is_meta:
                continue
            if not self.tape.knows(tensor):
                self._recipes[fqn] = Recipe(None)
                continue
            window = self.tape.window(tensor)
            if window not in known:
                known[window] = Recipe(window, self.tape.needed(window))
            self._recipes[fqn] = known[window]
            mine = [i for i in known[window].order if self.tape.steps[i].random and i not in self._draws]
            self._draws.update({index: (fqn, ordinal) for ordinal, index in enumerate(mine)})

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._recipes

    def replay(self, fqn: str, *, seed: int, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
        """The whole initial value of `fqn` on `device`.

        The same for a given seed on every rank, whatever else is computed; the process's random state is left
        alone. Values drawn on different kinds of device differ. Memory that was never written is zero.

        Raises:
            ValueError: `fqn` is not a tensor that was captured.
        """
        recipe = self._recipe(fqn)
        assert recipe.window is not None
        device = torch.device(device)
        whole = self.tape.compute(
            recipe.window, recipe.order, device, lambda index: derive_seed(seed, *self._draws[index])
        )
        return whole if dtype is None else whole.to(dtype)

    def source(self, fqn: str) -> WeightSource | None:
        """The stored weight that `fqn` is, unchanged, if it is one: then a rank may read only its part of it."""
        recipe = self._recipe(fqn)
        if len(recipe.order) != 1:
            return None
        step = self.tape.steps[recipe.order[0]]
        return step.source if step.outs == (recipe.window,) else None

    def load(self, tensor: Tensor, source: WeightSource) -> None:
        """Record that the meta `tensor` gets the stored weight `source`."""
        window = self.tape.window(tensor)
        fills = window.storage if self.tape.covers(window) else None
        default = torch.get_default_dtype()
        self.tape.append(Step(source.read, (), {}, (window,), (), (window.storage,), fills, False, default, source))

    def peek(self, tensor: Tensor) -> Tensor:
        """The present value of a meta tensor on the CPU, where it depends on no random number.

        Raises:
            ValueError: it does, or the tensor was not made under this recording.
        """
        what = f"the value of a tensor of shape {tuple(tensor.shape)}"
        if not self.tape.knows(tensor):
            raise ValueError(f"configure_model needs {what}, which was made on the meta device elsewhere; {IN_INIT}")
        window = self.tape.window(tensor)
        order = self.tape.needed(window)
        random = sorted({call_name(self.tape.steps[i].run) for i in order if self.tape.steps[i].random})
        if random:
            raise ValueError(
                f"configure_model needs {what} (item(), tolist(), an `if`, a move to a device), but it is random "
                f"({', '.join(random)}) and is drawn only after each rank knows its part of the model; {IN_INIT}"
            )
        return self.tape.compute(window, order, torch.device("cpu"))

    def _recipe(self, fqn: str) -> Recipe:
        if fqn not in self._recipes:
            raise ValueError(f"no recorded tensor {fqn!r}: it was not on the meta device at the end of configure_model")
        if self._recipes[fqn].window is None:
            raise ValueError(
                f"{fqn!r} is on the meta device but was not created in configure_model, so its initial value is "
                "unknown; create it there, or in `__init__` on a real device"
            )
        return self._recipes[fqn]


def call_name(run: Any) -> str:
    """Name of an operator (`aten::normal_`) or function, for messages and look-up."""
    schema = getattr(run, "_schema", None)
    return str(schema.name) if schema is not None else getattr(run, "__name__", str(run))
