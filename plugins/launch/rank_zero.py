"""The rank Lightning believes in when it prints on rank zero only.

Lightning reads it from the environment at import, where mpirun has put nothing it knows: every rank is "zero".
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import rank_zero

_holder: Any = rank_zero.rank_zero_only


def printing_rank() -> int:
    return int(_holder.rank)


def set_printing_rank(rank: int) -> None:
    _holder.rank = rank
