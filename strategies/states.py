"""The part of the strategy that says what a rank holds, and saves and restores it, through the engine.

It is: how a rank's tensors sit in the whole ones, and Lightning's hooks for the states of module and optimizer and for
checkpoints at the same layout. It is not: the form of a checkpoint on disk (`checkpoint.py`) or of a data engine's
states (`plugins/data/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.pipeline import PipelineParallel
from parallax.strategies import checkpoint
from parallax.strategies.assemble import averaged_lookup, shard_lookup
from parallax.strategies.engine import Engine
from parallax.strategies.export import Export
from parallax.strategies.padding import Padding
from parallax.strategies.processes import ProcessStrategy


class StateStrategy(ProcessStrategy):
    """Saves and restores; options as `ProcessStrategy`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._engine: Engine | None = None
        self._plugins: list[ParallelPlugin] = []

    @property
    def engine(self) -> Engine:
        """What drives a step (known once the model is set up)."""
        if self._engine is None:
            raise RuntimeError("the engine is not known before Trainer.fit (or validate, test, predict) has started")
        return self._engine

    def shard_of(self, fqn: str) -> ParamShard | None:
        """How this rank's tensor of parameter `fqn` sits in the whole one; None when it is whole and counts here."""
        return shard_lookup(self._plugins)(fqn)

    def averaged_over(self, fqn: str) -> str:
        """The mesh group of ranks that hold replicas of parameter `fqn`: "data", or "edp" for experts."""
        return averaged_lookup(self._plugins)(fqn)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """On rank 0 the state dict of the module as one process has it, on the CPU, with the experts of all ranks.

        Empty on other ranks. Collective; within `Trainer.fit` and the like, where the ranks hold their parts.
        """
        return self._export.state_dict()

    def whole_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """On rank 0 what the optimizer keeps in the shape of each parameter (Adam's moments), as one process has it.

        By the parameter's name, on the CPU; empty on other ranks. Collective, as `whole_state_dict`.
        """
        return self._export.optimizer_state()

    @property
    def _export(self) -> Export:
        assert self.lightning_module is not None
        return Export(
            self.lightning_module,
            self.engine.data,
            mesh=self.mesh,
            shard_of=self.shard_of,
            averaged_over=self.averaged_over,
        )

    def is_tied(self, fqn: str) -> bool:
        """Whether the parameter has a copy on the first and on the last pipeline stage."""
        return any(p.is_tied(fqn) for p in self._plugins if isinstance(p, PipelineParallel))

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
        without = Padding(self.shard_of).dropped(checkpoint_)
        checkpoint.save(without, Path(self.broadcast(str(filepath))), self.mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Padding(self.shard_of).added(checkpoint.load(Path(checkpoint_path), self.mesh))

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            checkpoint.remove(Path(filepath))
