"""The part of the strategy that saves and restores what a rank holds, through the engine.

It is: Lightning's hooks for the states of module and optimizer, and for checkpoints at the same layout. It is not: the
form of a checkpoint on disk (`checkpoint.py`) or of a data engine's states (`plugins/data/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallax.strategies import checkpoint
from parallax.strategies.engine import Engine
from parallax.strategies.processes import ProcessStrategy


class StateStrategy(ProcessStrategy):
    """Saves and restores; options as `ProcessStrategy`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """What drives a step (known once the model is set up)."""
        if self._engine is None:
            raise RuntimeError("the engine is not known before Trainer.fit (or validate, test, predict) has started")
        return self._engine

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.engine.data.module_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.engine.data.load_module_state(checkpoint["state_dict"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self.engine.data.optimizer_state()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.engine.data.load_optimizer_state(checkpoint["optimizer_states"][0])

    def save_checkpoint(self, checkpoint_: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ValueError("storage_options is not supported: a Parallax checkpoint is a folder of one file per rank")
        checkpoint.save(checkpoint_, Path(self.broadcast(str(filepath))), self.mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return checkpoint.load(Path(checkpoint_path), self.mesh)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))
