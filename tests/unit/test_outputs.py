"""Outputs of micro-batches as one batch's: against the whole batch's own output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallax.strategies.kept import Kept
from parallax.strategies.logs import reduced
from parallax.strategies.outputs import merge

ROWS = torch.arange(12.0).reshape(6, 2)


def step(x: Tensor) -> dict[str, Any]:
    """Something a user's step might return for a batch."""
    return {
        "logits": x * 2,
        "pair": (x[:, 0], [x + 1, x.sum(1)]),
        "loss": x.mean(),
        "positive": (x > 3).sum(),
        "count": len(x),
        "share": float((x > 3).float().mean()),
        "finite": x.isfinite().all(),
        "words": [f"row {int(row[0])}" for row in x],
        "array": x.numpy(),
        "name": "step",
        "nothing": None,
    }


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_merged_parts_are_the_whole(parts: int) -> None:
    got = merge([step(part) for part in ROWS.chunk(parts)], torch.ones(parts), 6 // parts)
    want = step(ROWS)
    assert list(got) == list(want)
    for key in ("logits", "loss", "positive", "finite"):
        torch.testing.assert_close(got[key], want[key], rtol=1e-6, atol=0)
        assert got[key].dtype == want[key].dtype
    assert isinstance(got["pair"], tuple) and torch.equal(got["pair"][0], want["pair"][0])
    assert all(torch.equal(g, w) for g, w in zip(got["pair"][1], want["pair"][1], strict=True))
    assert np.array_equal(got["array"], want["array"])
    assert got["share"] == pytest.approx(want["share"])
    for key in ("count", "words", "name", "nothing"):
        assert got[key] == want[key]


def test_means_weigh_micro_batches_by_their_tokens() -> None:
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert float(merge(losses, torch.tensor([3.0, 1.0]), 2)) == pytest.approx((3 * 1 + 4) / 4)
    assert float(merge([torch.tensor(float("nan")), losses[1]], torch.tensor([0.0, 1.0]), 2)) == 4.0


def test_outputs_keep_no_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    assert not merge([loss], torch.ones(1), 1).requires_grad


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "different structure"),
        ([torch.ones(2, 3), torch.ones(2, 4)], r"\[\(2, 3\), \(2, 4\)\]"),
    ],
)
def test_what_cannot_be_joined_says_so(values: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"{match}.*num_microbatches=1"):
        merge(values, torch.ones(2), 2)


def test_lists_of_detections_of_any_length_are_joined() -> None:
    boxes = [torch.ones(1, 4), torch.ones(5, 4), torch.zeros(2, 4)]
    assert len(merge([boxes[:1], boxes[1:]], torch.ones(2), 3)) == 3


@pytest.mark.parametrize(
    ("how", "want"),
    [("mean", 2.5), ("avg", 2.5), (torch.mean, 2.5), ("sum", 5.0), (torch.sum, 5.0), (min, 1.0), ("MAX", 4.0)],
)
def test_logged_values_are_reduced_as_over_batches(how: Any, want: float) -> None:
    assert float(reduced(how, [1.0, torch.tensor(4)], torch.ones(2))) == want


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce_fx=.*use one of mean, sum, min, max"):
        reduced(torch.prod, [1.0], torch.ones(1))


class Holder:
    """Stands for a module: only its lists matter."""

    def __init__(self) -> None:
        self.outputs: list[Any] = [0]
        self.by_loader: dict[int, list[Any]] = {}
        self.nested: list[list[Any]] = [[], [7]]
        self.words = ["a", "b"]


def test_lists_grow_as_if_the_batch_had_run_whole() -> None:
    holder = Holder()
    kept = Kept(holder)
    for i, part in enumerate(ROWS.chunk(3)):
        kept.start()
        holder.outputs.append(part.mean())
        holder.by_loader.setdefault(1, []).append(part)
        holder.nested[1].append(part[:, 0])
        kept.stop(i, lambda entries: entries)
    kept.replay(kept.appended(torch.ones(3), 2))
    assert holder.outputs == [0, ROWS.mean()]
    assert len(holder.by_loader[1]) == 1 and torch.equal(holder.by_loader[1][0], ROWS)
    assert holder.nested[0] == [] and torch.equal(holder.nested[1][1], ROWS[:, 0])
    assert holder.words == ["a", "b"]


def test_a_stage_without_the_end_of_the_step_gets_the_same_entries() -> None:
    holder = Holder()
    kept = Kept(holder)
    for _ in range(2):
        kept.start()
        holder.outputs.append("before the model ran")  # this stage was left before `stop`
    kept.replay({("outputs",): [1.0], ("by_loader", 3): [2.0], ("nested", 0): [3.0]})
    assert holder.outputs == [0, 1.0] and holder.by_loader == {3: [2.0]} and holder.nested == [[3.0], [7]]
