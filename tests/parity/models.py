"""The three models parity is shown on: a Llama and a GPT-2 of transformers, unmodified, and a plain nn.Module.

Small, without dropout, with everything that goes wrong in parallel: grouped-query attention, tied weights, position
embeddings, biases, a vocabulary that no even number divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallax.conf import plain as conf_plain
from tests.parity.context_models import CONTEXT
from tests.parity.moe_models import BALANCED_MOE, MOE

VOCAB, SEQ, BATCH, STEPS = 61, 12, 8, 5


def llama(depth: int = 5) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=depth,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def gpt2(depth: int = 4, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=depth,
        n_head=4,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def lora() -> nn.Module:
    """A frozen Llama with low-rank adapters (peft) on its attention."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(llama(8), config)


class Plain(nn.Module):
    """A module that says how it may be cut, in the words Hugging Face models use."""

    tp_plan = conf_plain.Plain.tp_plan
    pp_plan = {
        "embed": (["ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "norm": (["x"], ["x"]),
        "head": (["x"], ["logits"]),
    }

    def __init__(self, dim: int = 32, heads: int = 4, depth: int = 4, scaled: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.position = nn.Parameter(torch.randn(SEQ, dim) * 0.02)
        self.layers = nn.ModuleList(conf_plain.PlainBlock(dim, heads, 4 * dim, 1e-5) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.1)) if scaled else 1.0  # of the model as a whole, used at its end

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x) * self.scale)


def hf_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    if model.dtype != torch.float64:
        return model(**batch).loss
    # transformers computes its own loss in fp32 whatever the model's dtype, which hides everything below 1e-7
    logits, labels = model(batch["input_ids"]).logits, batch["labels"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tokens(name: str, batch: Mapping[str, Tensor]) -> int:
    """Target tokens that count, by the model's own rule."""
    labels = batch["labels"] if BUILD[name][2] == "ids" else batch["labels"][:, 1:]
    return int((labels != -100).sum())


def plain_loss(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


BUILD: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor], str]] = MappingProxyType(
    {
        "llama": (llama, hf_loss, "input_ids"),
        "gpt2": (gpt2, hf_loss, "input_ids"),
        "plain": (Plain, plain_loss, "ids"),
        # enough layers for four ranks with two stages each
        "llama8": (partial(llama, 8), hf_loss, "input_ids"),
        "gpt2_8": (partial(gpt2, 8), hf_loss, "input_ids"),
        "plain8": (partial(Plain, depth=8, scaled=True), plain_loss, "ids"),
        "lora8": (lora, hf_loss, "input_ids"),
        **MOE,
        **{name: (make, hf_loss, "input_ids") for name, make in CONTEXT.items()},
        **BALANCED_MOE,
    }
)


def samples(name: str, steps: int = STEPS, ignored: bool = True, size: int = BATCH) -> list[dict[str, Tensor]]:
    """`steps` global batches of `size`, one after the other; some labels are ignored, unevenly over the batch."""
    gen = torch.Generator().manual_seed(11)
    key = BUILD[name][2]
    out = []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (size, SEQ), generator=gen)
        labels = ids.clone() if key == "input_ids" else torch.randint(0, VOCAB, (size, SEQ), generator=gen)
        if ignored:
            for row in range(size):
                labels[row, : row % 5 + 1] = -100
        out.append({key: ids, "labels": labels})
    return out


def build(name: str, dtype: torch.dtype, seed: int = 5) -> nn.Module:
    """The model with random weights of `seed`, of a size that makes gradients of ordinary size."""
    torch.manual_seed(seed)
    model = BUILD[name][0]().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.mul_(2.0)
            else:
                param.add_(torch.randn_like(param) * 0.1)
    return model.train()
