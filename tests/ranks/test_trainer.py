"""What Lightning users rely on, through a real Trainer on four ranks: logging, validation, callbacks, schedulers,
checkpoints, accumulation, clipping by value, prediction order.

Right values come from one process of plain torch (`tests/parity/reference.py`, or written out here).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from parallax import ParallaxStrategy
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.parity.models import VOCAB, Plain, build
from tests.procs import run_ranks

ROWS = 16


def data(seed: int = 3) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (ROWS, 8), generator=gen), torch.randint(0, VOCAB, (ROWS, 8), generator=gen)


class Lit(LightningModule):
    """A plain module in fp64 that logs whatever there is to log."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.model = build("plain", torch.float64)
        self.lr = lr
        self.seen = SumMetric()
        self.average = MeanMetric()
        self.history: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        ids, labels = batch
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.seen(len(batch[0]))
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.log_dict({"twice": 2 * loss, "constant": 3.0}, sync_dist=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "rows": batch[0][:, 0]}

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        self.average.update(loss, weight=len(batch[0]))
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_average", self.average)

    def test_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("test_loss", loss, sync_dist=True)
        return loss

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        opt = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return {
            "optimizer": opt,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(opt, 1, 0.5), "interval": "step"},
        }


def trainer(rank: int, world: int, layout: str, **options: Any) -> Trainer:
    strategy = ParallaxStrategy(layout, cluster_environment=Given(rank, world))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    return Trainer(
        strategy=strategy, accelerator="cpu", devices=world, precision="64-true", enable_model_summary=False,
        use_distributed_sampler=False, **{**quiet, **options},
    )  # fmt: skip


def loader(trainer: Trainer, batch: int = 4, rows: int = ROWS) -> DataLoader[Any]:
    """This data rank's part of each global batch of `batch * dp` rows, in order."""
    strategy: Any = trainer.strategy
    world = strategy.cluster_environment.world_size()
    sizes = strategy.requested_layout.resolve(world).axis_sizes()
    mine = coordinates(strategy.cluster_environment.global_rank(), sizes)["dp"]
    ids, labels = (t[:rows] for t in data())
    picked = torch.arange(rows).reshape(-1, sizes["dp"], batch)[:, mine].flatten()
    return DataLoader(TensorDataset(ids[picked], labels[picked]), batch_size=batch)


def one_process(steps: int, batch: int, lr: float = 1e-2, gamma: float = 0.5, **clip: float) -> tuple[list[float], Any]:
    """Plain torch: losses of the first `steps` batches and the module afterwards."""
    model = build("plain", torch.float64)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    ids, labels = data()
    losses = []
    for at in range(steps):
        rows = slice(at * batch, (at + 1) * batch)
        loss = F.cross_entropy(model(ids[rows]).flatten(0, 1), labels[rows].flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_value_(model.parameters(), clip["value"])
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["lr"] *= gamma
        losses.append(float(loss.detach()))
    return losses, model


def weights(t: Trainer) -> dict[str, Tensor]:
    strategy: Any = t.strategy
    names = [n for n, _ in t.lightning_module.named_parameters()]
    return {n: strategy.engine.data.full_param(n).detach().clone() for n in names}


def close(t: Trainer) -> None:
    strategy: Any = t.strategy
    strategy.close()


def agrees(got: dict[str, Tensor], model: nn.Module, tolerance: float = 1e-9) -> None:
    want = dict(model.named_parameters())
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name.removeprefix("model.")].detach(), rtol=tolerance, atol=tolerance)


# Logging


def logging_rank(rank: int, world: int, folder: str) -> Any:
    monitor = LearningRateMonitor(logging_interval="step")
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best-{val_loss:.3f}")
    t = trainer(
        rank, world, "pp2 dp2 mb2", logger=CSVLogger(folder, name="csv", version=0), log_every_n_steps=1,
        enable_checkpointing=True, callbacks=[monitor, best],
    )  # fmt: skip
    module = Lit()
    rows: list[Any] = []
    module.on_train_batch_end = lambda out, *_: rows.append(out["rows"])  # type: ignore[method-assign, assignment]
    t.fit(module, loader(t), loader(t))
    metrics = {k: float(v) for k, v in t.callback_metrics.items()}
    test = t.test(module, loader(t), verbose=False)
    predicted = torch.cat(t.predict(module, loader(t)))  # type: ignore[arg-type]
    close(t)
    return metrics, torch.cat(rows), test[0]["test_loss"], predicted, best.best_model_path


def test_logging_evaluation_and_prediction(tmp_path: Path) -> None:
    ranks = run_ranks(4, logging_rank, str(tmp_path), timeout=110)
    losses, model = one_process(2, 8)
    ids, labels = data()
    with torch.no_grad():
        after = float(F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()))
    for rank, (metrics, rows, test_loss, predicted, best) in enumerate(ranks):
        assert metrics["train_loss_step"] == pytest.approx(losses[-1], rel=1e-9)
        assert metrics["train_loss_epoch"] == pytest.approx(sum(losses) / 2, rel=1e-9)
        assert metrics["twice"] == pytest.approx(2 * losses[-1], rel=1e-9)
        assert metrics["constant"] == 3.0
        assert metrics["seen"] == ROWS, "every sample counted once, whatever the layout"
        assert metrics["val_loss"] == pytest.approx(after, rel=1e-9)
        assert metrics["val_average"] == pytest.approx(after, rel=1e-6)  # torchmetrics adds in fp32
        assert test_loss == pytest.approx(after, rel=1e-9)
        mine = torch.arange(ROWS).reshape(-1, 2, 4)[:, rank % 2].flatten()
        assert torch.equal(rows, ids[mine][:, 0]), "outputs of training_step in the order of the batch"
        assert torch.equal(predicted, model(ids[mine]).argmax(-1)), "predictions in the order of the data"
        assert best == ranks[0][4] and Path(best, "meta.pt").is_file()
    table = (tmp_path / "csv/version_0/metrics.csv").read_text().splitlines()
    head = table[0].split(",")
    lrs = [row.split(",")[head.index("lr-AdamW")] for row in table[1:]]
    assert [float(lr) for lr in lrs if lr] == [1e-2, 5e-3]


# Schedulers by epoch


class ByEpoch(Lit):
    def configure_optimizers(self) -> Any:
        opt = torch.optim.SGD(self.parameters(), lr=0.5)
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)]


def by_epoch_rank(rank: int, world: int, layout: str) -> Any:
    t = trainer(rank, world, layout, max_epochs=3)
    module = ByEpoch()
    before: list[float] = []
    module.on_train_epoch_start = lambda: before.append(t.optimizers[0].param_groups[0]["lr"])  # type: ignore[method-assign]
    t.fit(module, loader(t, batch=ROWS // 2))
    out = before, weights(t)
    close(t)
    return out


@pytest.mark.parametrize("layout", ["pp2 dp2 mb2", "tp2 dp2 zero3"])
def test_a_scheduler_by_epoch_drives_the_sharded_optimizer(layout: str) -> None:
    model = build("plain", torch.float64)
    ids, labels = data()
    for lr in (0.5, 0.25, 0.125):
        model.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= lr * param.grad  # type: ignore[operator]
    parts = run_ranks(4, by_epoch_rank, layout, timeout=100)
    for lrs, got in parts:
        assert lrs == [0.5, 0.25, 0.125]
        if layout.startswith("pp2"):
            agrees(got, model)
    norm = "model.norm.weight"  # whole on every rank of tp
    for _, got in parts:
        if norm in got:
            torch.testing.assert_close(
                got[norm], dict(model.named_parameters())["norm.weight"].detach(), rtol=1e-9, atol=1e-9
            )


# Early stopping


def stopping_rank(rank: int, world: int) -> int:
    t = trainer(rank, world, "pp2 dp2 mb2", max_epochs=9, callbacks=[EarlyStopping("val_loss", patience=2)])
    t.fit(Lit(lr=0.0), loader(t), loader(t))  # a loss that never gets better
    close(t)
    return t.current_epoch


def test_early_stopping_ends_every_rank_at_once() -> None:
    assert run_ranks(4, stopping_rank, timeout=100) == [3, 3, 3, 3]


# Accumulation, clipping by value


def accumulating_rank(rank: int, world: int, layout: str) -> Any:
    t = trainer(rank, world, layout, accumulate_grad_batches=2, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    t.fit(Lit(), loader(t, batch=2))
    out = weights(t), t.global_step
    close(t)
    return out


@pytest.mark.parametrize("layout", ["pp2 dp2 mb2", "pp2 dp2 zero2 mb2", "dp4 zero3", "dp4 fsdp"])
def test_accumulation_and_clipping_by_value(layout: str) -> None:
    dp = 4 if layout.startswith("dp4") else 2
    losses, model = one_process(ROWS // (4 * dp), 4 * dp, value=0.01)
    for got, steps in run_ranks(4, accumulating_rank, layout, timeout=100):
        assert steps == len(losses)
        agrees(got, model)


# Checkpoints


def resuming_rank(rank: int, world: int, folder: str, layout: str) -> Any:
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    straight = trainer(rank, world, layout, max_epochs=2, enable_checkpointing=True, callbacks=[saver])
    straight.fit(Lit(), loader(straight))
    want = weights(straight)
    close(straight)

    saved = f"{folder}/epoch=0.ckpt"
    second = trainer(rank, world, layout, max_epochs=2)
    second.fit(Lit(lr=123.0), loader(second), ckpt_path=saved, weights_only=False)
    got = weights(second)
    lr = second.optimizers[0].param_groups[0]["lr"]
    close(second)

    other = trainer(rank, world, "dp4")
    with pytest.raises(ValueError, match="another layout.*pipeline_parallel_size: 2 then, 1 now"):
        other.fit(Lit(), loader(other, batch=1), ckpt_path=saved, weights_only=False)
    close(other)
    return want, got, lr, second.global_step


@pytest.mark.parametrize("sharding", ["zero0", "zero1", "zero3", "fsdp"])
def test_resume_equals_a_straight_run(sharding: str, tmp_path: Path) -> None:
    for want, got, lr, steps in run_ranks(4, resuming_rank, str(tmp_path), f"pp2 dp2 {sharding} mb2", timeout=100):
        assert steps == 4
        assert lr == pytest.approx(1e-2 * 0.5**4)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), f"{name} differs after resuming"


# One trainer, several modules


def several_rank(rank: int, world: int, layout: str) -> Any:
    t = trainer(rank, world, layout, max_epochs=1)
    first, second = Lit(), Lit()
    t.fit(first, loader(t))
    trained = t.validate(first, loader(t), verbose=False)[0]["val_loss"]
    untrained = t.validate(second, loader(t), verbose=False)[0]["val_loss"]
    t.fit_loop.max_epochs = 2
    t.fit(second, loader(t))
    close(t)
    return trained, untrained


@pytest.mark.parametrize("layout", ["tp2 pp2", "dp2 pp2 zero3 mb2", "dp2 pp2 fsdp mb2"])
def test_another_module_is_another_model(layout: str) -> None:
    dp = 2 if "dp2" in layout else 1
    _, model = one_process(ROWS // (4 * dp), 4 * dp)
    fresh: Any = build("plain", torch.float64)
    ids, labels = data()
    with torch.no_grad():
        want = [float(F.cross_entropy(m(ids).flatten(0, 1), labels.flatten())) for m in (model, fresh)]
    assert want[0] != pytest.approx(want[1], rel=1e-3)
    for got in run_ranks(4, several_rank, layout, timeout=100):
        assert list(got) == pytest.approx(want, rel=1e-9)


def test_the_model_trained_here_is_the_reference() -> None:
    assert isinstance(build("plain", torch.float64), Plain)
