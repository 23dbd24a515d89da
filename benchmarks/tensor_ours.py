"""Parallax's side of `tensor.py`: the decoder under Lightning's Trainer, its ledger and its memory against formulas."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from tensor_worker import Kept, Meter, count_calls
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from work import Attention, Work, global_batch, loss_fn, optimizer

import parallax


class Lit(L.LightningModule):
    """The decoder, every step on the same batch."""

    def __init__(self, work: Work, model: nn.Module, steps: int) -> None:
        super().__init__()
        self.work, self.model, self.steps = work, model, steps

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_fn(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self, self.work)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = TensorDataset(*(part.repeat(self.steps, 1) for part in global_batch(self.work)))
        return DataLoader(rows, batch_size=self.work.batch)


class Watch(L.Callback):
    """Ticks the meter at the end of each step; the ledger counts the last one."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy.mesh.ledger.reset()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.meter.tick(float(outputs["loss"]))


def train(work: Work, meter: Meter, model: nn.Module, layout: str) -> None:
    """Fill `meter`."""
    fused = type(model.blocks[0].attn) is Attention
    strategy = parallax.ParallaxStrategy(layout)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=strategy.requested_layout.world_size,
        strategy=strategy,
        max_steps=meter.total,
        callbacks=[Watch(meter)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Lit(work, model, meter.total)
    trainer.fit(module)
    counts = dict(strategy.mesh.ledger.counts)
    counted = sum(t.bytes for (axis, _, phase), t in counts.items() if axis == "tp" and phase != "setup")
    if strategy.mesh.size("tp") > 1:
        meter.bytes = counted / textbook(work, sequence="sp1" in layout)
    tokens, targets = global_batch(work)
    kept = Kept(module.parameters())
    with kept():
        loss = loss_fn(module.model(tokens), targets)
    meter.kept = kept.bytes
    meter.formula = accounting(work, strategy.mesh.size("tp"), sequence="sp1" in layout, fused=fused)
    loss.backward()

    def step() -> None:
        loss_fn(module.model(tokens), targets).backward()
        for plugin in strategy.engine.plugins:
            plugin.finalize_grads(module, mesh=strategy.mesh)

    meter.calls = count_calls(step)


def textbook(work: Work, *, sequence: bool) -> int:
    """Bytes of a step on the tensor axis: see docs/tensor.md. fp32; the tokens divide."""
    tokens, blocks = work.batch * work.seq, 2 * work.layers
    activation = tokens * work.dim * 4
    loss = 3 * tokens * 4  # the maximum, the sum and the target's logit of every token
    if not sequence:
        return 2 * (blocks + 1) * activation + loss
    forward = 1 + (blocks + 1) + blocks  # the embedding, gathered inputs, scattered outputs
    backward = (2 * blocks + 2) + (blocks + 1)
    return (forward + backward) * activation + loss + (blocks + 1) * work.dim * 4


def accounting(work: Work, ranks: int, *, sequence: bool, fused: bool) -> float:
    """Bytes that one forward keeps on a rank, by the count of Korthikanti et al. (2022), section 4, over this decoder's
    own operations: no dropout, a gated MLP, fp32, RMS norms that keep their input and the normalised input."""
    tokens = work.batch * work.seq
    stream = tokens * work.dim / (ranks if sequence else 1)
    heads, ffn = tokens * work.dim / ranks, tokens * work.ffn / ranks
    scores = 0 if fused else work.batch * work.heads * work.seq**2 / ranks
    # two norms and what reads them; query, key, value and their result; gate, its activation, up and their product
    layer = 6 * stream + 4 * heads + scores + 4 * ffn
    head = 3 * stream + tokens * work.vocab / ranks  # the last norm, what reads it, and the loss's exponentials
    return 4 * (work.layers * layer + head)
