"""What is printed once when a run starts: the layout, and what each rank holds.

It is: the gathering of every rank's description and one table on rank 0. It is not: the table itself
(`report.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from torch import nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.launch.order import Order
from parallax.strategies.mesh import Mesh
from parallax.strategies.report import rank_table


def announce(mesh: Mesh, plugins: Sequence[ParallelPlugin], module: nn.Module, place: str, order: Order | None) -> None:
    """Print the layout table on rank 0, with the places of the ranks when that is not one host. Collective.

    Args:
        mesh, plugins, module: as assembled.
        place: host and device of this rank.
        order: which ranks have moved.
    """
    parts = [text for plugin in plugins if (text := plugin.describe().get("holds"))]
    parts.append(f"{_count(sum(_numel(p) for p in module.parameters()))} parameters")
    told = mesh["control"].gather_objects(("; ".join(parts), place))
    if mesh.rank == 0:
        holds, places = (dict(enumerate(each)) for each in zip(*told, strict=True))
        line = order.describe() if order is not None else None
        apart = line is not None or len(set(places.values())) > 1
        Console().print(rank_table(mesh.layout, holds, places if apart else None))
        if line is not None:
            Console().print(line, highlight=False, soft_wrap=True)


def _numel(param: nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", param.numel()))  # under ZeRO-3 the tensor itself is empty between uses


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
