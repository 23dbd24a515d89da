"""Trains one of the models with a real Trainer at a layout, on one rank, and puts ranks' parts together.

It is: the code the ranks run and the assembly of what they return. It is not: the right values (`reference.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from parallax import ParallaxStrategy
from parallax.plugins.base import ParamShard
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity import reference
from tests.parity.models import BATCH, BUILD, STEPS, build, samples, tokens

PRECISION = {torch.float64: "64-true", torch.float32: "32-true"}


class Lit(LightningModule):
    """An ordinary LightningModule around one of the models."""

    def __init__(self, name: str, dtype: torch.dtype, recompute: bool = False, experts: str | None = None) -> None:
        super().__init__()
        self.kind, self.width = name, dtype
        self.model: Any = build(name, dtype)
        if experts is not None:
            self.model.set_experts_implementation(experts)
        if recompute:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = BUILD[self.kind][1](self.model, batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return reference.optimizer(self.parameters(), self.width)


def loader(
    name: str,
    data_size: int = 1,
    data_index: int = 0,
    *,
    steps: int = STEPS,
    size: int = BATCH,
    last: Sequence[int] = (),
) -> DataLoader[Any]:
    """This data rank's share of the reference's batches, in their order (Lightning's sampler would shuffle).

    `last`: rows of the last batch on each data rank, where it is not spread evenly.
    """
    even = [size // data_size] * data_size
    rows = [{k: v[i] for k, v in batch.items()} for batch in samples(name, steps, size=size) for i in range(size)]
    mine = []
    for at, counts in enumerate([even] * (steps - 1) + [list(last) or even]):
        start = at * size + sum(counts[:data_index])
        mine.append(list(range(start, start + counts[data_index])))
    return DataLoader(rows, batch_sampler=mine)  # type: ignore[arg-type]


class Watch(Callback):
    """Notes loss, norm and this rank's gradients at each step."""

    def __init__(self) -> None:
        self.run = reference.Run()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        data = trainer.strategy.engine.data
        names = [n for n, p in module.named_parameters() if p.requires_grad]
        grads = {n: g.clone() for n in names if (g := data.full_grad(n)) is not None}
        self.run.first_grads = self.run.first_grads or grads
        self.run.last_grads = grads

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        count = tokens(module.kind, batch)
        loss = float(outputs["loss"]) * trainer.accumulate_grad_batches  # Lightning shows each batch's part
        sums = torch.tensor([loss * count, count], dtype=torch.float64)
        trainer.strategy.mesh["data"].all_reduce(sums)  # the whole batch's loss: data ranks hold uneven counts
        self.run.losses.append(float(sums[0] / sums[1]))
        if trainer.global_step > len(self.run.norms):
            self.run.norms.append(float(trainer.strategy.last_step.grad_norm))


def train_rank(
    rank: int,
    world: int,
    name: str,
    dtype: torch.dtype,
    layout: str,
    options: dict[str, Any],
    scale: float = 0.0,
    recompute: bool = False,
    steps: int = STEPS,
    size: int = BATCH,
    accumulate: int = 1,
    experts: str | None = None,
    last: Sequence[int] = (),
) -> Any:
    """One rank's training. Returns its `Run`, how each of its tensors sits in the whole one, and the final loss scale.

    `options` go to the strategy; `scale` is the first loss scale of 16-mixed; `recompute` turns on activation
    recomputation as transformers does it; `steps`, `size` and `accumulate` are the reference's; `experts` is how
    transformers' experts are computed, when not as the model was built; `last` is the loader's.
    """
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world), **options)
    watch = Watch()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world,
        precision=PRECISION[dtype] if "precision" not in options else None,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=reference.CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[watch],
    )
    plugin: Any = trainer.precision_plugin
    if scale:
        plugin.scale.value = scale
    module = Lit(name, dtype, recompute, experts)
    sizes = strategy.requested_layout.resolve(world).axis_sizes()
    trainer.fit(module, loader(name, sizes["dp"], coordinates(rank, sizes)["dp"], steps=steps, size=size, last=last))
    names = [n for n, _ in module.named_parameters()]
    watch.run.weights = {n: strategy.engine.data.full_param(n).detach().clone() for n in names}
    shards = {n: strategy.shard_of(n) for n in names}
    strategy.close()
    return watch.run, shards, plugin.scale.value if plugin.scale is not None else None


def whole(
    parts: list[tuple[dict[str, Tensor], dict[str, ParamShard | None]]], like: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Put the ranks' tensors together under the reference's names; replicas must agree, nothing may be missing.

    `parts`: (local tensors, shards) by rank, names prefixed "model.".
    """
    out = {n: torch.full_like(t, float("nan")) for n, t in like.items()}
    tied = {"lm_head.weight": "transformer.wte.weight"} if "transformer.wte.weight" in like else {}
    for tensors, shards in parts:
        for fqn, local in tensors.items():
            name = fqn.removeprefix("model.")
            name = tied.get(name, name)
            shard = shards[fqn] or ParamShard(tuple(local.shape))
            before = out[name].clone()
            shard.put(out[name], local)
            both = ~before.isnan() & ~(before == out[name])
            assert not both.any(), f"replicas of {name} differ by {(before - out[name])[both].abs().max()}"
    missing = [n for n, t in out.items() if t.isnan().any()]
    assert not missing, f"no rank holds {missing}"
    return out
