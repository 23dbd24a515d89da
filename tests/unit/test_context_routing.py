"""What calls of the user's code become on a cut sequence, and which of them are refused. No communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parallax
from parallax.plugins.context.refusals import check_model
from parallax.plugins.context.routing import Routed, paused
from parallax.plugins.context.sequence import CutSequence
from parallax.strategies import recompute
from parallax.strategies.comm import AxisComm, Ledger
from parallax.strategies.layout import Layout

TOKENS, ROWS = 10, 3  # padded to 12 over 2 ranks in zigzag order: rank 1 holds 3..8, rank 0 holds 0..2 and 9..11


class Attended(Exception):
    """Carries what an attention call asks for."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec


def asked(spec: Any, *tensors: Any) -> Any:
    raise Attended(spec)


@pytest.fixture
def sequence() -> Iterator[CutSequence]:
    model = nn.Module()
    model.register_buffer("table", torch.arange(40.0).view(20, 2))
    model.plain = torch.arange(20).view(1, 20)  # type: ignore[assignment]
    cut = CutSequence(model, AxisComm("cp", (0, 1), 0, None, Ledger()), "zigzag", asked)
    cut.begin(TOKENS, ROWS)
    with Routed(cut):
        yield cut


HERE = [0, 1, 2, 9, 9, 9]  # padding has the last real position


def test_positions_are_those_of_the_whole_sequence(sequence: CutSequence) -> None:
    x = torch.zeros(ROWS, 6, 4)
    assert torch.arange(x.size(1)).tolist() == HERE
    assert torch.arange(0, 6, dtype=torch.float32).tolist() == HERE
    assert torch.arange(end=6).tolist() == HERE
    assert torch.arange(5).tolist() == [0, 1, 2, 3, 4] and torch.arange(1, 7).tolist() == [1, 2, 3, 4, 5, 6]
    with paused(sequence):
        assert torch.arange(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.arange(6).tolist() == HERE


def test_rows_of_tables_are_those_of_the_positions(sequence: CutSequence) -> None:
    model: Any = sequence._model
    assert model.table[:6, 0].tolist() == [2.0 * at for at in HERE]
    assert model.table[0:6].shape == (6, 2)
    assert model.plain[:, :6].tolist() == [HERE]
    assert model.table[:5, 0].tolist() == [0, 2, 4, 6, 8]
    hidden = torch.randn(ROWS, 6, 12)
    assert torch.equal(hidden[..., :6], hidden.narrow(2, 0, 6)), "a part of the features, as many as there are tokens"
    mask = torch.ones(20, 20).tril().view(1, 1, 20, 20)
    assert torch.equal(mask[:, :, :6, :6][0, 0].bool(), torch.tensor(HERE)[:, None] >= torch.tensor(HERE))
    with pytest.raises(ValueError, match="has 8 positions, but the sequences have 10 tokens"):
        torch.zeros(8, 2)[:6]


@pytest.fixture
def alike() -> Iterator[Any]:
    """A model whose width is the number of tokens here, 6, and half of another of its sizes."""
    model: Any = nn.Module()
    model.lin, model.table, model.heads = nn.Linear(6, 12), nn.Parameter(torch.arange(20.0)), 3
    cut = CutSequence(model, AxisComm("cp", (0, 1), 0, None, Ledger()), "zigzag", asked)
    cut.begin(TOKENS, ROWS)
    with Routed(cut):
        yield model


def test_tokens_are_told_from_the_models_own_sizes_by_where_the_number_comes_from(alike: Any) -> None:
    x, ids, past = torch.zeros(ROWS, 6, 6), torch.zeros(ROWS, 6, dtype=torch.long), 0
    heads = x.unflatten(-1, (3, 2)).transpose(1, 2)
    _, tokens, width = x.shape
    for number in (tokens, x.size(1), x.size(dim=-2), ids.shape[-1], heads.shape[2], past + tokens, tokens - past):
        assert torch.arange(number).tolist() == HERE
        assert alike.table[:number].tolist() == HERE
    assert torch.arange(past, past + ids.size(1)).tolist() == HERE
    assert torch.arange(tokens - 1).tolist() == [0, 1, 2, 3, 4]
    assert isinstance(x.shape, torch.Size) and x.shape == (ROWS, 6, 6) and x.view(-1, tokens).shape == (ROWS * 6, 6)
    for number in (width, alike.lin.weight.shape[1], 6, x.flatten(0, 1).shape[1]):
        with pytest.raises(ValueError, match=r"arange\(6\) has as many .* \(6 of 10\), and .* \(lin.in_features\)"):
            torch.arange(number)
        with pytest.raises(ValueError, match=r"\[:6\] of a tensor of shape \(20,\) has as many numbers"):
            alike.table[:number]
    alike.lin = alike.table = None
    with pytest.raises(ValueError, match="half of width"):
        alike.width = 12
        cut = CutSequence(alike, AxisComm("cp", (0, 1), 0, None, Ledger()), "zigzag", asked)
        cut.begin(TOKENS, ROWS)
        with Routed(cut):
            torch.arange(12 // 2)


def test_the_first_half_of_a_shift_keeps_all_tokens(sequence: CutSequence) -> None:
    logits, ids = torch.randn(ROWS, 6, 5), torch.ones(ROWS, 6, dtype=torch.long)
    assert logits[:, :-1] is logits and logits[..., :-1, :] is logits and logits[:, : 6 - 1] is logits
    assert not sequence.shortened
    assert ids[:, :-1] is ids and sequence.shortened
    with pytest.raises(ValueError, match="its attention is not causal"):
        q = torch.randn(ROWS, 2, 6, 4)
        F.scaled_dot_product_attention(q, q, q)


QKV = torch.randn(ROWS, 2, 6, 4)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (lambda: torch.ones(6, 6, dtype=torch.bool).tril(), True),
        (lambda: torch.full((1, 1, 6, 6), float("-inf")).triu(1), True),
        (lambda: torch.arange(6)[:, None] >= torch.arange(6), True),
        (lambda: torch.ones(ROWS, 1, 6, 6, dtype=torch.bool), False),
        (lambda: None, False),
    ],
)
def test_masks_that_are_understood(mask: Callable[[], Any], causal: bool, sequence: CutSequence) -> None:
    with pytest.raises(Attended) as found:
        parallax.scaled_dot_product_attention(QKV, QKV, QKV, attn_mask=mask(), scale=0.3)
    assert (found.value.spec.causal, found.value.spec.scale, found.value.spec.documents) == (causal, 0.3, None)


def mean_of_pooled(x: Tensor) -> Tensor:
    return x[:, -1].mean()


TOKEN_TARGETS = torch.zeros(ROWS * 6, dtype=torch.long)
LOGITS = torch.randn(ROWS * 6, 5, requires_grad=True)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "filtered": (lambda: F.cross_entropy(LOGITS[:4], TOKEN_TARGETS[:4]), "padded to 12 .* 4 of the 3 x 6"),
    "probabilities": (lambda: F.cross_entropy(LOGITS, LOGITS.softmax(-1)), "targets are probabilities"),
    "by hand": (lambda: torch.randn(ROWS, 2, 6, 6).softmax(dim=-1), "looks like attention written by hand"),
    "one sequence": (lambda: nn.MultiheadAttention(4, 2)(*[QKV[0, 0]] * 3), "needs inputs with a batch dim"),
    "added keys": (lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True)(*[QKV[0]] * 3), "no added keys"),
    "last token": (lambda: mean_of_pooled(torch.randn(ROWS, 6, 4)), r"takes \[:, -1\] of a tensor"),
    "class token": (lambda: torch.randn(ROWS, 6, 4)[:, 1:], r"takes \[:, 1:\]"),
    "every second": (lambda: torch.ones(ROWS, 6)[:, ::2], r"takes \[:, ::2\]"),
    "cross": (lambda: F.scaled_dot_product_attention(QKV, QKV[:, :, :5], QKV[:, :, :5]), "attention over 5 keys"),
    "bias": (lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, torch.randn(6, 6)), "it adds numbers to the scores"),
    "band": (
        lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, torch.ones(6, 6, dtype=torch.bool).triu(-1)),
        "it is not causal",
    ),
    "per sample": (
        lambda: F.scaled_dot_product_attention(QKV, QKV, QKV, torch.eye(6).expand(ROWS, 1, 6, 6) > 0),
        "its shape is neither",
    ),
    "heads": (lambda: F.scaled_dot_product_attention(QKV, QKV[:, :1], QKV[:, :1]), "need enable_gqa=True"),
}


def summed_and_divided(divisor: Callable[[Tensor], Any]) -> Any:
    """A loss that is summed and divided by what `divisor` makes of labels, on one rank that has all tokens."""
    cut = CutSequence(nn.Module(), AxisComm("cp", (0,), 0, None, Ledger()), "zigzag", asked)
    cut.begin(TOKENS, ROWS)
    with Routed(cut):
        labels = torch.full((ROWS, TOKENS), 2)[:, 1:]
        loss = F.cross_entropy(torch.zeros(ROWS * TOKENS, 5), labels.reshape(-1), reduction="sum")
        return loss / divisor(labels)


def test_a_number_of_tokens_that_cannot_be_told_is_refused() -> None:
    targets = ROWS * (TOKENS - 1)
    assert float(summed_and_divided(lambda y: (y != 3).sum())) == pytest.approx(math.log(5))
    assert float(summed_and_divided(lambda y: (y != 3).sum().item())) == pytest.approx(math.log(5))
    assert float(summed_and_divided(lambda y: 7)) == pytest.approx(math.log(5) * targets / 7)
    with pytest.raises(ValueError, match="divided by 30, the number of tokens here"):
        summed_and_divided(lambda y: y.numel())
    with pytest.raises(ValueError, match=r"divided by 31.0, after a count .* read as a number \(30 here\)"):
        summed_and_divided(lambda y: float((y != 3).sum()) + 1)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_followed_is_refused(name: str, sequence: CutSequence) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_metrics_without_gradient_may_be_summed(sequence: CutSequence) -> None:
    with torch.no_grad():
        per_token = F.cross_entropy(LOGITS, TOKEN_TARGETS, reduction="none")
    assert per_token.shape == (ROWS * 6,)


def test_outside_a_step_the_model_is_refused() -> None:
    cut = CutSequence(nn.Module(), AxisComm("cp", (0, 1), 0, None, Ledger()), "zigzag", asked)
    with Routed(cut), pytest.raises(ValueError, match="the model was called outside a step"):
        F.scaled_dot_product_attention(QKV, QKV, QKV)


def small(kind: str, head: str, **options: Any) -> nn.Module:
    import transformers

    config: Any = getattr(transformers, kind + "Config")(vocab_size=30, **options)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind + head)(config)
    return model


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "t5": (lambda: small("T5", "ForConditionalGeneration", d_model=16, d_kv=8, num_layers=1), "two sequences"),
    "classifier": (lambda: small("Llama", "ForSequenceClassification", **TINY), "looks at single tokens"),
    "esm": (lambda: small("Esm", "ForMaskedLM", **TINY, pad_token_id=1), "makes positions by counting tokens"),
    "mamba": (lambda: small("Mamba", "ForCausalLM", hidden_size=16, num_hidden_layers=1), "mixes neighbouring tokens"),
    "lstm": (lambda: nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), r"'1' \(LSTM\) mixes neighbouring tokens"),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_that_cannot_be_followed_are_refused(name: str) -> None:
    make, message = MODELS[name]
    with pytest.raises(ValueError, match=message):
        check_model(make())


def test_recomputing_scores_that_are_not_kept_is_refused() -> None:
    layout = Layout(context_parallel_size=2, recompute="selective").resolve(2)
    with pytest.raises(ValueError, match="recompute=selective has nothing to recompute under context parallelism"):
        recompute.check(layout, nn.Linear(2, 2))


@pytest.mark.parametrize(("kind", "head"), [("Llama", "ForCausalLM"), ("Gemma2", "ForCausalLM"), ("Qwen3", "Model")])
def test_models_that_can_be_followed_pass(kind: str, head: str) -> None:
    check_model(small(kind, head, **TINY, head_dim=8, num_key_value_heads=1))
