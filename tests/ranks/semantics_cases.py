"""What a Lightning user does, as functions of the trainer they are done with.

It is: one LightningModule that uses whatever Lightning offers inside a step, and scenarios that return plain values.
The same scenario runs in one process of plain Lightning and at a layout; `test_semantics.py` compares. It is not:
aware of layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from tests.parity.models import VOCAB, build

ROWS, SEQ = 22, 8
"""Batches of 8 over all data ranks: the last one is incomplete."""
BATCH = 8

MakeTrainer = Callable[..., Trainer]


def rows(count: int = ROWS) -> TensorDataset:
    gen = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (count, SEQ), generator=gen)
    return TensorDataset(ids, torch.randint(0, VOCAB, (count, SEQ), generator=gen), torch.arange(count))


def loader(batch: int, count: int = ROWS) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=batch)


class User(LightningModule):
    """Written as Lightning's documentation writes modules; nothing here knows of stages or micro-batches."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.model = build("plain", torch.float64)
        self.lr = lr
        # Without this torchmetrics shows each data rank the value of its own rows in a step.
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro", dist_sync_on_step=True)
        self.largest = MaxMetric(dist_sync_on_step=True)
        self.seen, self.mean = SumMetric(), MeanMetric()
        self.given, self.given_now = SumMetric(), SumMetric(dist_sync_on_step=True)
        self.early: list[Tensor] = []
        # F1 and confusion are not means over micro-batches: their values tell a merged state from an averaged one.
        self.scores = MetricCollection({"f1": MulticlassF1Score(VOCAB), "recall": MulticlassAccuracy(VOCAB)})
        self.confusion = MulticlassConfusionMatrix(VOCAB)
        self.train_outputs: list[Tensor] = []
        self.val_losses: list[Tensor] = []
        self.val_rows: dict[int, list[Tensor]] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        """With a sampler of its own: the one Lightning adds under any distributed strategy shuffles."""
        place = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        batch = BATCH // place["num_replicas"]
        return DataLoader(rows(), batch_size=batch, sampler=DistributedSampler(rows(), shuffle=False, **place))

    def shared(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids, labels, _ = batch
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        # Before the model is called, and so on every pipeline stage.
        self.given.update(batch[0].double().sum())
        self.log("given", self.given, on_step=False, on_epoch=True)
        self.given_now(batch[2].sum())
        self.log("given_now", self.given_now, on_step=True, on_epoch=True)
        self.log("largest_row", batch[2].max().double(), reduce_fx="max", sync_dist=True)
        self.early.append(batch[2])
        loss, logits = self.shared(batch)
        flat = logits.flatten(0, 1).argmax(-1), batch[1].flatten()
        self.accuracy(*flat)
        self.seen.update(len(batch[0]))
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(batch[0]))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("index", float(batch_idx), on_step=True, on_epoch=False)
        self.log_dict({"twice": 2 * loss, "constant": 3.0}, sync_dist=True)
        self.train_outputs.append(loss.detach())
        return {"loss": loss, "correct": (flat[0] == flat[1]).sum(), "row": batch[2], "name": "train"}

    def on_train_epoch_end(self) -> None:
        self.log("kept", torch.stack(self.train_outputs).mean(), sync_dist=True)
        self.log("kept_count", float(len(self.train_outputs)), sync_dist=True)
        self.train_outputs.clear()
        self.log("early", torch.cat(self.early).double().square().sum(), reduce_fx="sum", sync_dist=True)
        self.early.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, logits = self.shared(batch)
        flat = logits.flatten(0, 1).argmax(-1), batch[1].flatten()
        self.mean.update(loss, weight=len(batch[0]))
        self.largest(flat[0].max())
        self.confusion.update(*flat)
        self.scores.update(*flat)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True, batch_size=len(batch[0]))
        self.log("val_mean", self.mean)
        self.log("val_largest", self.largest, on_step=True, on_epoch=True)
        self.val_losses.append(loss)
        self.val_rows.setdefault(batch_idx, []).append(batch[2])
        return {"loss": loss, "row": batch[2]}

    def on_validation_epoch_end(self) -> None:
        values = self.scores.compute()
        self.log_dict(values)
        self.log("confused", self.confusion.compute().double().square().sum().sqrt())
        self.log("val_kept", torch.stack(self.val_losses).mean(), sync_dist=True)
        seen = float(sum(len(r) for part in self.val_rows.values() for r in part))
        self.log("val_rows", seen, reduce_fx="sum", sync_dist=True)
        for used in (self.scores, self.confusion):
            used.reset()
        self.val_losses.clear()
        self.val_rows.clear()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss, logits = self.shared(batch)
        self.scores(logits.flatten(0, 1).argmax(-1), batch[1].flatten())
        self.log("test_loss", loss, sync_dist=True, batch_size=len(batch[0]))
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self.model(batch[0])
        return {"logits": logits, "row": batch[2], "words": [f"row {i}" for i in batch[2].tolist()]}

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [opt], [{"scheduler": torch.optim.lr_scheduler.StepLR(opt, 1, 0.9), "interval": "step"}]

    # Hooks of the module that are called once per batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        _note(self.trainer, "module.on_before_batch_transfer")
        return batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        _note(self.trainer, f"module.optimizer_step {epoch} {batch_idx}")
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        _note(self.trainer, f"module.optimizer_zero_grad {batch_idx}")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        _note(self.trainer, "module.configure_gradient_clipping")
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


class Watch(Callback):
    """Notes every hook that is called, in order, and what the progress bar and the callbacks are shown."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.shown: list[dict[str, float]] = []
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.append(f"on_train_batch_end {batch_idx}")
        self.shown.append(_floats(trainer.progress_bar_metrics) | _floats(trainer.callback_metrics))
        correct, row = trainer.strategy.reduce(outputs["correct"], reduce_op="sum"), outputs["row"]
        loss = trainer.strategy.reduce(outputs["loss"])
        self.outputs.append((float(loss), int(correct), together(trainer, row).tolist(), outputs["name"]))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any) -> None:
        self.hooks.append(f"on_validation_batch_end {index}")
        loss = trainer.strategy.reduce(outputs["loss"])
        self.outputs.append((float(loss), together(trainer, outputs["row"]).tolist()))


def _named(name: str) -> Callable[..., None]:
    def hook(self: Watch, *args: Any) -> None:
        self.hooks.append(" ".join([name, *(str(a) for a in args if type(a) is int)]))

    return hook


for _hook in dir(Callback):
    if _hook.startswith("on_") and _hook not in vars(Watch) and "checkpoint" not in _hook and "exception" not in _hook:
        setattr(Watch, _hook, _named(_hook))


class Memory(Logger):
    """A logger that keeps what it is given, on every rank."""

    name = version = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, _floats(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def _note(trainer: Trainer, what: str) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Watch):
            callback.hooks.append(what)


def _floats(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def together(trainer: Any, mine: Tensor) -> Tensor:
    """The data ranks' rows in dataset order: Lightning's sampler deals them out in turn."""
    parts = trainer.strategy.all_gather(mine)
    return parts.transpose(0, 1).flatten(0, 1) if parts.dim() > mine.dim() else mine


def watched(make: MakeTrainer, **options: Any) -> tuple[Trainer, Watch, Memory]:
    watch, memory = Watch(), Memory()
    callbacks = [watch, *options.pop("callbacks", [])]
    return make(callbacks=callbacks, logger=memory, log_every_n_steps=1, **options), watch, memory


def result(trainer: Trainer, watch: Watch, memory: Memory, **more: Any) -> dict[str, Any]:
    return {
        "hooks": watch.hooks, "shown": watch.shown, "outputs": watch.outputs, "logged": memory.rows,
        "step": trainer.global_step, "epoch": trainer.current_epoch,
        "metrics": _floats(trainer.callback_metrics), **more,
    }  # fmt: skip


# Scenarios

LOOPS = ("train", "validation", "test", "predict")


def fit_and_evaluate(make: MakeTrainer, batch: int, folder: str) -> Any:
    """Sanity check, validation inside the epoch, checkpoints by a monitored value; then validate, test, predict."""
    best = ModelCheckpoint(folder, monitor="val_loss", filename="{step}", save_top_k=1)
    trainer, watch, memory = watched(
        make, max_epochs=2, val_check_interval=2, limit_val_batches=2, gradient_clip_val=0.5, enable_checkpointing=True,
        callbacks=[LearningRateMonitor("step"), best], num_sanity_val_steps=1,
    )  # fmt: skip
    module = User()
    trainer.fit(module, val_dataloaders=loader(batch))
    out = result(trainer, watch, memory, best=best.best_model_path.rpartition("/")[2])
    out["best_score"] = float(best.best_model_score)  # type: ignore[arg-type]
    watch.hooks = []
    out["validate"] = trainer.validate(module, loader(batch), verbose=False)
    out["test"] = trainer.test(module, [loader(batch), loader(batch, 10)], verbose=False)
    predicted: Any = trainer.predict(module, loader(batch))
    out["predicted"] = [together(trainer, part["logits"]) for part in predicted]
    out["rows"] = [together(trainer, part["row"]).tolist() for part in predicted]
    out["words"] = [[int(word.split()[1]) for word in part["words"]] == part["row"].tolist() for part in predicted]
    out["later_hooks"] = watch.hooks
    return out


def limits(make: MakeTrainer, batch: int, folder: str) -> Any:
    """Accumulation that the epoch's end cuts short, max_steps inside an epoch, a limit on the training batches."""
    trainer, watch, memory = watched(
        make, max_steps=3, max_epochs=-1, accumulate_grad_batches=2, limit_train_batches=3, check_val_every_n_epoch=1,
        limit_val_batches=1, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(User(), val_dataloaders=loader(batch))
    return result(trainer, watch, memory)


def parts_of_an_epoch(make: MakeTrainer, batch: int, folder: str) -> Any:
    """A limit on every loop's batches: shares of them in training and validation, numbers and shares of each loader."""
    trainer, watch, memory = watched(
        make, max_epochs=2, limit_train_batches=0.7, limit_val_batches=0.4, limit_test_batches=1,
        limit_predict_batches=0.67, num_sanity_val_steps=0,
    )  # fmt: skip
    module = User()
    trainer.fit(module, val_dataloaders=loader(batch))
    out = result(trainer, watch, memory, validate=trainer.validate(module, loader(batch), verbose=False))
    out["test"] = trainer.test(module, [loader(batch), loader(batch, 10)], verbose=False)
    predicted: Any = trainer.predict(module, loader(batch))
    ends = [sum(hook.startswith(f"on_{loop}_batch_end") for hook in watch.hooks) for loop in LOOPS]
    assert ends == [2 * 2, 2 * 1 + 1, 2 * 1, 2], watch.hooks
    out["predicted"] = [(together(trainer, part["logits"]), together(trainer, part["row"])) for part in predicted]
    return out


def fast_dev_run(make: MakeTrainer, batch: int, folder: str) -> Any:
    """One batch of every loop, whatever the limits say, and no logger, seen in a progress bar; then two of them."""
    bar = TQDMProgressBar()
    once, watch, memory = watched(
        make, fast_dev_run=True, limit_train_batches=3, max_epochs=4, callbacks=[bar], enable_progress_bar=True
    )
    module = User()
    once.fit(module, val_dataloaders=loader(batch))
    assert bar.is_enabled == once.is_global_zero
    assert (bar.train_progress_bar.total, bar.train_progress_bar.n) == (1, int(once.is_global_zero))
    first = result(once, watch, memory, bar=_floats(bar.get_metrics(once, module)))
    first["test"] = once.test(module, loader(batch), verbose=False)
    twice, watch, memory = watched(make, fast_dev_run=2)
    module = User()
    twice.fit(module, val_dataloaders=loader(batch))
    predicted: Any = twice.predict(module, loader(batch))
    return first, result(twice, watch, memory), [together(twice, part["row"]) for part in predicted]


def overfit(make: MakeTrainer, batch: int, folder: str) -> Any:
    """The same two batches every epoch, in training and validation; stops as the loss does not get better."""
    stop = EarlyStopping("val_loss", patience=1)
    trainer, watch, memory = watched(make, max_epochs=6, overfit_batches=2, callbacks=[stop], num_sanity_val_steps=0)
    trainer.fit(User(lr=0.0), val_dataloaders=loader(batch))
    return result(trainer, watch, memory, stopped=stop.stopped_epoch)


def averaging() -> Callback:
    """Averages from the second step on."""
    return EMAWeightAveraging(decay=0.7, update_starting_at_step=1)


def ema(make: MakeTrainer, batch: int, folder: str) -> Any:
    """Validation sees the averaged weights, training the others; the average is what is left at the end."""
    trainer, watch, memory = watched(make, max_epochs=2, callbacks=[averaging()])
    module = User()
    trainer.fit(module, val_dataloaders=loader(batch))
    return result(trainer, watch, memory, after=trainer.validate(module, loader(batch), verbose=False))


def swa(make: MakeTrainer, batch: int, folder: str) -> Any:
    """Weights at the starts of the last epochs, averaged; the learning rate anneals to the one given."""
    stochastic = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)
    trainer, watch, memory = watched(make, max_epochs=3, callbacks=[stochastic, LearningRateMonitor()])
    module = User()
    trainer.fit(module, val_dataloaders=loader(batch))
    return result(trainer, watch, memory, after=trainer.validate(module, loader(batch), verbose=False))


class Stateful(DataLoader[Any]):
    """A loader that can be resumed, as Lightning asks of one (torchdata's StatefulDataLoader has the same methods)."""

    given = start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start % len(self), 0
        for at, batch in enumerate(super().__iter__()):
            self.given = at + 1
            if at >= start:
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


class Resumable(User):
    def train_dataloader(self) -> DataLoader[Any]:
        usual = super().train_dataloader()
        return Stateful(usual.dataset, batch_size=usual.batch_size, sampler=usual.sampler)


def resume(make: MakeTrainer, batch: int, folder: str, *, averaged: bool = False) -> Any:
    """A run broken off inside its second epoch goes on with the losses of one that was not."""
    runs = []
    for path in (None, f"{folder}/step=4.ckpt"):
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        more = [averaging()] if averaged else []
        trainer, watch, memory = watched(make, max_epochs=3, callbacks=[saver, *more], enable_checkpointing=True)
        module = Resumable()
        trainer.fit(module, val_dataloaders=loader(batch), ckpt_path=path, weights_only=False)
        after = trainer.validate(module, loader(batch), verbose=False)
        runs.append((result(trainer, watch, memory), after))
        close = getattr(trainer.strategy, "close", None)
        if close is not None:
            close()
    (straight, end), (resumed, same_end) = runs
    trained = [out for out in straight["outputs"] if len(out) == 4]
    again = [out for out in resumed["outputs"] if len(out) == 4]
    assert len(again) == len(trained) - 4 and again == trained[4:], (trained, again)
    assert same_end == end
    return [{k: v for k, v in straight.items() if k != "hooks"}, resumed, end]


class Writer(BasePredictionWriter):
    """Keeps which rows of the dataset Lightning says the predictions are of."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.indices: list[int] = []

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.indices = [i for loader in batch_indices for batch in loader for i in batch]


def predict_uneven(make: MakeTrainer, batch: int, folder: str) -> Any:
    """Nine rows do not divide by data ranks; Lightning predicts each of them once nevertheless."""
    writer = Writer()
    trainer = make(callbacks=[writer])
    predicted: Any = trainer.predict(User(), loader(batch // 2, 9))
    rows = torch.cat([part["row"] for part in predicted]).tolist()
    assert rows == writer.indices
    mine = dict(zip(rows, torch.cat([part["logits"] for part in predicted]), strict=True))
    mesh = getattr(trainer.strategy, "mesh", None)
    everyones = [mine] if mesh is None else mesh["data"].gather_objects(mine)
    found = {row: logits for theirs in everyones for row, logits in theirs.items()}
    return {row: found[row] for row in sorted(found)}


def resume_averaged(make: MakeTrainer, batch: int, folder: str) -> Any:
    return resume(make, batch, folder, averaged=True)


SCENARIOS = {
    f.__name__: f
    for f in (
        fit_and_evaluate, predict_uneven, limits, parts_of_an_epoch, fast_dev_run, overfit, resume, ema, swa,
        resume_averaged,
    )  # fmt: skip
}
AVERAGING = ("ema", "swa", "resume_averaged")
"""Refused under ZeRO-3, see unit/test_callbacks.py."""
