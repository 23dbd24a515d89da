"""`transformers` models from a config under deferred initialisation, and imports that happen meanwhile."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GPT2Config

from parallax.strategies.deferred import deferred_init
from parallax.strategies.import_hook import on_import
from parallax.strategies.materialize import materialize

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {"mixtral": {"num_local_experts": 4}, "gemma3_text": {"head_dim": 16}}


class Lit(LightningModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model_config = config

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_config(self.model_config)


def real(config: Any, **how: Any) -> nn.Module:
    module = Lit(config)
    with deferred_init() as recording:
        module.configure_model()
    assert all(t.is_meta for t in [*module.parameters(), *module.buffers()])
    recording.capture(module)
    materialize(module, recording, shard_of=lambda fqn: None, seed=1, device="cpu", **how)
    return module.model  # type: ignore[no-any-return]


def close(value: torch.Tensor, std: float) -> None:
    assert value.std().item() == pytest.approx(std, abs=5 * std / math.sqrt(2 * value.numel()))


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "bloom", "opt", "mixtral", "mamba"],
)
def test_a_model_is_initialised_as_on_a_real_device(family: str) -> None:
    """Constants and buffers equal the eager model's; everything random has its spread."""
    config = CONFIG_MAPPING[family](**SMALL, **MORE.get(family, {}))
    ours, eager = real(config), AutoModelForCausalLM.from_config(config)
    theirs = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    values = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    assert values.keys() == theirs.keys()
    for fqn, value in values.items():
        constant = fqn in dict(eager.named_buffers()) or theirs[fqn].unique().numel() == 1 or "A_log" in fqn
        assert value.dtype == theirs[fqn].dtype
        if constant:
            assert torch.equal(value, theirs[fqn]), fqn
        elif value.numel() >= 1000:  # two samples: the ratio of their deviations is 1 within 6 standard errors
            ratio = (value.std() / theirs[fqn].std()).item()
            assert ratio == pytest.approx(1, abs=6 / math.sqrt(value.numel())), fqn
    ours(input_ids=torch.arange(3, 11)[None])


def test_gpt2_scales_its_residual_projections_and_ties_its_head() -> None:
    config = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=99, n_positions=32, bos_token_id=0, eos_token_id=1)
    model: Any = real(config)
    for block in model.transformer.h:
        close(block.attn.c_proj.weight, 0.02 / math.sqrt(2 * 3))
        close(block.mlp.c_proj.weight, 0.02 / math.sqrt(2 * 3))
        close(block.mlp.c_fc.weight, 0.02)
        assert torch.equal(block.mlp.c_fc.bias, torch.zeros(256))
    assert model.lm_head.weight is model.transformer.wte.weight


def test_padding_row_is_zero_and_its_neighbours_are_not() -> None:
    model: Any = real(CONFIG_MAPPING["opt"](**SMALL))
    rows = model.get_input_embeddings().weight
    assert torch.equal(rows[0], torch.zeros(64))
    close(rows[1:], 0.02)


def test_dtype_of_the_config_is_kept() -> None:
    config = CONFIG_MAPPING["llama"](**SMALL, dtype="bfloat16")
    model: Any = real(config)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(
        model.model.rotary_emb.inv_freq, AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    )


def test_modules_imported_meanwhile_are_real_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("import torch\nTABLE = torch.ones(3) * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    with deferred_init(), on_import({"late_module": seen.append, "math": seen.append}):
        late = importlib.import_module("late_module")
    try:
        assert seen == [math, late] and late.TABLE.tolist() == [2.0, 2.0, 2.0]
        assert late.__spec__ is not None and type(late.__spec__.loader).__module__ != on_import.__module__
    finally:
        del sys.modules["late_module"]
