"""Small models the tests of the tensor plugin cut: Hugging Face ones, and a plain one with a plan of its own.

It is: builders from a name, seeded by it, and one batch. It is not: anything that knows of parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 101  # a prime: padded at every size
HIDDEN = 32
BATCH, SEQ = 2, 5


class Attention(nn.Module):
    """Fused query, key, value of unequal width (4 query heads share 2 of each), normed per head."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 8, 4, 4
        self.qkv = nn.Linear(HIDDEN, (8 + 4 + 4) * self.head_dim)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        widths = [self.num_heads * self.head_dim] + [self.num_kv_heads * self.head_dim] * 2
        q, k, v = (t.view(b, s, -1, self.head_dim).transpose(1, 2) for t in self.qkv(x).split(widths, dim=-1))
        out = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(b, s, self.num_heads * self.head_dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)
        self.down2 = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x + self.down2(F.silu(x))  # its input is whole


class Plain(nn.Module):
    """Embedding with a padding id, two blocks, a head with a bias; every implemented word is in its plan."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=60)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.tp_plan = {
            "embed": "embedding_rowwise",
            "blocks.*.norm": "replicate",
            "blocks.*.attn.qkv": "packed_colwise(2,1,1)",
            "blocks.*.attn.q_norm": "replicated_with_grad_allreduce",
            "blocks.*.attn.num_heads": "local_size",
            "blocks.*.attn.num_kv_heads": "local_size",
            "blocks.*.attn.out": "rowwise",
            "blocks.0.up": "colwise",
            "blocks.0.down": "rowwise",
            "blocks.1.up": "packed_colwise",
            "blocks.1.down": "packed_rowwise",
            "blocks.*.down2": "rowwise_split_input",
            "head": "colwise_gather_output",
        }

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gated(nn.Module):
    """An MLP as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(HIDDEN, 48)
        self.down = nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Shift(nn.Module):
    """Mixes each token with the one before it; no plan says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1] * self.weight


class Layer(nn.Module):
    """Attention, a token mixer, and an MLP: a module of its own, or written out in the layer."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.attn, self.shift = Attention(), Shift()
        self.mlp = None if written_out else Gated()
        if written_out:
            self.fc1, self.fc2 = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attn(self.norm(x))
        n = self.norm2(x + self.shift(x))
        return x + (self.fc2(F.gelu(self.fc1(n))) if self.mlp is None else self.mlp(n))


class Modular(nn.Module):
    """A plain model whose residual stream can be cut into sequence shards."""

    tp_plan = {
        "embed": "embedding_rowwise",
        "layers.*.attn.qkv": "packed_colwise(2,1,1)",
        "layers.*.attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.attn.num_heads": "local_size",
        "layers.*.attn.num_kv_heads": "local_size",
        "layers.*.attn.out": "rowwise",
        "layers.0.mlp.gate": "colwise",
        "layers.0.mlp.up": "colwise",
        "layers.0.mlp.down": "rowwise",
        "layers.1.fc1": "colwise",
        "layers.1.fc2": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer(written_out=False), Layer(written_out=True)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class GatedInPlace(Gated):
    """Changes what it is given before it reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5).add_(0.25))


class InPlace(Modular):
    """`Modular` with an MLP that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].mlp.__class__ = GatedInPlace


PLAIN: dict[str, type[nn.Module]] = {"plain": Plain, "modular": Modular, "in place": InPlace}


def build(name: str, layers: int = 2, positions: int = 16) -> nn.Module:
    """A model by name, in evaluation-free training mode without dropout, fp64, all parameters random.

    `layers` and `positions` are those of Hugging Face models.
    """
    torch.manual_seed(1)
    model = PLAIN[name]() if name in PLAIN else _hf(name, layers, positions)
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
        param.data = param.data.double() + 0.1 * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return model.double().train()


def _hf(name: str, layers: int, positions: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Olmo2Config, Qwen3Config

    if name.startswith("gpt2"):
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=HIDDEN, n_head=4, n_layer=layers, n_positions=positions,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    else:
        family = {"llama": LlamaConfig, "qwen3": Qwen3Config, "olmo2": Olmo2Config, "gemma2": Gemma2Config}[
            name.split("-")[0]
        ]
        config = family(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, head_dim=4, max_position_embeddings=positions, attention_bias="bias" in name,
            mlp_bias="bias" in name, tie_word_embeddings="tied" in name or "gemma" in name, pad_token_id=60,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
    attention = "eager" if "eager" in name else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def token_ids() -> Tensor:
    """[BATCH, SEQ] ids from every part of the vocabulary, the padding id among them."""
    return torch.tensor([[0, 60, 25, 26, 100], [75, 76, 99, 13, 60]])


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy in the dtype of the logits; transformers' own loss works in fp32 and must agree."""
    plain = isinstance(model, tuple(PLAIN.values()))
    out = model(ids) if plain else model(input_ids=ids, labels=ids, use_cache=False)
    logits = out if plain else out.logits
    assert logits.shape == (*ids.shape, VOCAB)
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    if not plain:
        torch.testing.assert_close(
            out.loss.double(), loss.double(), rtol=1e-2 if loss.dtype is torch.bfloat16 else 1e-5, atol=0
        )
    return loss
