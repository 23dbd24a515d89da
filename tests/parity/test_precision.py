"""Lower precision: a parallel run is as close to fp32 as one process in the same precision is.

The bound is stated in the precision's own terms: let e be the distance of the one-process run in that precision from
the one-process fp32 run. The parallel run, whose sums are rounded in another order, must lie within 2 e of fp32. In a
wrong run (a loss scaled twice, a gradient missing) the distance is of order one, not of order e.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallax.strategies.layout import Layout
from tests.parity import harness, reference
from tests.procs import run_ranks

LAYOUTS = ["tp2 pp2 mb2", "pp2 dp2 zero1 mb2", "tp2 dp2 zero3", "cp2 dp2 zero1 mb2"]
SCALE = 2.0**23  # too large for fp16: the first steps overflow


def data_ranks(layout: str) -> int:
    """Ranks whose gradients are averaged (dp x cp): in flight they are that many times one process's."""
    sizes = Layout.parse(layout).axis_sizes()
    return sizes["dp"] * sizes["cp"]


def all_layouts(rank: int, world: int, name: str) -> Any:
    out = {}
    for layout in LAYOUTS:
        for precision in ("bf16-mixed", "bf16-true"):
            options = {"precision": precision}
            out[layout, precision] = harness.train_rank(rank, world, name, torch.float32, layout, options)
        options, scale = {"precision": "16-mixed"}, SCALE / data_ranks(layout)
        out[layout, "16-mixed"] = harness.train_rank(rank, world, name, torch.float32, layout, options, scale)
    return out


@pytest.fixture(scope="module")
def runs() -> Any:
    return run_ranks(4, all_layouts, "llama", timeout=170)


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Relative L2 distance over all tensors together."""
    apart = sum(float((got[n].double() - t.double()).square().sum()) for n, t in want.items())
    return (apart / sum(float(t.double().square().sum()) for t in want.values())) ** 0.5


def assert_within(ranks: list[Any], own: reference.Run, exact: reference.Run) -> None:
    for field in ("first_grads", "weights"):
        like = getattr(exact, field)
        if not getattr(own, field):
            continue
        parts = [({n: t.float() for n, t in getattr(run, field).items()}, shards) for run, shards, _ in ranks]
        error, noise = distance(harness.whole(parts, like), like), distance(getattr(own, field), like)
        assert error < 2 * noise, f"{field}: {error:.2e} from fp32, one process {noise:.2e}"
    noise = max(abs(a - b) for a, b in zip(own.losses, exact.losses, strict=True))
    for run, _, _ in ranks:
        assert run.losses == pytest.approx(exact.losses, abs=2 * noise)


@pytest.mark.limit(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_mixed(layout: str, runs: Any) -> None:
    exact = reference.train("llama", torch.float32)
    own = reference.train("llama", torch.float32, autocast=torch.bfloat16)
    assert_within([r[layout, "bf16-mixed"] for r in runs], own, exact)


@pytest.mark.limit(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_true(layout: str, runs: Any) -> None:
    exact = reference.train("llama", torch.float32)
    assert_within([r[layout, "bf16-true"] for r in runs], reference.train_bf16_true("llama"), exact)


@pytest.mark.limit(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_mixed_scales_the_loss_as_gradscaler_does(layout: str, runs: Any) -> None:
    own, scale = reference.train_fp16_mixed("llama", SCALE)
    skipped = [not (norm < float("inf")) for norm in own.norms]
    assert 0 < sum(skipped) < len(skipped), "some steps must overflow and some must not for the test to mean anything"
    ranks = [r[layout, "16-mixed"] for r in runs]
    for run, _, last in ranks:
        assert [not (norm < float("inf")) for norm in run.norms] == skipped
        assert last * data_ranks(layout) == scale
        good = [i for i, s in enumerate(skipped) if not s]
        assert [run.norms[i] for i in good] == pytest.approx([own.norms[i] for i in good], rel=1e-2)
        assert run.losses == pytest.approx(own.losses, rel=2e-3)
    whole = harness.whole([(run.weights, shards) for run, shards, _ in ranks], own.weights)
    assert distance(whole, own.weights) < 2e-3
