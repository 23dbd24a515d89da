"""What a pipeline rank holds while it runs a route.

It is: the bookkeeping of the executor, without any behaviour. It is not: tensors on their way (`transfer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from parallax.plugins.pipeline.backward import Postponed
from parallax.plugins.pipeline.random_state import RandomState
from parallax.plugins.pipeline.routes import Message, Route


@dataclass
class InFlight:
    """What a stage keeps of a micro-batch between its forward and the end of its backward.

    Attributes:
        leaves: what it received, as far as gradients go back.
        received: the buffers it was received in.
        root: the scalar backward starts from: the scaled loss, or a `Seed` of the outputs.
        grads: where the seed finds the outputs' gradients; None on the last stage.
        postponed: where the weights' gradients wait when the backward is split.
        inputs: what it received, to run it once more, and the state of the random numbers it ran with; None where it
            is not recomputed.
    """

    leaves: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    root: Tensor | None = None
    grads: list[Tensor] | None = None
    postponed: Postponed | None = None
    inputs: tuple[list[Tensor], RandomState] | None = None


@dataclass
class Run:
    """One run of a route: its inputs, and what is on its way."""

    route: Route
    step: Callable[[int], Any]
    keys: Sequence[Hashable]
    loss_of: Callable[[int, Any], Tensor] | None
    flying: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    handed: dict[Message, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    posted: int = 0
    postponed_bytes: int = 0


@dataclass
class Peak:
    """The most this rank has held at once in its last run.

    Attributes:
        in_flight: micro-batches of one virtual stage each, from the start of its F to the end of its B or W.
        postponed_bytes: what was held for W, over all of them.
    """

    in_flight: int = 0
    postponed_bytes: int = 0
