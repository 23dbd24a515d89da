"""What transformers asks a mask for, as a few words instead of a matrix.

It is: our entry in transformers' mask interface, which reads causality and window off the function it is given. It is
not: padding and packed documents, which need the whole sequence (`hf.py`), or a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from parallax.plugins.context.base import Documents


class _NoMask(ValueError, AttributeError):
    """Of a model that works on its mask itself."""


@dataclass(eq=False)
class MaskRequest:
    """Stands for the attention mask between the model's own forward and its attention layers.

    Attributes:
        causal, window: as in `AttentionSpec`.
        chunk: tokens of a chunk outside of which a query sees nothing; None: no chunks.
        documents: packed documents and padding; set by the first layer, so that recomputation finds the same.
        settled: whether they are set.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    documents: Documents | None = None
    settled: bool = False
    ndim: ClassVar[int] = 0
    """No matrix that a model could add its bias to (falcon)."""

    def __getattr__(self, name: str) -> Any:
        raise _NoMask(
            f"the model reads {name!r} of its attention mask, and there is none on a cut sequence; use "
            f"context_parallel_size=1"
        )

    def to(self, *args: Any, **kwargs: Any) -> MaskRequest:
        """Itself: models may convert what they take for a tensor."""
        return self


def describe_mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> MaskRequest:
    """Our entry in the mask interface.

    Raises:
        ValueError: a mask function that is neither causal, full, a window, nor chunks.
    """
    return _read(mask_function, MaskRequest())


def _read(function: Callable[..., Any], so_far: MaskRequest) -> MaskRequest:
    name = function.__qualname__.partition(".")[0]
    inner = inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        for part in inner["mask_functions"]:
            so_far = _read(part, so_far)
        return so_far
    if name == "remap_positions_for_packed_sequence":
        return _read(inner["mask_function"], so_far)
    if name in ("packed_sequence_mask_function", "padding_mask_function", "bidirectional_mask_function"):
        return so_far
    if name == "causal_mask_function":
        return replace(so_far, causal=True)
    if name == "sliding_window_overlay":
        return replace(so_far, window=inner["sliding_window"])
    if name == "sliding_window_bidirectional_overlay":
        return replace(so_far, window=inner["sliding_window"] + 1)  # its limit is part of the window
    if name == "chunked_overlay":
        return replace(so_far, chunk=inner["chunk_size"])
    raise ValueError(
        f"the model asks for the mask {function.__qualname__!r}, which cannot be followed over a cut sequence; causal, "
        f"full, sliding-window and chunked attention, padding and packed documents can. Use context_parallel_size=1"
    )
