"""Steps that look at whole sequences in different ways, and what they give in one process of plain torch.

It is: models, batches and the user's step of each case, none of which knows that sequences are cut, and the reference.
It is not: the runs (`test_context_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity.models import VOCAB, build

ROWS = 4


def ids(tokens: int, rows: int = ROWS, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def labels_of(tokens: Tensor) -> Tensor:
    """Labels that are ignored in places, unevenly, also at the end."""
    labels = tokens.clone()
    labels[tokens % 7 == 0] = -100
    labels[0, -3:] = -100
    return labels


def padded(tokens: int, left: bool) -> dict[str, Tensor]:
    lengths = torch.tensor([tokens, tokens - 3, 3, tokens - 5]).unsqueeze(1)
    at = torch.arange(tokens).expand(ROWS, -1)
    mask = (at >= tokens - lengths if left else at < lengths).long()
    return {
        "input_ids": ids(tokens) * mask,
        "attention_mask": mask,
        "labels": labels_of(ids(tokens)).masked_fill(mask == 0, -100),
    }


def packed() -> dict[str, Tensor]:
    lengths = ([5, 7], [1, 1, 10], [12], [2, 6, 4])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {"input_ids": ids(12), "labels": labels_of(ids(12)), "position_ids": positions}


def flattened() -> dict[str, Tensor]:
    """One row of documents, with the boundaries a collator for flash attention adds; one of them is empty."""
    lengths = [5, 4, 0, 3]
    return {
        "input_ids": ids(12, 1),
        "labels": labels_of(ids(12, 1)),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0),
    }


def shifted_before() -> dict[str, Tensor]:
    """Targets the data brings shifted, which are not what the labels shift to; the last token has one too."""
    return text(13) | {"shift_labels": labels_of(ids(13, seed=6))}


def hf(name: str) -> Callable[[], nn.Module]:
    return lambda: build(name, torch.float32)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def call(model: Any, batch: Any) -> Tensor:
    return model(**batch, use_cache=False).loss


def own_labels(model: Any, batch: Any) -> Tensor:
    """Labels the step makes itself."""
    tokens = batch["input_ids"]
    return model(input_ids=tokens, labels=tokens.masked_fill(tokens % 5 == 0, -100)).loss


def items(model: Any, batch: Any) -> Tensor:
    """A sum over tokens divided by a number the step brings."""
    return model(**batch, num_items_in_batch=17).loss


class Nano(nn.Module):
    """Learned positions by number, a causal mask kept as a buffer, recomputation: as people write small GPTs."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 16), nn.Embedding(32, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, VOCAB)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32))

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :, :t, :t])
        return y.transpose(1, 2).reshape(b, t, c)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        return self.head(x + checkpoint(self.attend, x, use_reentrant=False))


class Rotary(nn.Module):
    """Rotary embeddings from a table that is a plain attribute; regression over full attention, in halves of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 16), nn.Linear(16, 3)
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)
        angles = torch.outer(torch.arange(32.0, dtype=torch.float64), 1 / 10 ** torch.arange(2.0, dtype=torch.float64))
        self.table = torch.polar(torch.ones_like(angles), angles)

    def turn(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.table[: x.shape[-2]]
        return torch.view_as_real(turned).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x)
        q = self.q(h).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, enable_gqa=True)
        return self.out(h + y.transpose(1, 2).flatten(2))


def plain(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(8)
        return kind().double()

    return make


def next_token(model: Any, batch: Any) -> Tensor:
    """Inputs and targets cut from one tensor."""
    x, y = batch[:, :-1], batch[:, 1:]
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def shifted_logits(model: Any, batch: Any) -> Tensor:
    """Logits and labels shifted against each other; a weight per class and smoothed labels."""
    x, y = batch
    logits = model(x)[..., :-1, :].contiguous()
    weight = torch.linspace(0.5, 1.5, VOCAB, dtype=logits.dtype)
    return nn.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=0.1)(
        logits.view(-1, VOCAB), y[..., 1:].contiguous().view(-1)
    )


def pairs(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.nll_loss(model(x).log_softmax(-1).transpose(1, 2), y, ignore_index=3)


def regression(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def with_auxiliary(model: Any, batch: Any) -> Tensor:
    logits = model(batch.ids)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) + 0.1 * logits.square().mean()


def divided(model: Any, batch: Any) -> Tensor:
    """Sums that the step divides in the ways there are: by a count, by one read as a number, by the batch."""
    x, y = batch[:, :-1], batch[:, 1:].clone()
    y[y % 5 == 0] = -100
    total = F.cross_entropy(model(x).transpose(1, 2), y, reduction="sum")
    count = (y != -100).sum()
    return total / count.clamp(min=1) + 0.5 * total / count.item() + 0.25 * total / batch.size(0)


def divided_by_tokens(model: Any, batch: Any) -> Tensor:
    x, y = batch
    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    return total / y.numel() + total / len(y)


def per_token(model: Any, batch: Any) -> Tensor:
    """Losses per token that the step weighs, bends, selects and averages itself."""
    x, y = batch[:, :-1], batch[:, 1:]
    loss = F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1), reduction="none").view(y.shape)
    mask = y != 3  # as people leave padding out
    weights = torch.linspace(0.5, 1.5, VOCAB, dtype=loss.dtype)[y.clamp(min=0)] * mask
    rows = (loss * mask).sum(1) / mask.sum(dim=1).clamp_min(1)
    focal = (1 - torch.exp(-loss)).square() * loss
    return (
        (loss * weights).sum() / weights.sum() + rows.mean() + (focal + 1).square().mean() + loss.mean(-1).max()
        + loss[mask].mean() - 2 * loss.mean()
    )  # fmt: skip


class Layers(nn.Module):
    """torch's own attention modules: an encoder layer under a causal mask, and one with widths of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, kdim=16, vdim=8)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        x = self.embed(tokens)
        x = x + self.layer(x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)
        y = x.transpose(0, 1)
        out, _ = self.attention(y, y * 2, y[..., :8], key_padding_mask=padding, need_weights=False)
        return self.head(x + out.transpose(0, 1))


def layered(model: Any, batch: Any) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"] == 0)
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"])


def floats(seed: int) -> Tensor:
    return torch.randn(ROWS, 16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """One step. `model` and `batch` make them; `step` is (model, batch) -> loss; `tolerance` is relative."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    step: Callable[[Any, Any], Tensor]
    tolerance: float = 1e-5


@dataclass
class Sample:
    ids: Tensor
    targets: Tensor


def encoding(batch: dict[str, Tensor]) -> Any:
    """What a tokenizer of transformers returns."""
    from transformers import BatchEncoding

    return BatchEncoding(batch)


def text(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": ids(tokens), "labels": labels_of(ids(tokens))}


CASES: dict[str, Case] = {
    "ragged": Case(hf("llama"), lambda: text(13), call),
    "window_and_cap": Case(hf("gemma2"), lambda: text(15), call),
    "right_padding": Case(hf("llama"), lambda: encoding(padded(12, False)), call),
    "left_padding_window": Case(hf("mistral"), lambda: padded(13, True), call),
    "packed": Case(hf("qwen3"), packed, call),
    "flattened": Case(hf("llama"), flattened, call),
    "own_labels": Case(hf("gpt2"), lambda: {"input_ids": ids(14)}, own_labels),
    "items": Case(hf("llama"), lambda: text(12), items),
    "both_directions": Case(bert, lambda: padded(13, False), lambda model, batch: model(**batch).loss),
    "next_token": Case(plain(Nano), lambda: ids(14), next_token, 1e-9),
    "shifted_logits": Case(plain(Nano), lambda: [ids(11), ids(11, seed=2) % 9], shifted_logits, 1e-9),
    "pairs": Case(plain(Nano), lambda: [ids(13), ids(13, seed=3)], pairs, 1e-9),
    "regression": Case(plain(Rotary), lambda: {"x": floats(5), "y": floats(6)}, regression, 1e-9),
    "auxiliary": Case(plain(Nano), lambda: Sample(ids(16), ids(16, seed=4)), with_auxiliary, 1e-9),
    "divided": Case(plain(Nano), lambda: ids(22), divided, 1e-9),
    "divided_by_tokens": Case(plain(Nano), lambda: [ids(18), ids(18, seed=3)], divided_by_tokens, 1e-9),
    "per_token": Case(plain(Nano), lambda: ids(13), per_token, 1e-9),
    "torch_layers": Case(plain(Layers), lambda: padded(13, False), layered, 1e-9),
    "shift_labels": Case(hf("gpt2"), shifted_before, call),
}


def reference(case: Case) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one process."""
    model, batch = case.model().train(), case.batch()
    if isinstance(batch, dict):
        batch.pop("cu_seq_lens_q", None)  # for flash attention only; positions say the same
    loss = case.step(model, batch)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
