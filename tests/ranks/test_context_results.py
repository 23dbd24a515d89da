"""What a Trainer gives back where sequences are cut: outputs, logs, metrics and bytes are those of whole sequences.

Right values come from one process of plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from parallax.plugins.context import kernels
from parallax.plugins.context.base import AttentionSpec, SequenceShards
from parallax.plugins.context.traffic import AttentionShape, traffic
from parallax.strategies.comm import Traffic
from tests.parity.models import VOCAB, build
from tests.procs import run_ranks
from tests.ranks.context_cases import ids, labels_of
from tests.ranks.test_context_parallel import trainer

ROWS, TOKENS = 4, 13


class Rows(Dataset[Any]):
    """A few samples of 13 tokens with their numbers."""

    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = ids(TOKENS, 2 * ROWS)
        return {"input_ids": tokens[index], "labels": labels_of(tokens)[index], "number": torch.tensor(index)}


class Lit(LightningModule):
    """Predicts, logs its loss and accuracy in the ways there are, and keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = build("llama", torch.float32)
        self.accuracy, self.step_accuracy = MeanMetric(), MeanMetric()
        self.kept: list[Tensor] = []
        self.numbers: list[int] = []

    def shared(self, batch: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(loss, logits, whether each next token is right, whether it counts)."""
        out = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        targets = batch["labels"][:, 1:]
        return out.loss, out.logits, out.logits[:, :-1].argmax(-1) == targets, targets != -100

    def training_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        loss, _, right, valid = self.shared(batch)
        self.numbers += batch["number"].tolist()
        self.log("accuracy", right[valid].float().mean())
        self.step_accuracy(right.float(), valid.float())
        self.log("step_accuracy", self.step_accuracy, on_step=True, on_epoch=False)
        self.log("targets", valid.sum().float(), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "right": (right & valid).sum()}

    def validation_step(self, batch: Any, index: int) -> Tensor:
        loss, _, right, valid = self.shared(batch)
        self.accuracy(right.float(), valid.float())
        self.log("val_loss", loss)
        self.log("val_accuracy", self.accuracy)
        self.kept.append(loss)
        return loss

    def predict_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        _, logits, right, valid = self.shared(batch)
        right = (right & valid).sum()
        return {"logits": logits, "tokens": logits.argmax(-1), "number": batch["number"], "right": right}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def one_process() -> dict[str, Any]:
    rows = Rows()
    batch: Any = {key: torch.stack([rows[i][key] for i in range(ROWS)]) for key in rows[0]}
    with torch.no_grad():
        model = Lit()
        out = model.model(input_ids=batch["input_ids"], labels=batch["labels"])
    targets = batch["labels"][:, 1:]
    right, valid = out.logits[:, :-1].argmax(-1) == targets, targets != -100
    right, valid = int((right & valid).sum()), int(valid.sum())
    return {"loss": float(out.loss), "logits": out.logits, "right": right, "valid": valid}


def results_rank(rank: int, world: int, layout: str) -> dict[str, Any]:
    outputs: list[Any] = []
    t = trainer(rank, world, layout, limit_train_batches=1, limit_val_batches=1, limit_predict_batches=1)
    module = Lit()
    module.on_train_batch_end = lambda out, *_: outputs.append(out)  # type: ignore[method-assign]
    t.fit(module, DataLoader(Rows(), ROWS), DataLoader(Rows(), ROWS))
    metrics = {name: float(value) for name, value in t.callback_metrics.items()}
    predicted = t.predict(module, DataLoader(Rows(), ROWS))
    t.strategy.close()  # type: ignore[attr-defined]
    return {"metrics": metrics, "predicted": predicted, "kept": [float(x) for x in module.kept], "outputs": outputs}


@pytest.mark.limit(150)
@pytest.mark.parametrize(("n", "layout"), [(2, "cp2 ring"), (4, "pp2 cp2 mb2"), (4, "tp2 cp2 contiguous")])
def test_results_are_those_of_whole_sequences(n: int, layout: str) -> None:
    want = one_process()
    accuracy = want["right"] / want["valid"]
    for got in run_ranks(n, results_rank, layout, timeout=100):
        metrics = got["metrics"]
        assert metrics["val_loss"] == pytest.approx(want["loss"], rel=1e-5)
        for name in ("accuracy", "step_accuracy", "val_accuracy"):
            assert metrics[name] == pytest.approx(accuracy, rel=1e-5), name
        assert metrics["targets"] == want["valid"]
        assert float(got["outputs"][0]["loss"]) == pytest.approx(want["loss"], rel=1e-5)
        assert int(got["outputs"][0]["right"]) == want["right"]
        assert got["kept"][-1] == pytest.approx(want["loss"], rel=1e-5)
        (predicted,) = got["predicted"]
        assert predicted["logits"].shape == (ROWS, TOKENS, VOCAB)
        error = (predicted["logits"] - want["logits"]).abs().max() / want["logits"].abs().max()
        assert float(error) < 1e-5
        assert torch.equal(predicted["tokens"], want["logits"].argmax(-1))
        assert predicted["number"].tolist() == [0, 1, 2, 3] and int(predicted["right"]) == want["right"]


# Samples


def sampled_rank(rank: int, world: int) -> list[int]:
    t = trainer(rank, world, "cp2 dp2", use_distributed_sampler=True)
    module = Lit()
    t.fit(module, DataLoader(Rows(), 2, shuffle=True))
    t.strategy.close()  # type: ignore[attr-defined]
    return module.numbers


def other_samples_rank(rank: int, world: int) -> str:
    t = trainer(rank, world, "cp2")
    with pytest.raises(ValueError) as found:
        t.fit(Lit(), DataLoader(Rows(), ROWS, shuffle=True, generator=torch.Generator().manual_seed(rank)))
    t.strategy.close()  # type: ignore[attr-defined]
    return str(found.value)


@pytest.mark.limit(100)
def test_ranks_of_one_sequence_get_the_same_samples() -> None:
    got = run_ranks(4, sampled_rank, timeout=80)
    assert got[0] == got[1] and got[2] == got[3]
    assert sorted(got[0] + got[2]) == list(range(2 * ROWS))


@pytest.mark.limit(100)
def test_other_samples_on_a_rank_of_the_sequence_are_refused() -> None:
    for message in run_ranks(2, other_samples_rank, timeout=60):
        assert "rank(s) [1] read other samples than rank 0, though they hold parts of the same sequences" in message


# Bytes


METHODS = ("ring", "all_gather", "ulysses")
RECOMPUTED = ("cp2 ring", "cp2 ring full")


def counting_rank(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {method: counted(rank, world, f"cp2 {method}") for method in METHODS}
    return found | {layout: calls_of_a_step(rank, world, layout) for layout in RECOMPUTED}


def calls_of_a_step(rank: int, world: int, layout: str) -> dict[str, int]:
    """Kernel calls of one step, and messages of keys, values and their gradients."""
    counts = {"forward": 0, "backward": 0}
    kept = kernels.forward, kernels.backward

    def counting(name: str, kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return kernel(*args)

        return call

    kernels.forward, kernels.backward = counting("forward", kept[0]), counting("backward", kept[1])
    try:
        found, _ = counted(rank, world, layout, steps=1)
    finally:
        kernels.forward, kernels.backward = kept
    return counts | {"sends": sum(one.calls for (_, kind, _), one in found.items() if kind == "send")}


def counted(rank: int, world: int, layout: str, steps: int = 2) -> tuple[dict[Any, Traffic], str]:
    """What the last of `steps` steps sends, and what the plugin says of it."""
    t = trainer(rank, world, layout, limit_train_batches=steps)
    module = Lit()
    counts: dict[Any, Traffic] = {}

    def before(*_: Any) -> None:
        t.strategy.mesh.ledger.reset()  # type: ignore[attr-defined]

    def after(*_: Any) -> None:
        counts.clear()
        ledger = t.strategy.mesh.ledger  # type: ignore[attr-defined]
        counts.update({key: value for key, value in ledger.counts.items() if key[0].startswith("cp")})

    module.on_train_batch_start, module.on_train_batch_end = before, after  # type: ignore[method-assign]
    t.fit(module, DataLoader(Rows(), ROWS))
    told = t.strategy.engine._context.describe()["sends in a step"]  # type: ignore[attr-defined]
    t.strategy.close()  # type: ignore[attr-defined]
    return counts, told


@pytest.fixture(scope="module")
def counts() -> Any:
    return run_ranks(2, counting_rank, timeout=100)


@pytest.mark.limit(150)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_of_a_step(method: str, counts: Any) -> None:
    """Attention as `traffic.py` says, for 5 layers; and beside it only what is as small as the labels.

    Labels are shifted twice (by the model and by the step), the loss adds two numbers up, and so do its mean, the log
    of a mean, that of a sum and the count of right tokens.
    """
    shards = SequenceShards.of(TOKENS, 2)
    layers, shape = 5, AttentionShape(batch=ROWS, heads=8, kv_heads=4, dim=4, value_dim=4, element=4)
    want = {
        key: Traffic(one.calls * layers, one.bytes * layers)
        for key, one in traffic(method, shape, AttentionSpec(), shards).items()
    }
    labels = Traffic(2, 2 * ROWS * shards.length * 8)
    numbers = Traffic(5, 16 + 16 + 8 + 16 + 8)
    for got in counts:
        counts_of, told = got[method]
        assert told == f"{method}: {layers} calls, " + ", ".join(
            f"{sum(t.bytes for (_, kind, when), t in want.items() if when == phase and kind != 'recv') / 1e6:.2f} MB "
            f"{phase}" for phase in ("forward", "backward")
        )
        rest = dict(counts_of)
        for key, one in want.items():
            here = rest.pop(key)
            rest[key] = Traffic(here.calls - one.calls, here.bytes - one.bytes)
        small: dict[str, list[Traffic]] = {}
        for (_, kind, _), one in rest.items():
            if one.calls:
                small.setdefault(kind, []).append(one)
        total = {kind: Traffic(sum(x.calls for x in xs), sum(x.bytes for x in xs)) for kind, xs in small.items()}
        assert total == {"all_gather": labels, "all_reduce": numbers}


@pytest.mark.limit(150)
def test_recomputed_layers_attend_once_more_and_no_oftener(counts: Any) -> None:
    """On 2 ranks an attention is 2 kernel calls each way (its own block, the other's), 1 message there and 2 back.

    Recomputation runs the forward a second time, not a third one in the attention's own backward.
    """
    layers = 5
    for got in counts:
        assert got["cp2 ring"] == {"forward": 2 * layers, "backward": 2 * layers, "sends": 3 * layers}
        assert got["cp2 ring full"] == {"forward": 4 * layers, "backward": 2 * layers, "sends": 4 * layers}
