"""`parallax verify`: right layouts pass, what cannot be verified is refused in the user's words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from parallax.__main__ import main
from parallax.cli_verify import exit_status, show_verdict
from parallax.strategies.layout import Layout
from parallax.strategies.verify import verify
from parallax.strategies.verify.layouts import all_layouts
from parallax.strategies.verify.observe import Observation
from parallax.strategies.verify.runs import sketch
from parallax.strategies.verify.shrink import shrunk_configs
from parallax.strategies.verify.target import Target
from parallax.strategies.verify.verify import require_repeatable
from tests.verify.faults import scaled_by_microbatches

SCRIPT = str(Path(__file__).with_name("targets.py"))
LAYOUTS = ["tp2 pp2", "pp2 dp2 zero3", "cp2 dp2 zero2", "pp4 mb4 zb_h1"]


@pytest.mark.limit(200)
def test_right_layouts_pass_and_say_how_close(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for layout in LAYOUTS for word in ("--layout", layout)]
    out = tmp_path / "verdicts.json"
    assert main(["verify", f"{SCRIPT}:Lit", *options, "--steps", "2", "--json", str(out), "--bytes"]) == 0
    verdicts = json.loads(out.read_text())
    assert [v["passed"] for v in verdicts] == [True] * len(LAYOUTS)
    assert all(0 < v["largest"] < 1e-9 for v in verdicts), "a run that is compared with itself would be exact"
    assert f"{len(LAYOUTS)} right, 0 wrong, 0 refused" in capsys.readouterr().out


@pytest.mark.limit(90)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_low_precision_is_compared_step_by_step(dtype: str) -> None:
    """Where gradients are rounding Adam's updates part by whole steps: right layouts pass, a fault still shows."""
    settings: dict[str, Any] = {"steps": 2, "dtype": dtype, "repeat": False, "timeout": 60}
    (right,) = verify(f"{SCRIPT}:Lit", "tp2", check_bytes=True, **settings)
    assert right.passed, (right.differences[:2], right.wrong_rows[:2])
    (wrong,) = verify(f"{SCRIPT}:Lit", "dp2 mb4", prepare=scaled_by_microbatches, **settings)
    assert wrong.differences[0].what == "gradient" and "off by m = 4" in wrong.differences[0].cause


@pytest.mark.limit(90)
def test_a_module_that_differs_from_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="not deterministic: run twice in one process, its loss at step 0"):
        verify(f"{SCRIPT}:Moody", "dp2", steps=1)
    ones = torch.ones(3)
    first, second = (Observation(losses=[1.0], grads=[{"a": ones, "b": b}], order=["b", "a"]) for b in (ones, 2 * ones))
    with pytest.raises(ValueError, match="twice in one process, the gradient of b at step 0 differs by 1.0e"):
        require_repeatable(first, second, 1e-9)


def crash_on_one_layout() -> None:
    from parallax.plugins.tensor.plugin import TensorParallel

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        raise KeyError("cut what?")

    TensorParallel.apply = apply  # type: ignore[method-assign]


@pytest.mark.limit(90)
def test_a_layout_that_crashes_or_does_not_fit_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"steps": 1, "prepare": crash_on_one_layout, "repeat": False, "timeout": 60}
    crashed, unfit, right = verify(f"{SCRIPT}:Lit", ["tp2", "tp3", "dp2"], **settings)
    assert crashed.failed is not None and crashed.failed.splitlines()[0].endswith("raised KeyError: 'cut what?'")
    assert "in apply" in crashed.failed, "the traceback follows"
    assert unfit.refused is not None and "num_attention_heads" in unfit.refused
    assert right.passed and not crashed.passed and not unfit.passed
    wrong = replace(right, no_formula=["one"])
    for verdicts, asked_for, every in (
        ([right], 0, 0),
        ([right, unfit], 2, 0),
        ([right, crashed], 2, 2),
        ([unfit], 2, 2),
        ([crashed, wrong], 1, 1),
    ):
        assert (exit_status(verdicts, every=False), exit_status(verdicts, every=True)) == (asked_for, every)
    show_verdict(Console(width=200), crashed)
    line = capsys.readouterr().out
    assert line.startswith("failed   tp2") and "cut what?" in line and "Traceback" not in line




@pytest.mark.limit(90)
def test_a_large_recipe_is_verified_small(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    target = Target(str(script), "Llama70B", synthetic=(2, 16))
    for _ in range(2):  # the class is whole afterwards
        assert sum(p.numel() for p in sketch(target, shrink=True).parameters()) < 1e6
    assert sum(p.numel() for p in sketch(target, shrink=False).parameters()) > 65e9
    (verdict,) = verify(target, "tp4", steps=1, shrink=True)
    assert verdict.passed and verdict.ranks == 4, verdict.differences[:1]


LARGE = """
import torch
from lightning.pytorch import LightningModule
from transformers import LlamaConfig, LlamaForCausalLM

class Llama70B(LightningModule):
    def configure_model(self):
        config = LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                             num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
"""


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "gptj"])
def test_a_shrunken_architecture_computes_and_keeps_its_kinds(family: str) -> None:
    """671B parameters with groups of experts and latent attention; 10 chosen of 512 experts; partial rotation."""
    whole, small = AutoConfig.for_model(family), AutoConfig.for_model(family)
    with shrunk_configs(True):
        model = AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 1e7
    ratio = lambda c: c.num_attention_heads / (getattr(c, "num_key_value_heads", None) or 1)  # noqa: E731
    assert ratio(small) == ratio(whole) or family == "gptj"
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(whole, "layer_types", None) or ())
    ids = torch.arange(2 * 16).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    ("target", "layout", "message"),
    [
        ("nowhere.py:Lit", "dp2", "there is no script 'nowhere.py'"),
        (SCRIPT, "dp2", "does not say what to verify"),
        (f"{SCRIPT}:Litt", "dp2", "did you mean 'Lit'"),
        (f"{SCRIPT}:NotAModule", "dp2", "makes a NotAModule, not a LightningModule"),
        (f"{SCRIPT}:needs_an_argument", "dp2", "cannot be called without arguments"),
        (f"{SCRIPT}:Manual", "dp2", "Manual uses manual optimization"),
        (f"{SCRIPT}:Lit", "tp3", "num_attention_heads"),
        (f"{SCRIPT}:Lit", "tp2 tpp2", "tpp2"),
    ],
)
@pytest.mark.limit(90)
def test_bad_input_is_refused(target: str, layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        verify(target, layout, steps=1)


def test_a_script_that_fails_to_import_says_why(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ValueError, match="failed to import: ModuleNotFoundError: No module named 'a_module"):
        verify(f"{script}:Lit", "dp2", steps=1)


def test_a_layout_that_does_not_fit_the_ranks_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="nearest"):
        verify(f"{SCRIPT}:Lit", "tp2 pp2", world=6)


def test_all_layouts_are_every_possible_one() -> None:
    found = [Layout.parse(text) for text in all_layouts(4, experts=False, zero=(0,))]
    sizes = {tuple(layout.axis_sizes().values()) for layout in found}
    brute = {
        (pp, dp, cp, tp)
        for pp in range(1, 5)
        for dp in range(1, 5)
        for cp in range(1, 5)
        for tp in range(1, 5)
        if 2 <= pp * dp * cp * tp <= 4
    }
    assert sizes == brute and len(found) == len(brute)
