"""Micro-batches and how much each counts."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from parallax.strategies.batch import batch_size, largest_divisor, split, valid_tokens, weighted_mean
from parallax.strategies.tree import join_tensors, signature, split_tensors

Pair = namedtuple("Pair", "ids labels")


def test_split_cuts_what_is_as_long_as_the_batch() -> None:
    batch: dict[str, Any] = {
        "ids": torch.arange(12).reshape(4, 3),
        "nested": (torch.arange(4.0), [torch.ones(4, 2)]),
        "names": ["a", "b", "c", "d"],
        "positions": torch.arange(3),
        "scale": 2.0,
    }
    first, second = split(batch, 2)
    assert first["ids"].tolist() == [[0, 1, 2], [3, 4, 5]] and second["ids"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert second["nested"][0].tolist() == [2.0, 3.0] and second["nested"][1][0].shape == (2, 2)
    assert first["names"] == ["a", "b"] and second["names"] == ["c", "d"]
    assert torch.equal(second["positions"], torch.arange(3)) and second["scale"] == 2.0
    assert first["ids"].data_ptr() == batch["ids"].data_ptr(), "micro-batches are views"
    parts = split(Pair(torch.zeros(6, 2), torch.ones(6)), 3)
    assert all(isinstance(p, Pair) and p.ids.shape == (2, 2) for p in parts)


def test_split_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=4 does not divide the batch of 6 .* use one of 1, 2, 3, 6"):
        split(torch.zeros(6, 2), 4)
    with pytest.raises(ValueError, match="holds no tensor with a batch dim"):
        batch_size({"scale": torch.tensor(1.0)})


def test_valid_tokens() -> None:
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    assert valid_tokens({"labels": labels}, shifted=False) == 4
    assert valid_tokens({"labels": labels}, shifted=True) == 3  # the first column is never predicted
    assert valid_tokens({"labels": labels, "shift_labels": labels[:, :1]}, shifted=True) == 1
    assert valid_tokens({"labels": torch.tensor([1, -100])}, shifted=True) == 1
    assert valid_tokens((labels, labels), shifted=True) is None


def test_largest_divisor() -> None:
    assert [largest_divisor(size, 4) for size in (8, 6, 5, 3, 1)] == [4, 3, 1, 3, 1]


def test_trees_come_apart_and_together() -> None:
    tree = {"a": (torch.ones(2), None), "b": [torch.zeros(1), "x"]}
    tensors, skeleton = split_tensors(tree)
    assert [t.shape for t in tensors] == [(2,), (1,)]
    again = join_tensors(tensors, skeleton)
    assert again["a"][0] is tree["a"][0] and again["a"][1] is None and again["b"][1] == "x"


def test_signature_tells_shapes_and_dtypes_apart() -> None:
    base = {"x": torch.zeros(2, 3)}
    assert signature(base) == signature({"x": torch.ones(2, 3)})
    others = ({"x": torch.zeros(3, 2)}, {"x": torch.zeros(2, 3).half()}, base["x"])
    assert len({signature(t) for t in (base, *others)}) == 4


def test_a_micro_batch_without_valid_tokens_does_not_count() -> None:
    assert float(weighted_mean([1.0, torch.tensor(4.0)], torch.tensor([1.0, 3.0]))) == 3.25
    assert float(weighted_mean([2.0, float("nan")], torch.tensor([5.0, 0.0]))) == 2.0
