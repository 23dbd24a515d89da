"""The parts of the data engines that need no second rank: buckets, clipping arithmetic, masters, saved states."""

from __future__ import annotations

import torch
from torch import nn

from parallax.plugins.data.base import Clip, local_grad_norm_sq
from parallax.plugins.data.buckets import GradBuckets, PlainGrads
from parallax.plugins.data.clipping import apply_plan, plan_step
from parallax.plugins.data.deepspeed_config import ModelSize, zero_config
from parallax.plugins.data.masters import MasterWeights
from parallax.plugins.data.state import cloned
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import LossScale

MESH = Mesh.build(Layout(data_parallel_size=1), 0, groups=False)
CPU = torch.device("cpu")


def _params(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(size, dtype=torch.float32).to(dtype)) for size in sizes]


def test_gradients_are_views_of_few_buffers() -> None:
    params = [*_params(3, 5, 100, 2), *_params(4, dtype=torch.bfloat16)]
    buckets = GradBuckets(params, MESH["data"], limit=40)
    assert [len(b) for b in buckets.buffers] == [3 + 5 + 2, 100 + 1, 2 + 1, 4 + 1]  # one count per parameter
    sum((p.float() ** 2).sum() for p in params).backward()
    for p in params:
        assert p.grad is not None and torch.equal(p.grad, 2 * p)
        assert p.grad.untyped_storage().data_ptr() in {b.untyped_storage().data_ptr() for b in buckets.buffers}
    stored = [b.data_ptr() for b in buckets.buffers]
    buckets.reduce()
    buckets.clear()
    assert [b.data_ptr() for b in buckets.buffers] == stored
    assert all(p.grad is not None and not p.grad.any() for p in params)


def test_replaced_dropped_and_unused_gradients() -> None:
    used, replaced, dropped, unused, written = params = _params(3, 3, 3, 3, 3)
    buckets = GradBuckets(params, MESH["data"])
    (used.sum() + dropped.sum()).backward()
    replaced.grad = torch.full((3,), 7.0)
    dropped.grad = None
    assert written.grad is not None
    written.grad.add_(1.0)
    buckets.reduce()
    assert used.grad is not None and torch.equal(used.grad, torch.ones(3))
    assert replaced.grad is buckets.views[replaced] and torch.equal(replaced.grad, torch.full((3,), 7.0))
    assert dropped.grad is None and unused.grad is None
    assert torch.equal(written.grad, torch.ones(3))


def test_sparse_gradients_are_taken() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    buckets = GradBuckets(table.parameters(), MESH["data"])
    table(torch.tensor([1, 1, 3])).sum().backward()
    buckets.reduce()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_a_single_data_rank_keeps_torchs_own_gradients() -> None:
    used, unused = params = _params(3, 3)
    table = nn.Embedding(4, 2, sparse=True)
    plain = PlainGrads([*params, table.weight])
    (used.sum() + table(torch.tensor([1, 1, 3])).sum()).backward()
    plain.reduce()
    assert used.grad is not None and unused.grad is None and table.weight.grad is not None
    assert [g.tolist() for g in plain.grads] == [[1, 1, 1], [[0, 0], [2, 2], [0, 0], [1, 1]]]
    plain.clear()
    assert used.grad is None and not plain.grads


def test_norm_is_taken_wide_and_of_nothing_is_zero() -> None:
    half = torch.full((64,), 2.0**14, dtype=torch.float16)  # the square is beyond fp16
    assert local_grad_norm_sq([half, torch.ones(3, dtype=torch.float64)], CPU).item() == 64 * 2.0**28 + 3
    assert local_grad_norm_sq([torch.full((4,), 1e20)], CPU).item() > 1e40  # and this one beyond fp32
    assert local_grad_norm_sq([], CPU).item() == 0.0


def test_clipping_is_that_of_torch() -> None:
    for limit in (0.5, 100.0):
        torch.manual_seed(0)
        grads = [torch.randn(7, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)]
        twins = [nn.Parameter(torch.zeros_like(g)) for g in grads]
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(twins, limit)
        plan = plan_step(grads, Clip(limit), None, mesh=MESH, device=CPU, sharded=True)
        apply_plan(grads, plan)
        torch.testing.assert_close(plan.norm, norm, rtol=1e-14, atol=0)
        for twin, grad in zip(twins, grads, strict=True):
            torch.testing.assert_close(grad, twin.grad, rtol=1e-14, atol=0)


def test_loss_scale_is_taken_out_before_clipping_by_value() -> None:
    grads = [torch.tensor([8.0, -80.0])]
    plan = plan_step(grads, Clip(2.0, "value"), LossScale(8.0), mesh=MESH, device=CPU, sharded=False)
    apply_plan(grads, plan)
    assert grads[0].tolist() == [1.0, -2.0]
    assert abs(plan.norm.item() - 101**0.5) < 1e-6 and not plan.overflow


def test_only_a_loss_scale_makes_a_step_skipped() -> None:
    grads = [torch.tensor([1.0, float("nan")])]
    assert plan_step(grads, Clip(1.0), LossScale(), mesh=MESH, device=CPU, sharded=False).overflow
    assert not plan_step(grads, Clip(1.0), None, mesh=MESH, device=CPU, sharded=False).overflow


def test_masters_replace_narrow_parameters_only_and_keep_group_dicts() -> None:
    narrow, wide = _params(3, dtype=torch.bfloat16)[0], _params(3)[0]
    optimizer = torch.optim.Adagrad(
        [{"params": [narrow], "lr": 0.5}, {"params": [wide]}], initial_accumulator_value=0.1
    )
    groups = list(optimizer.param_groups)
    masters = MasterWeights(optimizer)
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    master = optimizer.param_groups[0]["params"][0]
    assert master.dtype == torch.float32 and masters.pairs == {narrow: master}
    assert optimizer.param_groups[1]["params"][0] is wide
    assert optimizer.state[master]["sum"].dtype == torch.float32 and narrow not in optimizer.state


def test_cloned_states_do_not_share_storage_but_keep_ties() -> None:
    flat = torch.arange(10.0)
    state = cloned({"a": flat[2:4], "list": [flat[5:6], 3], "tied": (tie := flat[:1], tie), "word": "x"})
    assert state["a"].untyped_storage().nbytes() == 8 and state["a"].tolist() == [2.0, 3.0]
    assert state["tied"][0] is state["tied"][1]
    assert state["list"][1] == 3 and state["word"] == "x"


def test_deepspeed_config_leaves_nothing_to_defaults_that_change_numbers() -> None:
    for stage in (1, 2, 3):
        config = zero_config(stage, torch.float64, ModelSize(1000, 300), cuda=False)
        assert config["gradient_clipping"] == 0.0 and config["gradient_accumulation_steps"] == 1
        zero = config["zero_optimization"]
        assert zero["stage"] == stage and zero["reduce_scatter"] is False and zero["reduce_bucket_size"] == 1000
    assert zero["stage3_max_live_parameters"] < 1000  # the default would keep all of it
