"""Micro-batches and how much each counts."""

from __future__ import annotations

import pickle
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch

from parallax.strategies.batch import batch_size, largest_divisor, split, valid_tokens, weighted_mean
from parallax.strategies.tree import join_tensors, named_leaves, signature, split_tensors, tensors_of

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


class Bag(dict[str, Any]):
    """A subclass of dict, as configuration libraries have them."""


@dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    labels: torch.Tensor
    name: str = "x"


def encoding(ids: torch.Tensor, labels: torch.Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"ids": ids, "labels": labels})


def output(ids: torch.Tensor, labels: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=ids, logits=labels)


CONTAINERS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    Pair, Sample, encoding, output,
    lambda ids, labels: Bag(ids=ids, labels=labels),
    lambda ids, labels: MappingProxyType({"ids": ids, "labels": labels}),
    lambda ids, labels: {"batch": UserDict(ids=ids, inner=[Sample(ids, labels)])},
]  # fmt: skip


@pytest.mark.parametrize("make", CONTAINERS)
def test_any_container_lightning_moves_is_seen_into(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    ids, labels = torch.arange(12).reshape(4, 3), torch.arange(12).reshape(4, 3) + 100
    batch = make(ids, labels)
    assert batch_size(batch) == 4
    first, second = split(batch, 2)
    assert type(first) is type(batch)
    seen = [list(tensors_of(part)) for part in (first, second)]
    for *rows, whole in zip(*seen, tensors_of(batch), strict=True):
        assert torch.equal(torch.cat(rows), whole)
    assert len(seen[0]) == len(list(tensors_of(batch))) >= 2
    assert signature(first) == signature(second) != signature(batch)
    tensors, skeleton = split_tensors(batch)
    again = join_tensors(tensors, pickle.loads(pickle.dumps(skeleton)) if make is not CONTAINERS[5] else skeleton)
    assert type(again) is type(batch)
    assert all(a is b for a, b in zip(tensors_of(again), tensors, strict=True))
    assert all(a is b for a, b in zip(tensors_of(batch), tensors, strict=True)), "the batch itself is left alone"


def test_labels_are_found_in_any_container() -> None:
    labels = torch.tensor([[5, 6, -100], [-100, 7, 8]])
    for batch in (encoding(labels, labels), Sample(labels, labels), Bag(labels=labels)):
        assert valid_tokens(batch, shifted=True) == 3


def test_leaves_have_names() -> None:
    x = torch.ones(2, 2)
    names = [name for name, _ in named_leaves({"a": encoding(x, x), "b": (Sample(x, x), 3)})]
    assert names == ["a.ids", "a.labels", "b.0.ids", "b.0.labels", "b.0.name", "b.1"]
