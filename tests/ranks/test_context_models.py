"""Architectures of transformers whose sequences are cut give loss and gradients of one process, to 1e-9 in fp64.

A choice of what `tests/ranks/context_model_parity.py` can be asked: each is here for something in it that looks at
positions, masks or the length of a sequence in a way of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.procs import run_ranks
from tests.ranks.context_model_parity import compare

ROPE: dict[str, Any] = {"rope_theta": 1e4, "factor": 2.0}
GROWING = ROPE | {"rope_type": "dynamic"}
LONG = ROPE | {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0],
               "original_max_position_embeddings": 10}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "opt": ("opt", {}, "ring"),  # numbers the tokens that are no padding
    "bloom": ("bloom", {}, "ulysses"),  # ALiBi written out, interleaved heads
    "falcon": ("falcon", {}, "ulysses"),  # attention of its own, groups of queries interleaved with keys
    "falcon alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": True}, "ring"),
    "roberta": ("roberta", {"is_decoder": False}, "ring"),  # numbers the tokens other than that of padding
    "mpt": ("mpt", {}, "ring"),
    "llama4": ("llama4_text", {"floor_scale": 2, "attn_scale": 0.5, "no_rope_layers": [1, 0]}, "all_gather"),
    "dynamic rope": ("llama", {"rope_parameters": GROWING, "max_position_embeddings": 6}, "ring"),
    "longrope": ("llama", {"rope_parameters": LONG}, "ulysses"),  # the 11th token makes it long
    "gpt_oss": ("gpt_oss", {}, "ring"),  # sinks and windows
    "deepseek_v3": ("deepseek_v3", {}, "ulysses"),  # MLA: values narrower than keys
    "gemma3": ("gemma3_text", {}, "ring"),  # two rotary embeddings
    "bert": ("bert", {"is_decoder": False}, "ring"),  # full attention
}
"""Name -> architecture, changes to its small config, attention method."""


def all_cases(rank: int, world: int) -> dict[tuple[str, bool], str]:
    found = {}
    for name, (kind, changes, method) in CASES.items():
        for padded in (False, True):
            try:
                compare(rank, world, kind, padded, changes, method)
                found[name, padded] = ""
            except AssertionError as error:
                found[name, padded] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> Any:
    return run_ranks(2, all_cases, timeout=120)


@pytest.mark.limit(150)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", list(CASES))
def test_loss_and_gradients_are_those_of_one_process(name: str, padded: bool, found: Any) -> None:
    assert [rank[name, padded] for rank in found] == ["", ""]
