"""A decoder as people write them without a library, with the plans that say how it may be cut.

It is: family "plain" of the configuration: pre-norm blocks, GELU, learned positions, its loss. It is not: part of how
a model is cut; it shows that a module of one's own needs two attributes and nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor, arange, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    """Causal attention and an MLP, each added to its input: (batch, sequence, hidden) to the same."""

    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps), nn.LayerNorm(hidden, eps)
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, intermediate), nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (f(normed).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """Tokens (batch, sequence) to logits (batch, sequence, vocabulary), and the loss of the next token.

    Args:
        vocab, hidden, intermediate, layers, heads, positions: sizes.
        eps: of the norms.
    """

    tp_plan = {
        "embed": "embedding_rowwise",
        "layers.*.q": "colwise",
        "layers.*.k": "colwise",
        "layers.*.v": "colwise",
        "layers.*.out": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_gather_output",
    }
    pp_plan = {
        "embed": (["input_ids"], ["x"]),
        "position": (["input_ids"], ["x"]),
        "layers": (["x"], ["x"]),
        "norm": (["x"], ["x"]),
        "head": (["x"], ["logits"]),
    }
    loss_type = "ForCausalLM"
    """In the words of transformers: labels are shifted here, so the first of a sample is nobody's target."""

    def __init__(
        self, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.layers = nn.ModuleList(PlainBlock(hidden, heads, intermediate, eps) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, eps)
        self.head = nn.Linear(hidden, vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids) + self.position(arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)
