"""Layers that take more than hidden states: encoder-decoders, and values made before the layers.

Right values come from one process. Models are transformers' own, unmodified, or plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

from parallax import ParallaxStrategy
from parallax.strategies.mesh import coordinates
from parallax.strategies.verify.given import Given
from tests.procs import run_ranks

VOCAB, DIM, STEPS, BATCH, SEQ = 37, 16, 3, 4, 6


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=4, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB, d_model=DIM, encoder_layers=2, decoder_layers=4, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, decoder_start_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


class PerLayer(nn.Module):
    """Every layer is given a part of a second embedding, as in Gemma 3n."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.extra = nn.Embedding(VOCAB, depth * DIM)
        self.project = nn.Linear(DIM, depth * DIM)
        self.layers = nn.ModuleList(PerLayerBlock() for _ in range(depth))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        extra = (self.project(x) + self.extra(ids)).unflatten(-1, (len(self.layers), DIM))
        for i, layer in enumerate(self.layers):
            x = layer(x, per_layer_input=extra[:, :, i])
        return self.head(x)


class PerLayerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, per_layer_input: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) * per_layer_input)


class Added(nn.Module):
    """Every layer sees the embedding again, as in Zamba: the shape is right, so that only the values would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(AddedBlock() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.embed(ids)
        for layer in self.layers:
            x = layer(x, first * 2)
        return self.head(x)


class AddedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) + first)


ONCE = {"model.embed": (["ids"], ["x"]), "model.layers": (["x"], ["x"]), "model.head": (["x"], ["logits"])}
SENT = {
    "model.embed": (["ids"], ["x"]),
    "model.extra": (["ids"], ["per_layer_input"]),
    "model.project": (["x"], ["per_layer_input"]),
    "model.layers": (["x", "per_layer_input"], ["x"]),
    "model.head": (["x"], ["logits"]),
}
FIRST = {
    "model.embed": (["ids"], ["x", "first"]),
    "model.layers": (["x", "first"], ["x"]),
    "model.head": (["x"], ["logits"]),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "bart": bart, "per_layer": PerLayer, "added": Added}


class Lit(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = name
        self.model: Any = MODELS[name]().double().train()
        with torch.no_grad():
            for param in self.model.parameters():
                if param.dim() > 1:
                    param.copy_(torch.randn_like(param) * 0.3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind in ("per_layer", "added"):
            logits = self.model(batch["input_ids"])
        else:
            mask = (batch["input_ids"] > 3).long()
            logits = self.model(
                input_ids=batch["input_ids"], attention_mask=mask, decoder_input_ids=batch["decoder_input_ids"]
            ).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples() -> list[dict[str, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    names = ("input_ids", "decoder_input_ids", "targets")
    return [{n: torch.randint(2, VOCAB, (SEQ,), generator=gen) for n in names} for _ in range(STEPS * BATCH)]


def reference(name: str) -> tuple[list[float], float, dict[str, Tensor]]:
    """Losses, loss on all samples afterwards, and weights, in one process."""
    module = Lit(name)
    opt = module.configure_optimizers()
    losses = []
    rows: list[Any] = samples()
    batches = [default_collate(rows[i * BATCH : (i + 1) * BATCH]) for i in range(STEPS)]
    for batch in batches:
        opt.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        val = sum(float(module.loss(batch)) for batch in batches) / STEPS
    return losses, val, {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}


def train(rank: int, world: int, name: str, layout: str, plan: Any) -> Any:
    strategy = ParallaxStrategy(layout, pp_plan=plan, cluster_environment=Given(rank, world))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Lit(name)
    losses: list[float] = []

    def note(outputs: Any, *_: Any) -> None:
        losses.append(float(strategy.reduce(outputs["loss"])))

    module.on_train_batch_end = note  # type: ignore[method-assign]
    dp = 2 if "dp2" in layout else 1
    index = coordinates(rank, strategy.requested_layout.resolve(world).axis_sizes())["dp"]
    mine = [row for at, row in enumerate(samples()) if at % dp == index]

    def loader() -> DataLoader[Any]:
        return DataLoader(mine, batch_size=BATCH // dp)  # type: ignore[arg-type]

    trainer.fit(module, loader(), loader())
    weights = {n: strategy.engine.data.full_param(n).detach().clone() for n, _ in module.named_parameters()}
    val = float(trainer.callback_metrics["val_loss"])
    strategy.close()
    return losses, val, weights


CASES = [
    ("t5", "pp4 mb4", None),
    ("t5", "pp2 dp2 zero3 mb2", None),
    ("bart", "pp2 dp2 zero1 interleaved_1f1b mb2", None),
    ("bart", "pp4 gpipe mb2", None),
    ("per_layer", "pp4 mb2", SENT),
    ("per_layer", "pp2 dp2 zb_v mb2", SENT),
    ("added", "pp4 zb_h1 mb4", FIRST),
]


def cases_rank(rank: int, world: int) -> Any:
    return [train(rank, world, *case) for case in CASES]


@pytest.fixture(scope="module")
def trained() -> Any:
    return run_ranks(4, cases_rank, timeout=200)


@pytest.mark.parametrize("at", range(len(CASES)), ids=[" ".join(case[:2]) for case in CASES])
def test_as_in_one_process(at: int, trained: Any) -> None:
    losses, val, weights = reference(CASES[at][0])
    held = set()
    for rank in trained:
        got_losses, got_val, got_weights = rank[at]
        assert got_losses == pytest.approx(losses, rel=1e-9)
        assert got_val == pytest.approx(val, rel=1e-9)
        for name, weight in got_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-8, atol=1e-9)
        held |= got_weights.keys()
    assert held >= {name for name, _ in Lit(CASES[at][0]).named_parameters()}


def refused_rank(rank: int, world: int) -> list[str]:
    texts = []
    for name, plan in (("added", ONCE), ("per_layer", ONCE)):
        with pytest.raises(ValueError) as error:
            train(rank, world, name, "pp2 dp2 mb2", plan)
        texts.append(str(error.value))
    return texts


def test_an_argument_made_on_another_stage_is_refused_by_every_rank() -> None:
    ranks = run_ranks(4, refused_rank, timeout=100)
    assert all(texts == ranks[0] for texts in ranks)
    argument, shape = ranks[0]
    assert "takes the argument 'first', which is computed from the output of a module before the layers" in argument
    assert "'model.embed': ([...], ['first']), 'model.layers': (['hidden_states', 'first']" in argument
    assert "unflatten" in shape and "only a stand-in is known here" in shape and "'model.project'" in shape
