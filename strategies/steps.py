"""The part of the strategy that runs the user's steps on batches, through the engine.

It is: Lightning's hooks of one batch, each run so that an error of one rank is every rank's. It is not: what happens
within a step (`engine.py`), or set-up (`strategy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallax.plugins.data.base import StepResult
from parallax.strategies.states import StateStrategy


class StepStrategy(StateStrategy):
    """Trains, validates, tests and predicts on one batch; options as `ProcessStrategy`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.last_step: StepResult | None = None

    @property
    def handles_gradient_accumulation(self) -> bool:
        return False

    def training_step(self, batch: Any, *rest: Any) -> Any:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        with self._together("training_step"):
            return self.engine.train_step(
                self.lightning_module.training_step,
                batch,
                rest,
                accumulate=trainer.accumulate_grad_batches,
                last=trainer.is_last_batch and trainer.fit_loop.epoch_loop.batch_idx > 0,
            )

    def validation_step(self, batch: Any, *rest: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.validation_step, batch, rest)

    def test_step(self, batch: Any, *rest: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.test_step, batch, rest)

    def predict_step(self, batch: Any, *rest: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.predict_step, batch, rest)

    def _evaluate(self, fn: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        name = fn.__name__
        first = name not in self._agreed
        with self._together(name):
            if first:
                self.engine.require_same_batch(batch)
            return self.engine.eval_step(fn, batch, rest)

    def finish_gradients(self) -> None:
        with self._together("the reduction of gradients"):
            self.engine.finish_gradients()

    def step(self, clip: Any) -> None:
        with self._together("the optimizer step"):
            self.last_step = self.engine.step(clip)
