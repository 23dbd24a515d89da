"""The decoder of `tensor.py`: as a plain module with its plans, for Parallax and DTensor.

It is: the model, its weights by name, and unfused attention as Megatron-core computes it without Transformer Engine. It
is not: a side (`tensor_worker.py`, `tensor_megatron.py`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from work import Attention, Decoder, Work, build, rotate

EPS = 1e-5


class Unfused(Attention):
    """Scores, softmax and product one by one."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        b, heads, s, _ = q.shape
        scores = torch.baddbmm(
            q.new_empty(b * heads, s, s), q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.0, alpha=self.head_dim**-0.5
        )
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -10000.0).softmax(-1)
        out = torch.bmm(weights, v.flatten(0, 1)).view(b, heads, s, -1)
        return self.o(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """The MLP of a block as a module of its own, so that its input can be gathered where it enters."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """A block of `work.Decoder` with its MLP apart."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn = block.norm1, block.norm2, block.attn
        self.mlp = Gated(block.gate, block.up, block.down)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


def decoder(work: Work, *, fused: bool) -> Decoder:
    """`work`'s decoder with the weights it has everywhere."""
    model = build(work)
    model.blocks = nn.ModuleList(Layer(block) for block in model.blocks)
    model.tp_plan = {
        **{f"blocks.*.attn.{name}": "colwise" for name in ("q", "k", "v")},
        **{f"blocks.*.mlp.{name}": "colwise" for name in ("gate", "up")},
        "blocks.*.attn.o": "rowwise",
        "blocks.*.mlp.down": "rowwise",
        "emb": "embedding_rowwise",
        "head": "colwise_gather_output",
    }
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = EPS
        if type(module) is Attention and not fused:
            module.__class__ = Unfused
    return model
