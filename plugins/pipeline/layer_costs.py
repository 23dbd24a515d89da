"""Measures what each layer of a model costs, for `pp_partition`.

It is: one step of the user's own, forward and backward, in one process on one device, with clocks around the modules
the pipeline can place. It is not: an estimate (`partition.py`), and no process group is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.pipeline.plans import find_structure


def measure_layer_costs(
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    plan: Mapping[str, Any] | None = None,
    repeats: int = 3,
) -> dict[str, float]:
    """Seconds of forward and backward of every layer, and of the modules before and after them, by name.

    Args:
        model: the whole module, on the device to measure on; its parameter names are those of the training.
        step: runs the model on one micro-batch and returns the loss, e.g. `lambda: lit.training_step(batch, 0)`.
        plan: `pp_plan` relative to `model`; None reads the one it carries.
        repeats: how many steps are timed, after one that is not; the fastest time of each module counts.

    Raises:
        ValueError: the structure of `model` is not known, or `step` did not run a layer.
    """
    structure = find_structure(model, plan)
    layers = [f"{structure.layers}.{i}" for i in range(structure.num_layers)]
    clocks = {name: _Clock(model.get_submodule(name)) for name in (*structure.before, *layers, *structure.after)}
    best: dict[str, float] = {}
    try:
        for at in range(repeats + 1):
            step().backward()
            for name, clock in clocks.items():
                seconds = clock.read()
                if at:
                    best[name] = min(best.get(name, seconds), seconds)
    finally:
        for clock in clocks.values():
            clock.remove()
        model.zero_grad()
    silent = [name for name in layers if not best[name]]
    if silent:
        raise ValueError(f"the step did not run {', '.join(silent[:3])}; it must run the whole model")
    return best


class _Clock:
    """Seconds spent in a module's forward and backward since the last reading, and in what it calls."""

    def __init__(self, module: nn.Module) -> None:
        self._seconds = 0.0
        self._starts: list[float] = []
        start, stop = (lambda *_: self._start()), (lambda *_: self._stop())
        self._hooks = [
            module.register_forward_pre_hook(start),
            module.register_forward_hook(stop),
            module.register_full_backward_pre_hook(start),
            module.register_full_backward_hook(stop),
        ]

    def _start(self) -> None:
        self._starts.append(_now())

    def _stop(self) -> None:
        if self._starts:
            self._seconds += _now() - self._starts.pop()

    def read(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        self._starts.clear()
        return seconds

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
