"""What a difference looks like, and what usually causes it.

It is: a table of known signatures, most telling first, over the sizes of the axes. It is not: a proof; the cause is
called likely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

LOSS = "no constant factor: other samples, labels shifted by one, a wrong mask or position, or stale values"


@dataclass(frozen=True)
class Clue:
    """What is known about a difference.

    Attributes:
        what: "loss", "norm", "gradient", "weight", "moment", "metric" or "initial weight".
        got, want: the values.
        sizes: axis -> ranks, with "m" for micro-batches.
        replicas: whether replicas of the tensor disagree among the ranks.
        noise: how far rounding may take a tensor from a multiple of another, relative to its norm.
    """

    what: str
    got: Tensor
    want: Tensor
    sizes: Mapping[str, int]
    replicas: bool = False
    noise: float = 1e-3


def likely_cause(clue: Clue) -> str:
    """A sentence on the likely cause, or what is known when no signature fits."""
    if not torch.isfinite(clue.got).all() and torch.isfinite(clue.want).all():
        return "not finite, or held by no rank: a part that is never computed, or an uninitialised buffer"
    if clue.replicas:
        return "replicas disagree between ranks: a missing reduction of a tied or replicated parameter, or other data"
    ratio = _ratio(clue.got, clue.want, clue.noise)
    if ratio is not None and (clue.what == "norm" or abs(ratio - 1) > 2 * clue.noise):
        return _by_ratio(ratio, clue)
    if clue.got.dim() > 0 and (moved := _moved(clue.got, clue.want)) is not None:
        return moved
    if clue.what == "loss":
        return LOSS
    if clue.what in ("weight", "moment"):
        return "gradients and norm were right: the update itself (run twice, on stale states, or with other settings)"
    return (
        "no constant factor: a missing part of a sum (a reduction over one axis left out), uneven micro-batches or "
        "data ranks weighed evenly, or stale values"
    )


def _ratio(got: Tensor, want: Tensor, noise: float) -> float | None:
    """got / want when that is one number, within `noise`, else None."""
    flat_got, flat_want = got.double().flatten(), want.double().flatten()
    energy = float(flat_want @ flat_want)
    if energy == 0:
        return None
    ratio = float(flat_got @ flat_want) / energy
    rest = float((flat_got - ratio * flat_want).norm()) / sqrt(energy)
    return ratio if rest <= noise * max(abs(ratio), 1e-12) or abs(ratio) < 1e-9 and rest < 1e-6 else None


def _by_ratio(ratio: float, clue: Clue) -> str:
    if abs(ratio) < 1e-9:
        return "zero where it should not be: a gradient that is never computed, cleared too early, or not sent back"
    for axis, size in clue.sizes.items():
        if size <= 1:
            continue
        label = f"{axis} = {size}"
        for factor, text in (
            (sqrt(size), f"off by sqrt({label}): replicas over {axis} counted {size} times in a norm"),
            (1 / sqrt(size), f"off by 1/sqrt({label}): a norm that leaves out the other ranks of {axis}"),
            (float(size), f"off by {label}: summed over {axis} where it is already whole, or scaled twice"),
            (1 / size, f"off by 1/({label}): a reduction over {axis} left out, or averaged where it should be summed"),
        ):
            if abs(ratio / factor - 1) < 2 * clue.noise:
                return text
    if clue.what == "norm":
        return f"off by a factor of {ratio:.4g}: parameters left out of the norm (another stage's?) or counted twice"
    if clue.what == "loss":  # one number is always a factor of another
        return LOSS
    return f"off by a constant factor of {ratio:.4g}: a loss weight missing or applied twice"


def _moved(got: Tensor, want: Tensor) -> str | None:
    """Whether the right numbers are in the wrong place."""
    close = lambda a, b: a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-9)  # noqa: E731
    if got.dim() == 2 and got.shape[0] == got.shape[1] and close(got, want.t()):
        return "transposed: a shard cut along the wrong dim"
    sizes = [n for n in range(2, 9) if got.shape[0] % n == 0]
    for parts in sizes:
        blocks = want.chunk(parts, 0)
        mine = got.chunk(parts, 0)
        order = [next((j for j, b in enumerate(blocks) if close(m, b)), -1) for m in mine]
        if -1 not in order and order != list(range(parts)):
            return f"blocks of dim 0 in the order {order}: shards or experts swapped"
    return None
