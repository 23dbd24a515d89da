"""All-gather and reduce-scatter by whatever does them best for a group's backend.

It is: the choice between torch's own and the direct exchange that stands in for gloo's (`gloo.py`). It is not: counted
or named (`comm.py`).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallax.strategies import gloo
from parallax.strategies.gloo import Fill

# torch 2.13 renamed it and warns about the old name.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: Tensor, part: Tensor, group: dist.ProcessGroup | None, index: int, *, async_op: bool) -> Any:
    """Fill `out` [ranks, n] with every rank's `part` [n]; this rank is number `index`. A handle, when `async_op`."""
    if not gloo.is_gloo(group, part):
        return _ALL_GATHER(out.view(-1), part, group=group, async_op=async_op)
    return _begun(gloo.all_gather(out, part, group, index), async_op)


def reduce_scatter(
    out: Tensor, parts: Tensor, group: dist.ProcessGroup | None, index: int, fill: Fill | None, *, async_op: bool
) -> Any:
    """Fill `out` [n] with row `index` of the sum over ranks of `parts` [ranks, n], whose rows `fill`, if any, computes.
    A handle, when `async_op`."""
    if gloo.is_gloo(group, parts):
        return _begun(gloo.reduce_scatter(out, parts, group, index, fill), async_op)
    if fill is not None:
        fill(slice(0, len(parts)))
    return _REDUCE_SCATTER(out, parts.view(-1), group=group, async_op=async_op)


def _begun(exchange: gloo.Exchange, async_op: bool) -> gloo.Exchange:
    if not async_op:
        exchange.wait()
    return exchange
