"""Unmodified Hugging Face models cut over two and four ranks: loss and every gradient equal one process, in fp64.

A chosen part of the sweep over all architectures (`python -m tests.sweep`, whose result is docs/models.md): each brings
something of its own, named beside it. Most are cut over two ranks; those with few key-value heads over four.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.procs import RankError, run_ranks
from tests.ranks.model_parity import compare
from tests.small_models import BATCH, SEQ, SIZES

Case = tuple[str, dict[str, Any]]

TWO: list[Case] = [
    ("gemma2", {}),  # soft caps, sliding window, tied and scaled embedding
    ("gemma3_text", {}),  # norms of query and key, two rotary bases
    ("phi3", {}),  # fused query, key, value of unequal widths; fused gate and up
    ("olmo2", {}),  # norms over all heads, whose mean squares are summed
    ("diffllama", {}),  # heads in two halves, parameters by themselves that see a part
    ("opt", {}),  # learned positions, biases
    ("bloom", {}),  # ALiBi, interleaved heads
    ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 8}),
    ("falcon", {}),  # interleaved groups of heads
    ("falcon", {"new_decoder_architecture": False}),  # one key-value head, fused with the queries and shared
    ("gpt_neox", {}),  # a bias everywhere, parallel residual
    ("cohere", {}),  # scaled logits, tied
    ("gpt_oss", {}),  # attention sinks, experts
    ("apertus", {}),  # an activation with parameters
    ("deepseek_v3", {}),  # latent attention, experts
    ("longcat_flash", {}),  # experts without weights, whose output counts once
]
FOUR: list[Case] = [
    ("llama", {"num_key_value_heads": 2}),  # two ranks share each key-value head
    ("qwen3", {"num_key_value_heads": 1}),  # all four share one, which is normed
    ("qwen2", {"num_key_value_heads": 2}),  # with biases
    ("stablelm", {"num_key_value_heads": 2}),  # counted in attributes
    ("granite_swa", {}),  # sinks that the plan names by themselves
    ("phi3", {"num_key_value_heads": 2}),  # fused with the queries: gathered by those that share a head
    ("falcon", {"num_kv_heads": 2}),  # likewise, interleaved
    ("stablelm", {"num_key_value_heads": 2, "qk_layernorm": True}),  # a norm of each head
    ("olmo2", {"num_key_value_heads": 2}),  # norms over all heads, some of which ranks share
]


def _all(rank: int, world: int, cases: list[Case]) -> list[dict[str, int]]:
    """Each case with whole sequences, whose byte counts are returned, and with shards where the model allows it."""
    counts = []
    for name, changes in cases:
        try:
            counts.append(compare(rank, world, name, {"sequence_parallel": False}, changes).sent)
            compare(rank, world, name, {}, changes)
        except AssertionError as error:
            raise AssertionError(f"{name} {changes}: {error}") from error
    return counts


def _experts(rank: int, world: int) -> None:
    """Experts over two data ranks: a router with a memory, one choice per token; a text part inside another model."""
    for name in ("zaya", "qwen3_vl_moe"):
        compare(rank, world, name, {"tensor_parallel_size": 1, "expert_parallel_size": 2}, {})


def test_two_ranks_equal_one_process() -> None:
    run_ranks(2, _all, TWO, timeout=150)


def test_two_ranks_with_half_of_the_experts_each_equal_one_process() -> None:
    run_ranks(2, _experts, timeout=90)


def test_four_ranks_equal_one_process_with_key_value_heads_that_ranks_share() -> None:
    counts = run_ranks(4, _all, FOUR, timeout=150)
    hidden, each = SIZES["hidden_size"], SIZES["head_dim"]
    layers = SIZES["num_hidden_layers"]
    matrices, norms = layers * 2 * each * hidden * 8, layers * 2 * each * 8  # keys and values; of query and key
    for llama, qwen3, qwen2, stablelm, _, phi3, falcon, normed, olmo2 in counts:
        assert llama["all_reduce step"] == stablelm["all_reduce step"] == matrices
        assert qwen3["all_reduce step"] == matrices + norms
        assert qwen2["all_reduce step"] == matrices + layers * 2 * each * 8  # biases
        activation = BATCH * SEQ * hidden * 8
        assert llama["all_reduce backward"] == (2 * layers + 1) * activation
        assert normed["all_reduce step"] == matrices + layers * (8 + 2) * each * 8
        gathered = layers * BATCH * SEQ * 2 * each * 8  # key and value of a head, by the two ranks that share it
        assert olmo2["all_reduce backward"] == llama["all_reduce backward"] + layers * 2 * BATCH * SEQ * 8
        assert "all_gather forward" not in olmo2
        for fused in (phi3, falcon):
            assert fused["all_gather forward"] == fused["reduce_scatter backward"] == gathered


REFUSED: list[tuple[Case, str]] = [
    (("doge", {}), "every rank the dynamic mask of all heads"),
    (("phi3", {"num_attention_heads": 12, "num_key_value_heads": 3}), "num_key_value_heads=3 is not .*: 1$"),
]


@pytest.mark.parametrize(("case", "reason"), REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(case: Case, reason: str) -> None:
    from parallax.plugins.tensor import TensorParallel
    from parallax.strategies.layout import Layout
    from tests.small_models import build_small

    with pytest.raises(ValueError, match=reason):
        TensorParallel().check(Layout(tensor_parallel_size=2).resolve(2), build_small(case[0], **case[1]))


def test_a_mistake_is_found() -> None:
    """The comparison can fail: a plan that forgets a sum is noticed."""
    with pytest.raises(RankError, match="act_fn|gradient"):
        run_ranks(2, _forgetful)


def _forgetful(rank: int, world: int) -> None:
    from parallax.plugins.tensor import plans

    plans._follow_activations = lambda modules, targets: None
    compare(rank, world, "apertus", {"sequence_parallel": False}, {})
