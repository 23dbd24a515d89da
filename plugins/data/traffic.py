"""What data engines send in one step, as closed formulas over the parameters of a rank.

It is: the reduction of gradients of replicated weights, ZeRO's stages (Rajbhandari et al. 2020, section 7) and the
gradient norm that all of them share. It is not: a count.

With P elements of w bytes on a rank, in n parameters: without sharding one all-reduce of (P + n) w, n numbers that say
which parameters took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from parallax.plugins.data.buckets import BUCKET_BYTES
from parallax.strategies.theory import Case, Expected

NORM = 8
"""Bytes of the sum of squares, fp64."""


def add_norm(case: Case, out: Expected, *, sharded: bool) -> None:
    """Add the sum over ranks that hold different parts: "data" (for replicated weights where experts are apart), then
    "model"."""
    if sharded or case.layout.experts_apart:
        out.add("data", "all_reduce", "step", NORM)
    out.add("model", "all_reduce", "step", NORM)


def add_replicated(case: Case, out: Expected) -> None:
    """Add what ZeRO stage 0 sends."""
    trained = case.trained()
    for group in ("data", "edp"):
        add_buffers(case, out, {n: p for n, p in trained.items() if case.averaged_over[n] == group}, group)
    add_norm(case, out, sharded=False)


def add_buffers(case: Case, out: Expected, params: Mapping[str, nn.Parameter], group: str) -> None:
    """Add the sum over `group` of flat buffers of the gradients of `params`, by name."""
    by_dtype: dict[object, list[tuple[int, int]]] = {}
    for fqn, param in params.items():
        by_dtype.setdefault(param.dtype, []).append((case.elements(fqn), param.element_size()))
    for sizes in by_dtype.values():
        for nbytes in _buffers(sizes):
            out.add(group, "all_reduce", "step", nbytes)


def _buffers(sizes: Iterable[tuple[int, int]]) -> list[int]:
    """Bytes of each buffer of (elements, bytes per element): filled in order up to the limit, one number a parameter
    beside its gradient."""
    out: list[int] = []
    held = 0
    for elements, width in sizes:
        if not out or (held and held + elements * width > BUCKET_BYTES):
            out.append(0)
            held = 0
        held += elements * width
        out[-1] += (elements + 1) * width
    return out
