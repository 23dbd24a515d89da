"""What a transformers model captures layer by layer (router logits, hidden states), carried through the stages.

It is: the reading and filling of the collector that transformers keeps while a forward with `output_router_logits`
or the like runs, so that the last stage finds what every layer of the model gave; gradients go back the same way. It
is not: what is captured, which the model's own hooks do.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Carried(NamedTuple):
    """A layer's output together with what was captured up to it: a list of tensors for each kind."""

    output: Any
    captured: dict[str, list[Any]]


def _collector() -> dict[str, Any]:
    """The collector of the forward that runs; empty when nothing is captured or transformers is not imported."""
    module = sys.modules.get("transformers.utils.output_capturing")
    found = None if module is None else module._active_collector.get()
    return found or {}


def with_captured(output: Any) -> Any:
    """What a stage hands on: its output, and beside it what was captured, if anything was."""
    captured = {kind: list(values) for kind, values in _collector().items() if isinstance(values, list) and values}
    return Carried(output, captured) if captured else output


def without_captured(received: Any) -> Any:
    """The counterpart of `with_captured`, called in the forward of the next stage, whose collector is filled."""
    if not isinstance(received, Carried):
        return received
    collector = _collector()
    for kind, values in received.captured.items():
        if kind in collector:
            collector[kind][:0] = values
    return received.output
