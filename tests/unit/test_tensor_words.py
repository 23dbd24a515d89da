"""Every style word of the installed transformers has a meaning here, is the expert plugin's, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from parallax.plugins.tensor.styles import is_expert_word, parse_style

_PLAN = re.compile(r"_?tp_plan[^=\n]*=\s*\{(.*?)\}", re.DOTALL)
_ENTRY = re.compile(r'"[^"]+":\s*"([^"]+)"')


def _words_in_plans() -> set[str]:
    """Of the plans written in every configuration and model of the package."""
    folder = Path(transformers.__file__).parent / "models"
    texts = [p.read_text() for kind in ("configuration", "modeling") for p in folder.glob(f"*/{kind}_*.py")]
    return {word for text in texts for plan in _PLAN.findall(text) for word in _ENTRY.findall(plan)}


def test_the_plans_are_found() -> None:
    assert {"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise"} <= _words_in_plans()


@pytest.mark.parametrize("word", sorted(_words_in_plans() | set(ALL_PARALLEL_STYLES.valid_keys())))
def test_every_word_of_transformers_is_known(word: str) -> None:
    if word == "sequence_parallel":
        with pytest.raises(ValueError, match="'sequence_parallel' of 'x'.* set sequence_parallel in the layout"):
            parse_style(word, "x")
    elif not is_expert_word(word):
        assert parse_style(word, "x").word == word
