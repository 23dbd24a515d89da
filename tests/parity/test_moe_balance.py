"""The auxiliary loss of a mixture of experts, and a z-loss of the step's own, count once at any layout, in fp64.

transformers computes it from the router logits of one forward, so it depends on which samples are in it. The right
values are those of one process that averages the same groups of samples; with `expert_balance="global"` a group is
what all data ranks have in one micro-batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallax.strategies.verify.exact import KeepDouble
from tests.parity import harness, reference
from tests.parity.moe_models import BALANCED_MOE
from tests.parity.test_parity import assert_equal, zero_in_theory
from tests.procs import run_ranks

Parts = tuple[tuple[int, ...], ...]
HALVES: Parts = ((0, 1, 2, 3), (4, 5, 6, 7))
QUARTERS: Parts = ((0, 1), (2, 3), (4, 5), (6, 7))
WHOLE: Parts = (tuple(range(8)),)
ACROSS: Parts = ((0, 1, 4, 5), (2, 3, 6, 7))

CASES: dict[tuple[str, str], Parts] = {
    ("tp2 dp2 ep4 etp1", "microbatch"): HALVES,
    ("dp2 cp2 ep2", "microbatch"): HALVES,
    ("pp2 dp2 ep2 mb2", "microbatch"): QUARTERS,
    ("pp4 mb2", "microbatch"): HALVES,
    ("dp4 ep2 zero2", "global"): WHOLE,
    ("pp2 dp2 ep2 mb2", "global"): ACROSS,
}
RUNS = [
    (model, case)
    for model in BALANCED_MOE
    for case in CASES
    if model != "mixtral_z" or (case[1] == "microbatch" and "dp2" in case[0])  # a z-loss is each data rank's own
]


def train(rank: int, world: int) -> dict[Any, Any]:
    with KeepDouble():
        return {
            (model, case): harness.train_rank(rank, world, model, torch.float64, case[0], {"expert_balance": case[1]})
            for model, case in RUNS
        }


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(4, train, timeout=200)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("model", "case"), RUNS, ids=[f"{model}-{la.replace(' ', '_')}-{how}" for model, (la, how) in RUNS]
)
def test_equals_one_process_that_averages_the_same_samples(model: str, case: tuple[str, str], ranks: Any) -> None:
    with KeepDouble():
        want = reference.train(model, torch.float64, parts=CASES[case])
    assert_equal([rank[model, case] for rank in ranks], want, zero_in_theory(want), 1e-9)
