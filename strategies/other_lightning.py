"""An answer for those who give a Parallax strategy to the Trainer of the package `pytorch_lightning`.

It is: entries in that package's registry which say what to import instead, made when somebody imports it, and the hint
in a strategy's repr. It is not: support for it; it has classes of its own, and importing it here would take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

from parallax.plugins.launch import mark_shared
from parallax.strategies.import_hook import after_import

OTHER = "pytorch_lightning"
INSTEAD = "use `from lightning.pytorch import Trainer, LightningModule` (pip install lightning)"


def explain_to_other_lightning(names: Iterable[str]) -> None:
    """Make `pytorch_lightning.Trainer(strategy=<one of these names>)` raise a ValueError that tells what to do."""

    def register(module: ModuleType) -> None:
        for name in names:
            module.StrategyRegistry.register(
                name, partial(_refuse, name), override=True, description=f"only for lightning.pytorch: {INSTEAD}"
            )

    after_import(f"{OTHER}.strategies", register)


def _refuse(name: str, **_: Any) -> None:
    raise mark_shared(
        ValueError(
            f"strategy={name!r} was given to the Trainer of {OTHER}, but Parallax works with the package lightning, "
            f"whose classes and registry are separate: {INSTEAD}"
        )
    )


def hint() -> str:
    """What a strategy's repr adds where the other package is in use."""
    return f"; the Trainer of {OTHER} cannot use it: {INSTEAD}" if OTHER in sys.modules else ""
