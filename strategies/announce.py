"""What is printed once when a run starts: the layout, and what each rank holds.

It is: the gathering of every rank's description and one table on rank 0. It is not: the table itself
(`report.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from torch import nn

from parallax.plugins.base import ParallelPlugin
from parallax.strategies.mesh import Mesh
from parallax.strategies.report import rank_table


def announce(mesh: Mesh, plugins: Sequence[ParallelPlugin], module: nn.Module) -> None:
    """Print the layout table on rank 0. Collective."""
    parts = [text for plugin in plugins if (text := plugin.describe().get("holds"))]
    parts.append(f"{_count(sum(_numel(p) for p in module.parameters()))} parameters")
    holds = mesh["control"].gather_objects("; ".join(parts))
    if mesh.rank == 0:
        Console().print(rank_table(mesh.layout, dict(enumerate(holds))))


def _numel(param: nn.Parameter) -> int:
    return int(getattr(param, "ds_numel", param.numel()))  # under ZeRO-3 the tensor itself is empty between uses


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
