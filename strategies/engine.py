"""One training step, and one evaluation step, on this rank.

It is: split into micro-batches, weigh their losses, run the schedule, finish the gradients, clip and step. It is not:
Lightning's business (`strategy.py`), the schedule's execution (`plugins/pipeline/executor.py`) or the reduction over
the data axis (`plugins/data/`).

One loss normalisation, the default everywhere: a micro-batch counts by its number of valid target tokens among all
micro-batches of all data ranks, so that the step equals one process on the whole batch. A batch without labels
counts evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import Clip, DataEngine, StepResult
from parallax.plugins.pipeline.actions import Action, placement, splits_backward
from parallax.plugins.pipeline.catalog import Schedule, make_lists
from parallax.plugins.pipeline.executor import Executor
from parallax.plugins.pipeline.plugin import PipelineParallel
from parallax.plugins.pipeline.schedules.basic import forward_only, one_f_one_b
from parallax.plugins.pipeline.transfer import Transfer
from parallax.strategies.batch import batch_size, largest_divisor, split, valid_tokens, weighted_mean
from parallax.strategies.fingerprint import fingerprint
from parallax.strategies.logs import LogShare, Shared, recording, replay
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale
from parallax.strategies.tree import map_tensors, signature, tensors_of


class Engine:
    """Drives the user's unchanged steps at a layout.

    Args:
        module: the user's LightningModule, after all plugins were applied.
        mesh: where this rank sits.
        data: the data engine, set up.
        plugins: applied plugins, in order of application.
        schedule: the pipeline schedule.
        autocast: makes the precision context of one forward.
        scale: dynamic loss scale of 16-mixed, else None.
        device: where batches and activations live.
        fixed_microbatches: whether the user set num_microbatches; otherwise a batch it does not divide (the last one
            of an epoch) is split into the largest number of micro-batches below it that does.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        data: DataEngine,
        plugins: Sequence[ParallelPlugin],
        schedule: Schedule,
        autocast: Callable[[], AbstractContextManager[Any]],
        scale: LossScale | None,
        device: torch.device,
        fixed_microbatches: bool,
    ) -> None:
        self.module, self.mesh, self.data, self.plugins = module, mesh, data, tuple(plugins)
        self._schedule, self._autocast, self._scale, self._device = schedule, autocast, scale, device
        self._fixed = fixed_microbatches
        self._shifted = any(getattr(m, "loss_type", None) == "ForCausalLM" for m in module.modules())
        self._share = LogShare(mesh["pp"])
        self._lists: dict[tuple[Any, int], list[Action]] = {}
        self.steps = 0
        stage = next((p.state for p in plugins if isinstance(p, PipelineParallel)), None)
        transfer = Transfer(mesh["pp"], mesh["pp_back"], device) if stage is not None else None
        self._executor = Executor(data, mesh.ledger, stage, transfer)

    # Training

    def train_step(self, fn: Callable[..., Any], batch: Any, rest: Sequence[Any], accumulate: int = 1) -> Any:
        """Forward and backward of one batch; gradients accumulate until `step`.

        Args:
            fn: the user's training_step.
            batch: this data rank's batch.
            rest: further arguments of `fn` (batch_idx).
            accumulate: number of batches per optimizer step; the loss is divided by it.

        Returns:
            What the user's step returned, averaged over micro-batches, on every stage; losses are detached.
        """
        if self.steps == 0:
            self.require_same_batch(batch)
        count = self._count(batch)
        parts = self._shard(split(batch, count))
        counts = self._token_counts(parts)
        weights = self._weights(counts) / accumulate
        if self._scale is not None:
            weights = weights * self._scale.value
        losses: dict[int, Tensor] = {}

        def loss_of(index: int, output: Any) -> Tensor:
            loss = _loss(output)
            losses[index] = loss.detach()
            return loss * weights[index].to(loss.dtype)

        outputs, logs = self._run(fn, parts, rest, counts, loss_of)
        loss = weighted_mean([losses[i] for i in range(count)], counts) if losses else None
        extras = [{k: v for k, v in o.items() if k != "loss"} for o in outputs.values() if isinstance(o, Mapping)]
        extra = {k: _merge([e[k] for e in extras]) for k in extras[0]} if extras else {}
        shared = self._share(Shared(logs, loss, extra), self.module, self._device)
        replay(self.module, shared.logs)
        assert shared.loss is not None
        return {"loss": shared.loss, **shared.extra} if shared.extra else shared.loss

    def finish_gradients(self) -> None:
        """Complete and reduce the accumulated gradients. Between this and `step`, hooks may look at them."""
        with self.mesh.ledger.during("step", f"step {self.steps}, gradient reduction"):
            for plugin in self.plugins:
                plugin.finalize_grads(self.module, mesh=self.mesh)
            self.data.reduce()

    def step(self, clip: Clip) -> StepResult:
        """Clip and update the weights. Call after `finish_gradients`."""
        with self.mesh.ledger.during("step", f"step {self.steps}, optimizer step"):
            result = self.data.step(clip)
        self.steps += 1
        return result

    # Evaluation

    def eval_step(self, fn: Callable[..., Any], batch: Any, rest: Sequence[Any]) -> Any:
        """The user's validation_step, test_step or predict_step on one batch, whole; its output on every stage."""
        parts = self._shard([batch])
        if self.mesh.size("pp") == 1:
            with self._autocast():
                return self._whole(self.data.forward(fn, parts[0], *rest))
        outputs, logs = self._run(fn, parts, rest, torch.ones(1, device=self._device))
        shared = self._share(Shared(logs, None, {"output": outputs.get(0)}), self.module, self._device)
        replay(self.module, shared.logs)
        return shared.extra["output"]

    # Parts of a step

    def require_same_batch(self, batch: Any) -> None:
        """Ranks of one data index must have read the same samples; checked on the first step."""
        model = self.mesh["model"]
        if model.size == 1:
            return
        mine = [f"{tuple(t.shape)} {fingerprint(t)}" for t in tensors_of(batch)]  # as text, where nan equals nan
        theirs = model.gather_objects(mine)
        differ = [rank for rank, batch_there in zip(model.ranks, theirs, strict=True) if batch_there != theirs[0]]
        if differ:
            raise ValueError(
                f"rank(s) {differ} read other samples than rank {model.ranks[0]}, though they hold parts of the same "
                f"model copy. Let Lightning place the sampler (use_distributed_sampler=True), or seed your own from "
                f"the data rank only: trainer.strategy.distributed_sampler_kwargs gives num_replicas and rank"
            )

    def _count(self, batch: Any) -> int:
        wanted = self.mesh.layout.num_microbatches or 1
        if self._fixed or wanted == 1:
            return wanted
        return largest_divisor(batch_size(batch), wanted)

    def _shard(self, parts: list[Any]) -> list[Any]:
        for plugin in self.plugins:
            parts = [plugin.shard_batch(part, mesh=self.mesh) for part in parts]
        return parts

    def _whole(self, output: Any) -> Any:
        for plugin in self.plugins:
            output = plugin.whole_output(output)
        return output

    def _token_counts(self, parts: list[Any]) -> Tensor:
        """Valid target tokens of each micro-batch; ones when the batch has no labels."""
        counts = [valid_tokens(part, shifted=self._shifted) for part in parts]
        one = torch.ones((), device=self._device)
        return torch.stack([one if n is None else n.to(one) for n in counts]).double()

    def _weights(self, counts: Tensor) -> Tensor:
        """Factor of each micro-batch's loss: its tokens over all tokens, times the data ranks that are averaged."""
        data = self.mesh["data"]
        total = counts.sum()
        with self.mesh.ledger.during("forward", f"step {self.steps}, count of valid tokens"):
            data.all_reduce(total)
        return counts * (data.size / total.clamp(min=1))

    def _run(
        self,
        fn: Callable[..., Any],
        parts: list[Any],
        rest: Sequence[Any],
        counts: Tensor,
        loss_of: Callable[[int, Any], Tensor] | None = None,
    ) -> tuple[dict[int, Any], list[tuple[str, Any, dict[str, Any]]]]:
        actions = self._actions(len(parts), backward=loss_of is not None)
        keys = [(getattr(fn, "__name__", "step"), signature(part)) for part in parts]
        direct = self.mesh.size("pp") == 1 and len(parts) == 1  # the user's log calls are right as they are
        with recording(self.module, active=not direct) as recorder:

            def step(index: int) -> Any:
                recorder.microbatch = index
                with self._autocast():
                    return self._whole(fn(parts[index], *rest))

            outputs = self._executor.run(actions, step, keys, loss_of, note=f"step {self.steps}")
        return outputs, recorder.averaged(counts) if self.mesh.is_last_stage else []

    def _actions(self, count: int, *, backward: bool) -> list[Action]:
        key = (backward, count)
        if key not in self._lists:
            ranks = self.mesh.size("pp")
            schedule = self._schedule if ranks > 1 else one_f_one_b
            if backward:
                lists = make_lists(schedule, ranks, count, name=self.mesh.layout.schedule)
            else:
                lists = forward_only(range(ranks), count)
            if splits_backward(lists) or placement(lists) != tuple(range(ranks)):
                raise ValueError(f"schedule {self.mesh.layout.schedule!r} can be simulated but not yet run")
            self._lists[key] = lists[self.mesh.index("pp")]
        return self._lists[key]


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step must return the loss, or a dict with 'loss', on every batch; it returned "
            f"{type(output).__name__}"
        )
    return loss


def _merge(values: list[Any]) -> Any:
    """Micro-batch outputs as one: scalars averaged, tensors joined along dim 0, anything else as a list."""
    values = [map_tensors(Tensor.detach, v) for v in values]
    if len(values) == 1:
        return values[0]
    if all(isinstance(v, Tensor) for v in values):
        return torch.stack(values).mean(0) if values[0].dim() == 0 else torch.cat(values)
    return values
