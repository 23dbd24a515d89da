"""Modules the verifier is shown: ordinary LightningModules with their own loaders."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.parity.models import BUILD, SEQ, VOCAB, gpt2
from tests.parity.models import Plain as PlainModel
from tests.parity.moe_models import logits_loss


class Rows(Dataset[Any]):
    """64 different samples; how many labels of each are ignored differs."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (SEQ,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 7] = -100
        return {self._key: ids, "labels": labels}


class Lit(LightningModule):
    """One of the parity models, with its own data."""

    name = "llama"

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model: Any = BUILD[self.name][0]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = BUILD[self.name][1](self.model, batch)
        self.log("train_loss", loss, sync_dist=True)
        self.log("doubled", loss.detach() * 2)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(BUILD[self.name][2]), batch_size=4, shuffle=True)


class Gpt2(Lit):
    name = "gpt2"


class Plain(Lit):
    """Built in `__init__`, with a scalar of its own and a scheduler of epochs."""

    name = "plain"
    configure_model = LightningModule.configure_model

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainModel(scaled=True)

    def configure_optimizers(self) -> Any:
        """With a scheduler of epochs, which waits for a validation that verify leaves out."""
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Moe(Lit):
    name = "plain_moe"


class Moody(Lit):
    """Not deterministic: random numbers of the operating system."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) * (1 + int.from_bytes(os.urandom(2), "big") / 1e6)


class Manual(Lit):
    @property
    def automatic_optimization(self) -> bool:
        return False


class NotAModule:
    pass


def needs_an_argument(size: int) -> LightningModule:
    raise AssertionError("never called")


class Mixtral(Lit):
    name = "mixtral"


class DeepSeek(Lit):
    """Its block calls the shared expert last."""

    name = "deepseek_v3"


class Balanced(Lit):
    """A Mixtral with an auxiliary loss."""

    name = "mixtral_balanced"


class _Llama(Lit):
    """One of the family, made from its name."""

    family = ""

    more: Mapping[str, Any] = MappingProxyType({})

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            from transformers import AutoConfig, AutoModelForCausalLM

            sizes = {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "pad_token_id": 0,
            }
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **sizes, **self.more))


class Olmo2(_Llama):
    """Queries and keys are normed over all heads."""

    family = "olmo2"


class Phi3(_Llama):
    """One matrix for queries, keys and values, of which four ranks share two heads."""

    family = "phi3"


class Qwen2Moe(_Llama):
    """Its block calls the shared expert first and that expert's gate last; experts as transformers makes them."""

    family = "qwen2_moe"
    more = MappingProxyType(
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        }
    )

    def training_step(self, batch: Any, index: int) -> Tensor:
        return logits_loss(self.model, batch)


class Dropping(Lit):
    """A GPT-2 with dropout everywhere."""

    name = "gpt2"

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = gpt2(dropout=0.2)
