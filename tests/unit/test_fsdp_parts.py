"""FSDP without processes: which modules are gathered as one, the words of a layout, what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from parallax.plugins.data.fsdp import FSDPEngine
from parallax.plugins.data.fsdp_units import find_units
from parallax.strategies.layout import Layout
from tests.parity.models import build


def names(model: nn.Module) -> list[str]:
    found = {id(m): n for n, m in model.named_modules()}
    return [found[id(unit)] for unit in find_units(model)]


@pytest.mark.parametrize(
    ("model", "want"),
    [
        ("llama", [f"model.layers.{i}" for i in range(5)]),
        ("gpt2", [f"transformer.h.{i}" for i in range(4)]),
        ("plain", [f"layers.{i}" for i in range(4)]),
        ("plain_moe", [f"layers.{i}" for i in range(4)]),  # not the experts inside
    ],
)
def test_units_are_the_blocks_of_the_model(model: str, want: list[str]) -> None:
    assert names(build(model, torch.float32)) == want


def test_units_without_a_word_from_the_model() -> None:
    def pair() -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = pair(), nn.ModuleList([nn.ModuleDict({"inner": pair()}), nn.Identity()])
            self.head = nn.Linear(2, 2)

    model: Any = Two()
    assert names(model) == ["first.0", "first.1", "second.0"]
    model.head.weight = model.first[0].weight  # tied to something outside: the root's
    assert names(model) == ["first.1", "second.0"]
    model.second[0]["inner"][0] = model.first[1]  # one module in two blocks
    assert names(model) == []
    assert names(nn.Linear(2, 2)) == []


def test_words() -> None:
    assert Layout.parse("dp4 fsdp") == Layout(data_parallel_size=4, data_engine="fsdp", zero_stage=3)
    assert Layout.parse("dp4 zero2 fsdp") == Layout(data_parallel_size=4, data_engine="fsdp", zero_stage=2)
    assert Layout.from_any(data_engine="fsdp").zero_stage == 3
    for text in ("dp4 fsdp", "tp2 dp2 zero2 fsdp"):
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        assert layout.shards_weights and layout.resolved_data_engine == "fsdp"
    assert Layout.parse("zero3").shards_weights and not Layout.parse("zero2").shards_weights
    with pytest.raises(ValueError, match=re.escape("'fsdp2'") + ".*did you mean 'fsdp'"):
        Layout.parse("dp4 fsdp2")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fsdp_does_not_have(stage: int) -> None:
    want = f"shards weights.*zero_stage {stage}.*'zero3 fsdp'.*'zero2 fsdp'.*'zero{stage}' without 'fsdp'"
    with pytest.raises(ValueError, match=want):
        FSDPEngine.check(Layout.parse(f"dp2 fsdp zero{stage}"))


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ValueError, match=f"needs torch 2.13 or later, torch {re.escape(torch.__version__)}.*'zero3'"):
        FSDPEngine.check(Layout.parse("dp2 fsdp"))
