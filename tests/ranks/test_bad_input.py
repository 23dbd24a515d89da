"""User mistakes through a real Trainer on four ranks: one clear ValueError, the same on every rank, at once.

The mistakes are in `bad_input_cases.py`. That a mistake is printed once is shown in `tests/mpi/test_bad_input_mpi.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.procs import run_ranks
from tests.ranks.bad_input_cases import CASES, refuse

WORLD = 4
SOON = 10.0
"""Seconds; a refusal takes half a second, a rank that waits in vain for another 20."""

EXPECTED: Mapping[str, str] = {
    "world": "layout `tp3` needs a multiple of 3 ranks, there are 4; nearest: `dp4`, `tp4`, `tp2 dp2`; or run with 3 "
    "or 6 ranks",
    "world_exact": "layout `tp2 pp2 dp2` needs exactly 8 ranks, there are 4; nearest: `tp2 pp2`, `tp2 dp2`, `pp2 "
    "dp2`; or run with 8 ranks",
    "key": "unknown layout key 'tensor_paralel_size'; did you mean 'tensor_parallel_size'? Valid: tp, pp, ",
    "token": "unknown layout token 'tq2'; did you mean 'tp2'? Valid: tp<n>, pp<n>, ",
    "option": "unknown layout key 'num_microbatch'; did you mean 'num_microbatches'? Valid: ",
    "schedule": "unknown schedule '1f1c'; did you mean '1f1b'? Valid: 1f1b, dualpipe_v, gpipe, ",
    "data_engine": "unknown data engine 'depspeed'; did you mean 'deepspeed'? Valid: auto, ddp, deepspeed",
    "precision": "precision='16-true' is not supported; use one of 32-true, bf16-mixed, 16-mixed, bf16-true, 64-true",
    "heads": "num_attention_heads=6 is not divisible by tensor_parallel_size=4; valid sizes for this model: 1, 2",
    "kv_heads": "num_key_value_heads=6 is not divisible by tensor_parallel_size=4; valid sizes for this model: 1, 2",
    "hidden": "heads of model.layers.*.q=2 is not divisible by tensor_parallel_size=4; valid sizes for this model: "
    "1, 2",
    "intermediate": "model.model.layers.*.mlp.down_proj.in_features (intermediate_size)=66 are not divisible by "
    "tensor_parallel_size=4; valid sizes for this model: 1, 2",
    "layers": "pipeline_parallel_size=4 needs at least 4 layers, but 'model.layers' has 2; use pipeline_parallel_size "
    "<= 2",
    "no_plan_tp": "NoPlan has no tensor-parallel plan and is no known type; give it one: a `tp_plan` attribute on the "
    "module or ParallaxStrategy(tp_plan={...})",
    "no_plan_pp": "NoPlan has no pp_plan and is not a Hugging Face model, so the pipeline cannot tell which modules "
    "are its layers. Give it one, for example: pp_plan = {",
    "wrong_plan": "pp_plan names ['model.embedding'], which Lit does not have; did you mean 'model.embed'?",
    "different_models": "the ranks built different models",
    "used": "this Lit is the part of one rank of 'pp2 dp2 1f1b mb2' since another Trainer ran it; call fit, validate, "
    "test and predict of one Trainer, or give the second a new Lit, with the weights of a checkpoint (ckpt_path=...)",
    "used_sharded": "this Lit is the part of one rank of 'dp4 zero3' since another Trainer ran it; call fit, validate, "
    "test and predict of one Trainer, or give the second the Lit after trainer.strategy.close() of the first",
    "manual": "Manual uses manual optimization (automatic_optimization=False); Parallax runs backward and the "
    "optimizer step itself, so set automatic_optimization=True and return the loss from training_step",
    "no_optimizer": "No `configure_optimizers()` method defined",
    "two_optimizers": "TwoOptimizers.configure_optimizers returned several optimizers; Parallax trains with exactly "
    "one. Give one optimizer several parameter groups instead",
    "lbfgs": "Lbfgs.configure_optimizers returned LBFGS, which evaluates the loss several times a step; Parallax does "
    "not support that, use AdamW or SGD",
    "backward": "OwnBackward.backward is overridden, but Parallax runs backward inside the pipeline schedule; remove "
    "it",
    "head_only": "on ranks 0, 1 of 4: HeadOnly.configure_optimizers gives the optimizer no parameter of pipeline "
    "stage 0, where other layers live; let it train at least one parameter of each of the 2 stages",
    "microbatches": "num_microbatches=3 does not divide the batch of 4 on each data rank; use one of 1, 2, 4, or "
    "change the batch size",
    "microbatches_later": "num_microbatches=4 does not divide the batch of 2 on each data rank; use one of 1, 2, or "
    "change the batch size (drop_last=True keeps the last batch from being shorter)",
    "lengths": "the data loaders differ in length between ranks: 2 batches on ranks 0, 1, 3; 1 batches on rank 2. "
    "Give every data rank the same number of batches",
    "stream": "the data loader of rank 0 ended after 1 batches while others have more; give every data rank the same "
    "number of batches, or set limit_train_batches (limit_val_batches, ...) to at most 1",
    "shuffled_tp": "on ranks 2, 3 of 4: rank(s) [3] read other samples than rank 2, though they hold parts of the "
    "same model copy. Let Lightning place the sampler (use_distributed_sampler=True), or seed your own from the data "
    "rank only",
    "shuffled_pp": "on ranks 1, 3 of 4: rank(s) [3] read other samples than rank 1, though they hold parts of the "
    "same ",
    "shuffled_validation": "on ranks 0, 2 of 4: rank(s) [2] read other samples than rank 0, though they hold parts of ",
    "no_loss": "training_step must return the loss, or a dict with 'loss', on every batch; it returned NoneType",
    "no_loss_1f1b": "training_step must return the loss, or a dict with 'loss', on every batch; it returned NoneType",
    "no_loss_gpipe": "training_step must return the loss, or a dict with 'loss', on every batch; it returned NoneType",
    "norm_late": "'model.norm' is registered before the layers, so it was put on the first pipeline stage, but the "
    "model uses it after them. Name it after the layers in pp_plan, for example pp_plan = {..., 'layers': ..., "
    "'model.norm': ",
    "norm_early": "'model.norm' lives on a later pipeline stage but was called before this stage's last layer. If it "
    "runs before the layers, name it before them in pp_plan, for example pp_plan = {'model.norm': ..., 'layers': ...}",
    "twice": "use pipeline_parallel_size=1; if the step calls the model twice, call it once, on both inputs joined",
    "penalty": "the step goes through the parameters of Plain, of which this pipeline stage holds a "
    "part: a penalty or a norm would be that of the part. Use the optimizer's weight_decay for a penalty, ",
    "no_validation": "the step returned on stage 0 without running all of the stage's layers; training_step, "
    "validation_step and the like must call the whole model on every batch",
}
"""Case -> what the message must contain."""

ALONE = ("one_data_rank", "crash", "later")
"""Cases in which ranks lose each other: nothing can run in the same processes afterwards."""

FINE = ("vocabulary", "frozen", "equal_streams", "used_and_closed")
"""A vocabulary no size divides, a frozen first stage, loaders of unknown, equal length, a module given back whole."""


@cache
def _results() -> list[dict[str, tuple[str, str, float]]]:
    """By rank; every case in the same four processes."""
    return run_ranks(WORLD, refuse, [name for name in CASES if name not in ALONE], timeout=100)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_refuses_with_the_same_words(name: str) -> None:
    kinds, texts, seconds = zip(*(rank[name] for rank in _results()), strict=True)
    assert EXPECTED[name] in texts[0]
    assert set(texts) == {texts[0]}
    assert set(kinds) == {"MisconfigurationException" if name == "no_optimizer" else "ValueError"}
    assert max(seconds) < SOON


def test_what_is_no_mistake_trains() -> None:
    """Among so many refusals."""
    for name in FINE:
        assert {rank[name][:2] for rank in _results()} == {("nothing", "")}, name


def test_every_case_is_expected() -> None:
    assert set(CASES) == {*EXPECTED, *ALONE, *FINE}


def test_a_mistake_of_one_data_rank_ends_all() -> None:
    """Ranks 1 and 3 cannot split their first batch, while the others wait for them in a collective."""
    results = [rank["one_data_rank"] for rank in run_ranks(WORLD, refuse, ["one_data_rank"], timeout=60)]
    assert [kind for kind, _, _ in results] == ["CommError", "ValueError", "CommError", "ValueError"]
    assert all("num_microbatches=4 does not divide the batch of 6 on each data rank" in results[i][1] for i in (1, 3))
    assert max(seconds for _, _, seconds in results) < SOON


def test_a_crash_on_one_stage_keeps_its_error_and_the_others_name_it() -> None:
    first, last = (rank["crash"] for rank in run_ranks(2, refuse, ["crash"], timeout=60))
    assert last[:2] == ("KeyError", "'no such key'")
    assert first[0] == "CommError"
    assert "pipeline stage 1 (rank 1) failed: KeyError: 'no such key' (bad_input_cases.py, line " in first[1]
    assert max(first[2], last[2]) < SOON


def test_a_mistake_of_one_stage_in_a_later_step_ends_all() -> None:
    first, last = (rank["later"] for rank in run_ranks(2, refuse, ["later"], timeout=60))
    assert last[0] == "ValueError" and "training_step must return the loss" in last[1]
    assert first[0] == "CommError"
    assert max(first[2], last[2]) < SOON
