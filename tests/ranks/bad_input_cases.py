"""Wrong settings, models and data, each given to a real Trainer on real ranks.

It is: one function per mistake, and what the ranks do with it. It is not: the expected texts (`test_bad_input.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from parallax import ParallaxStrategy
from parallax.strategies.verify.given import Given
from tests.parity.models import SEQ, VOCAB, Plain, plain_loss

WAIT = timedelta(seconds=20)
"""Of a collective: a rank that waits in vain says so instead of hanging until the test's limit."""


class Lit(LightningModule):
    """An ordinary LightningModule with a right training_step."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Plain(depth=2) if model is None else model

    def training_step(self, batch: Any, index: int) -> Any:
        return plain_loss(self.model, batch)

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val_loss", plain_loss(self.model, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class Case:
    """What one mistake needs.

    Attributes:
        layout: of the strategy.
        module, loader, validation: what is given to `Trainer.fit`; loaders are made on each rank.
        strategy, trainer: further arguments.
    """

    layout: str = ""
    module: Callable[[], Any] = Lit
    loader: Callable[[int], Any] = lambda rank: batches()
    validation: Callable[[int], Any] | None = None
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)


def rows(count: int = 8, seed: int = 3) -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [{key: torch.randint(0, VOCAB, (SEQ,), generator=gen) for key in ("ids", "labels")} for _ in range(count)]


def batches(count: int = 8, size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=size, **options)  # type: ignore[arg-type]


def llama(**sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**usual | sizes))


class LitLlama(Lit):
    def __init__(self, **sizes: int) -> None:
        super().__init__(llama(**sizes))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(input_ids=batch["ids"], labels=batch["labels"]).loss


class Different(Lit):
    """Built with a depth that depends on the rank."""

    def __init__(self) -> None:
        super().__init__(Plain(depth=2 if int(rank_zero_only.rank) == 2 else 1))


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoOptimizer(Lit):
    configure_optimizers = LightningModule.configure_optimizers


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]


class Lbfgs(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class HeadOnly(Lit):
    """Finds nothing to train on a stage without the head."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "head" in n], lr=0.1)


class OwnBackward(Lit):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class NoLoss(Lit):
    """Forgets `return loss`."""

    def training_step(self, batch: Any, index: int) -> Any:
        plain_loss(self.model, batch)


class Penalty(Lit):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) + sum(p.square().sum() for p in self.model.parameters())


class Twice(Lit):
    """Calls the whole model a second time, as contrastive losses do."""

    def training_step(self, batch: Any, index: int) -> Any:
        return plain_loss(self.model, batch) + plain_loss(self.model, batch)


class LossLater(Lit):
    """Forgets it at the second batch only."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = plain_loss(self.model, batch)
        return loss if index == 0 else None


class Crash(Lit):
    """A mistake of the user's own code, seen on the last stage only."""

    def training_step(self, batch: Any, index: int) -> Any:
        return plain_loss(self.model, batch) + batch["no such key"]


class Frozen(Lit):
    """Trains the head only, and says so by requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_("head" in name)


class NoValidation(Lit):
    """Validates something else than the model."""

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val_loss", 1.0)


class NoPlan(Lit):
    def __init__(self) -> None:
        super().__init__(Unplanned())


class Unplanned(Plain):
    tp_plan = None  # type: ignore[assignment]
    pp_plan = None  # type: ignore[assignment]


class NormLate(Plain):
    """Registers before the layers what it uses after them, and its plan does not say so."""

    pp_plan = {k: v for k, v in Plain.pp_plan.items() if k != "norm"}

    def __init__(self) -> None:
        super().__init__(depth=2)
        norm, layers = self.norm, self.layers
        del self.norm, self.layers
        self.norm, self.layers = norm, layers

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class NormEarly(Plain):
    """Uses before the layers what its plan names after them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids) + self.position[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def used(layout: str, *, closed: bool = True) -> Lit:
    """A module that another Trainer ran before, on the same ranks."""
    module, world = Lit(), dist.get_world_size()
    strategy = ParallaxStrategy(layout, cluster_environment=Given(dist.get_rank(), world), timeout=WAIT)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, fast_dev_run=True, enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, batches())
    if closed:
        strategy.close()
    return module


class Stream(IterableDataset[Any]):
    """Rows one by one; nobody knows how many."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(rows(self.count))


def stream(rank: int) -> DataLoader[Any]:
    return DataLoader(Stream(8 if rank else 4), batch_size=4)


def shuffled(rank: int) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank))  # type: ignore[arg-type]


def short_in_between(rank: int) -> DataLoader[Any]:
    """The second of three batches is shorter; only the last of an epoch may be."""
    return DataLoader(rows(18), batch_sampler=[range(8), range(8, 10), range(10, 18)])  # type: ignore[arg-type]


def attempt(rank: int, world: int, case: Case) -> tuple[str, str, float]:
    """(type, text) of what `Trainer.fit` raised on this rank, and the seconds it took."""
    started = time.monotonic()
    strategy = None
    try:
        module = case.module()
        strategy = ParallaxStrategy(
            case.layout, cluster_environment=Given(rank, world), timeout=WAIT, **case.strategy
        )
        options = {
            "accelerator": "cpu",
            "devices": world,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
        }
        trainer = Trainer(strategy=strategy, **options | case.trainer)
        trainer.fit(module, case.loader(rank), None if case.validation is None else case.validation(rank))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    finally:
        if strategy is not None:
            strategy.close()
    return "nothing", "", time.monotonic() - started


def refuse(rank: int, world: int, names: list[str]) -> dict[str, tuple[str, str, float]]:
    """Attempt the cases one after the other in the same processes: what one leaves behind must not hurt the next."""
    results = {}
    for name in names:
        print(f"case {name}", flush=True)
        results[name] = attempt(rank, world, CASES[name])
    return results


CASES: Mapping[str, Case] = {
    # layouts (4 ranks)
    "world": Case("tp3"),
    "world_exact": Case("tp2 pp2 dp2"),
    "key": Case("tensor_paralel_size=2"),
    "token": Case("tq2 pp2"),
    "option": Case("", strategy={"num_microbatch": 4}),
    "schedule": Case("pp2 schedule=1f1c"),
    "data_engine": Case("data_engine=depspeed"),
    "precision": Case(strategy={"precision": "16-true"}),
    # models
    "heads": Case("tp4", module=lambda: LitLlama(num_attention_heads=6, num_key_value_heads=2)),
    "kv_heads": Case("tp4", module=lambda: LitLlama(num_attention_heads=12, num_key_value_heads=6)),
    "hidden": Case("tp4", module=lambda: Lit(Plain(dim=30, heads=2, depth=2))),
    "intermediate": Case("tp4", module=lambda: LitLlama(intermediate_size=66)),
    "vocabulary": Case("tp4", module=LitLlama),
    "layers": Case("pp4"),
    "no_plan_tp": Case("tp2", module=NoPlan),
    "no_plan_pp": Case("pp2", module=NoPlan),
    "wrong_plan": Case("pp2", strategy={"pp_plan": {"model.embedding": None, "model.layers": None}}),
    "different_models": Case(module=Different),
    "used": Case("pp2", module=lambda: used("pp2")),
    "used_sharded": Case("zero3", module=lambda: used("zero3", closed=False)),
    "used_and_closed": Case("zero3", module=lambda: used("zero3")),
    # optimisation
    "manual": Case(module=Manual),
    "no_optimizer": Case(module=NoOptimizer),
    "two_optimizers": Case(module=TwoOptimizers),
    "lbfgs": Case(module=Lbfgs),
    "backward": Case(module=OwnBackward),
    "head_only": Case("pp2", module=HeadOnly),
    "one_data_rank": Case("pp2 mb4", loader=lambda rank: batches(12, 6) if rank % 2 else batches(8, 4)),
    # data
    "microbatches": Case("pp2 mb3"),
    "microbatches_later": Case("pp2 mb4", loader=short_in_between),
    "lengths": Case(loader=lambda rank: batches(8 if rank != 2 else 4)),
    "stream": Case(loader=stream),
    "equal_streams": Case(loader=lambda rank: DataLoader(Stream(8), batch_size=4)),
    "shuffled_tp": Case("tp2", loader=shuffled),
    "shuffled_pp": Case("pp2", loader=shuffled),
    # steps
    "no_loss": Case(module=NoLoss),
    "no_loss_1f1b": Case("pp2 mb4", module=NoLoss),
    "no_loss_gpipe": Case("pp2 tp2 mb4 gpipe", module=NoLoss),
    "later": Case("pp2", module=LossLater),
    "twice": Case("pp2 mb4", module=Twice),
    "penalty": Case("pp2 mb4", module=Penalty),
    "norm_late": Case("pp2", module=lambda: Lit(NormLate())),
    "norm_early": Case("pp2", module=lambda: Lit(NormEarly())),
    "crash": Case("pp2 mb4", module=Crash),
    "frozen": Case("pp2", module=Frozen),
    "no_validation": Case("pp2", module=NoValidation, validation=lambda rank: batches()),
    "shuffled_validation": Case("pp2", validation=shuffled),
}
