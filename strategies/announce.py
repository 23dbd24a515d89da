"""What is printed once when a run starts: the layout, what each rank holds, and how large the whole model is.

It is: the gathering of every rank's description and one table on rank 0. It is not: the table itself (`report.py`), nor
Lightning's model summary, which shows this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import DeepSpeedSummary
from rich.console import Console
from torch import nn

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.launch.order import Order
from parallax.strategies.mesh import Mesh
from parallax.strategies.report import rank_table


def announce(
    mesh: Mesh,
    plugins: Sequence[ParallelPlugin],
    module: nn.Module,
    shard_of: Callable[[str], ParamShard | None],
    averaged_over: Callable[[str], str],
    place: str,
    order: Order | None,
) -> None:
    """Print the layout table on rank 0, with the places of the ranks when that is not one host. Collective.

    Args:
        mesh, plugins, module: as assembled.
        shard_of: how a local parameter sits in the whole one.
        averaged_over: the mesh group that holds replicas of it.
        place: host and device of this rank.
        order: which ranks have moved.
    """
    parts = [text for plugin in plugins if (text := plugin.describe().get("holds"))]
    parts.append(f"{_count(sum(_numel(p) for p in module.parameters()))} parameters")
    counted_here = _counted_here(module, shard_of, lambda fqn: mesh.index(averaged_over(fqn)) == 0)
    told = mesh["control"].gather_objects(("; ".join(parts), place, counted_here))
    if mesh.rank == 0:
        holds, places, counted = (dict(enumerate(each)) for each in zip(*told, strict=True))
        line = order.describe() if order is not None else None
        apart = line is not None or len(set(places.values())) > 1
        Console().print(rank_table(mesh.layout, holds, places if apart else None))
        Console().print(f"{_count(sum(counted.values()))} parameters in the whole model", highlight=False)
        if line is not None:
            Console().print(line, highlight=False, soft_wrap=True)


def summarize_sharded(callbacks: Sequence[Any], *, zero_stage: int) -> None:
    """Let Lightning's model summary count weights that ZeRO-3 has put away, as it does for its own strategy."""
    for callback in callbacks if zero_stage == 3 else ():
        if isinstance(callback, ModelSummary):
            callback.__dict__["_summary"] = partial(_sharded_summary, callback._max_depth)


def _sharded_summary(depth: int, trainer: Any, module: Any) -> DeepSpeedSummary:
    return DeepSpeedSummary(module, max_depth=depth)


def _counted_here(
    module: nn.Module, shard_of: Callable[[str], ParamShard | None], counts: Callable[[str], bool]
) -> int:
    """Elements of the whole model that this rank accounts for: its own, without replicas and padding."""
    total = 0
    for fqn, param in module.named_parameters():
        if not counts(fqn):
            continue
        shard = shard_of(fqn)
        if shard is None or (shard.owner and shard.dim is None):
            total += _numel(param)
        elif shard.owner:
            rows = sum(stop - start for start, stop in shard.ranges)
            assert shard.dim is not None
            total += math.prod(shard.shape) // shard.shape[shard.dim] * rows
    return total


def _numel(param: nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", param.numel()))  # under ZeRO-3 the tensor itself is empty between uses


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
