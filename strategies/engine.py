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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.context import ContextParallel
from parallax.plugins.data.base import Clip, DataEngine, StepResult
from parallax.plugins.pipeline.actions import placement
from parallax.plugins.pipeline.catalog import Schedule, make_lists
from parallax.plugins.pipeline.executor import Executor
from parallax.plugins.pipeline.foreign import spread, sums_refused
from parallax.plugins.pipeline.plugin import PipelineParallel
from parallax.plugins.pipeline.routes import Route, route
from parallax.plugins.pipeline.schedules.basic import forward_only, one_f_one_b
from parallax.plugins.pipeline.transfer import Transfer
from parallax.strategies.batch import batch_size, largest_divisor, shifts_labels, split, valid_tokens
from parallax.strategies.fingerprint import fingerprint
from parallax.strategies.kept import Kept, Path
from parallax.strategies.logs import Logged, recording, replay
from parallax.strategies.mesh import Mesh
from parallax.strategies.metrics import MetricShare
from parallax.strategies.outputs import merge
from parallax.strategies.precision import LossScale
from parallax.strategies.share import TreeShare
from parallax.strategies.tree import signature, tensors_of


class Result(NamedTuple):
    """What one batch gave, from all its micro-batches; a tuple, so that tensors in it are found.

    Attributes:
        output: of the user's step.
        logs: in the order they were logged.
        kept: what was appended to lists of the module.
    """

    output: Any
    logs: list[Logged]
    kept: dict[Path, list[Any]]


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
        fixed_microbatches: whether the user set num_microbatches: a batch it does not divide is then refused, unless it
            is the last of an epoch. Otherwise such a batch runs in the largest number of micro-batches that does.
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
        self._shifted = shifts_labels(module)
        self._context = next((p for p in plugins if isinstance(p, ContextParallel)), None)
        self._routes: dict[tuple[bool, int], Route] = {}
        self.steps = 0
        pipeline = next((p for p in plugins if isinstance(p, PipelineParallel)), None)
        transfer = Transfer(mesh["pp"], mesh["pp_back"], device) if pipeline is not None else None
        self._placement = (0,) if pipeline is None else pipeline.placement
        source = self._placement[-1]  # the rank of the last stage knows what the user's step returned
        self._share = TreeShare(mesh["pp"], device, source=source)
        self._metrics = MetricShare(module, mesh, source=source)
        self._stage = None if pipeline is None else pipeline.state
        self._spread = spread(module)
        recompute = mesh.layout.recompute == "stage"
        self.executor = Executor(data, mesh.ledger, self._stage, transfer, recompute=recompute)

    # Training

    def teardown(self) -> None:
        """Make module and metrics ordinary ones again, as far as plugins allow."""
        self._metrics.release()
        self.data.teardown()

    def train_step(
        self, fn: Callable[..., Any], batch: Any, rest: Sequence[Any], accumulate: int = 1, last: bool = False
    ) -> Any:
        """Forward and backward of one batch; gradients accumulate until `step`.

        Args:
            fn: the user's training_step.
            batch: this data rank's batch.
            rest: further arguments of `fn` (batch_idx).
            accumulate: number of batches per optimizer step; the loss is divided by it.
            last: the batch ends an epoch, so it may be shorter than others.

        Returns:
            What the user's step returned, of all micro-batches (see `outputs.merge`), on every stage; without gradient.
        """
        if self.steps == 0:
            self.require_same_batch(batch)
        count = self._count(batch, last)
        if self.data.accumulation is not None:
            self.data.accumulation.repeats = count * accumulate > 1
        whole = split(batch, count)
        counts = self._token_counts(whole)
        parts = self._shard(whole)
        weights = self._weights(counts) / accumulate
        if self._scale is not None:
            weights = weights * self._scale.value

        def loss_of(index: int, output: Any) -> Tensor:
            loss = _loss(output)
            return loss * weights[index].to(loss.dtype)

        return self._run(fn, parts, rest, counts, loss_of)

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
        """The user's validation_step, test_step or predict_step on one batch; its output on every stage.

        With a pipeline the batch runs in as many micro-batches as divide it, up to the layout's number.
        """
        if self.mesh.size("pp") == 1 and self._context is None:
            with self._autocast():
                return self._whole(self.data.forward(fn, self._shard([batch])[0], *rest))
        count = self._count(batch, last=True)
        whole = split(batch, count)
        counts = self._token_counts(whole) if count > 1 else torch.ones(1, device=self._device)
        return self._run(fn, self._shard(whole), rest, counts)

    # Parts of a step

    def require_same_batch(self, batch: Any) -> None:
        """Ranks of one data index must have read the same samples; checked on the first step."""
        groups = [self.mesh[name] for name in ("model", "cp") if self.mesh.size(name) > 1]
        if not groups:
            return
        mine = [f"{tuple(t.shape)} {fingerprint(t)}" for t in tensors_of(batch)]  # as text, where nan equals nan
        for group in groups:
            theirs = group.gather_objects(mine)
            differ = [rank for rank, batch_there in zip(group.ranks, theirs, strict=True) if batch_there != theirs[0]]
            if differ:
                raise ValueError(
                    f"rank(s) {differ} read other samples than rank {group.ranks[0]}, though they hold parts of the "
                    f"same {'sequences' if group.axis == 'cp' else 'model copy'}. Let Lightning place the sampler "
                    f"(use_distributed_sampler=True), or seed your own from the data rank only: "
                    f"trainer.strategy.distributed_sampler_kwargs gives num_replicas and rank"
                )

    def _count(self, batch: Any, last: bool) -> int:
        wanted = self.mesh.layout.num_microbatches or 1
        if wanted == 1 or (self._fixed and not last):
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
    ) -> Any:
        way = self._route(len(parts), backward=loss_of is not None)
        keys = [(getattr(fn, "__name__", "step"), signature(part)) for part in parts]
        rows = _rows(parts[0])
        if self.mesh.size("pp") == 1 and len(parts) == 1 and self._context is None:
            # the user's log calls are right as they are

            def whole(index: int) -> Any:
                with self._autocast():
                    return self._whole(fn(parts[index], *rest))

            outputs = self.executor.run(way, whole, keys, loss_of, note=f"step {self.steps}")
            return merge(list(outputs.values()), counts, rows)
        kept = Kept(self.module)
        running = self._context.running() if self._context is not None else nullcontext(counts)
        with recording(self.module) as recorder, self._metrics.step(), running as own:

            def step(index: int) -> Any:
                for plugin in self.plugins:
                    plugin.begin(index)
                if self._stage is not None and not self._stage.is_last:
                    # It ends with the stage; what it has logged and counted by then it does again on the last one.
                    recorder.start(None)
                    with self._metrics.left_alone(), self._autocast(), sums_refused(self._spread):
                        return fn(parts[index], *rest)
                recorder.start(index)
                kept.start()
                with self._autocast(), sums_refused(self._spread):
                    output = self._whole(fn(parts[index], *rest))
                kept.stop(index, self._whole)
                return output

            outputs = self.executor.run(way, step, keys, loss_of, note=f"step {self.steps}")
            with self.mesh.ledger.during("forward", f"step {self.steps}, results of the step"):
                result = None
                if self._share.is_source:
                    output = merge([outputs[i] for i in range(len(parts))], counts, rows)
                    along = self.mesh["cp"] if self._context is not None else None
                    result = Result(output, recorder.logged(own, self._metrics, along), kept.appended(counts, rows))
                shared: Result = self._share(result)
        kept.replay(shared.kept)
        with self.mesh.ledger.during("forward", f"step {self.steps}, logged numbers"):
            replay(self.module, shared.logs, self._metrics)
        return shared.output

    def _route(self, count: int, *, backward: bool) -> Route:
        """This rank's way through the schedule for `count` micro-batches."""
        key = (backward, count)
        if key not in self._routes:
            ranks, layout = self.mesh.size("pp"), self.mesh.layout
            if not backward:
                lists = forward_only(self._placement, count)
            elif ranks == 1:
                lists = one_f_one_b(1, count)
            else:
                lists = make_lists(self._schedule, ranks, count, layout.stages_per_rank, name=layout.schedule)
            if placement(lists) != self._placement:
                raise ValueError(
                    f"schedule {layout.schedule!r} puts the stages on ranks {placement(lists)} for {count} micro-"
                    f"batches, but the model was cut for {self._placement}; a schedule must place them alike for all"
                )
            self._routes[key] = route(lists, self._placement, self.mesh.index("pp"))
        return self._routes[key]


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step must return the loss, or a dict with 'loss', on every batch; it returned "
            f"{type(output).__name__}"
        )
    return loss


def _rows(batch: Any) -> int:
    """Samples in a micro-batch; 0 when it holds no tensor that could tell."""
    return next((t.shape[0] for t in tensors_of(batch) if t.dim()), 0)
