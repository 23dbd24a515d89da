"""The work every side of a comparison does: one decoder, one batch, one optimizer, one stopwatch.

It is: a small Llama-like decoder as a plain module with its plans, and helpers around it. It is not: any way of
splitting it over processes (`peers.py`, `ours.py`).
"""

from __future__ import annotations

import contextlib
import gc
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from saved import SavedActivations
from torch import Tensor, nn


@dataclass(frozen=True)
class Work:
    """Sizes of the model and of one step. `batch` counts samples of a step over all ranks."""

    layers: int = 4
    dim: int = 256
    heads: int = 8
    ffn: int = 688
    vocab: int = 2048
    seq: int = 128
    batch: int = 8
    microbatches: int = 4
    lr: float = 1e-3


class Attention(nn.Module):
    """Causal attention; the number of heads is read off the width, so a cut projection needs no change here."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.head_dim = work.dim // work.heads
        self.q = nn.Linear(work.dim, work.dim, bias=False)
        self.k = nn.Linear(work.dim, work.dim, bias=False)
        self.v = nn.Linear(work.dim, work.dim, bias=False)
        self.o = nn.Linear(work.dim, work.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (batch, heads, seq, head_dim)."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    """One layer: attention and a gated MLP, each behind a norm and a residual."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(work.dim), nn.RMSNorm(work.dim)
        self.attn = Attention(work)
        self.gate = nn.Linear(work.dim, work.ffn, bias=False)
        self.up = nn.Linear(work.dim, work.ffn, bias=False)
        self.down = nn.Linear(work.ffn, work.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """tokens (batch, seq) -> logits (batch, seq, vocab)."""

    tp_plan = {
        "emb": "embedding_rowwise",
        "blocks.*.attn.q": "colwise",
        "blocks.*.attn.k": "colwise",
        "blocks.*.attn.v": "colwise",
        "blocks.*.attn.o": "rowwise",
        "blocks.*.gate": "colwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }
    pp_plan = {
        "emb": (["tokens"], ["hidden"]),
        "blocks": (["hidden"], ["hidden"]),
        "norm": (["hidden"], ["hidden"]),
        "head": (["hidden"], ["logits"]),
    }

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.emb: nn.Module | None = nn.Embedding(work.vocab, work.dim)
        self.blocks = nn.ModuleList(Block(work) for _ in range(work.layers))
        self.norm = nn.RMSNorm(work.dim)
        self.head: nn.Module | None = nn.Linear(work.dim, work.vocab, bias=False)
        head_dim = work.dim // work.heads
        angle = torch.outer(torch.arange(work.seq), 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) if self.emb is not None else x
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return self.head(self.norm(h)) if self.head is not None else h


def build(work: Work) -> Decoder:
    """The decoder with weights that depend on parameter names alone: the same on every side."""
    model = Decoder(work)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def global_batch(work: Work) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, (batch, seq) each."""
    tokens = torch.randint(0, work.vocab, (work.batch, work.seq + 1), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def optimizer(model: nn.Module, work: Work) -> torch.optim.Optimizer:
    """AdamW with the same settings everywhere."""
    return torch.optim.AdamW(model.parameters(), lr=work.lr, betas=(0.9, 0.95), weight_decay=0.1)


def mean_over_ranks(losses: list[float]) -> list[float]:
    """Mean of each step's loss over the ranks that have one. Collective."""
    if not dist.is_initialized():
        return losses
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, losses)
    return [sum(step) / len(step) for step in zip(*(each for each in everyone if each), strict=True)]


def measure(step: Callable[[], float | None], warmup: int, steps: int) -> tuple[list[float], list[float]]:
    """Run `step`: (seconds of each step after warm-up, this rank's losses of all steps, if it has any)."""
    seconds, losses = [], []
    for at in range(warmup + steps):
        start = time.perf_counter()
        loss = step()
        if at >= warmup:
            seconds.append(time.perf_counter() - start)
        if loss is not None:
            losses.append(loss)
    return seconds, losses


def kept_by(step: Callable[[], Any]) -> float:
    """MiB that one more `step` keeps for its backwards."""
    saved = SavedActivations()
    with saved:
        step()
    return saved.peak / 2**20


class Cost:
    """Peak memory and processor seconds of this process, from `start` on.

    Memory is what the steps need on top of the model: activations, gradients, optimizer state, buffers. MiB.
    """

    def start(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self._before, self._cpu = _status("VmRSS"), time.process_time()

    def stop(self) -> tuple[float, float]:
        return _status("VmHWM") - self._before, time.process_time() - self._cpu


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return 0.0


def over_ranks(cost: tuple[float, float], kept: float) -> dict[str, Any]:
    """Memory of each rank, processor seconds of all, what each rank kept for backwards. Collective."""
    mine = (*cost, kept)
    everyone: list[tuple[float, float, float]] = [mine]
    if dist.is_initialized():
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    memory, cpu, kepts = (list(each) for each in zip(*everyone, strict=True))
    return {"memory": memory, "cpu": sum(cpu), "kept": kepts}
