"""Which numbers in the user's code are the number of tokens here.

It is: the sizes of tensors as the code reads them, with those that are this rank's tokens marked (`Tokens`), and the
refusal of an unmarked number that may as well be one of the model's own. It is not: what is made of such numbers
(`indexing.py`).

A mark survives arithmetic that leaves the number what it is (`past + tokens` with `past` 0); without it the number
alone must tell, which it can where the model has none like it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.context.sequence import CutSequence


class Tokens(int):
    """The number of tokens of a sequence on this rank, read from a tensor's shape."""

    __slots__ = ()


def _keeping(name: str) -> Callable[[Tokens, Any], Any]:
    plain = getattr(int, name)

    def operation(self: Tokens, other: Any) -> Any:
        found = plain(self, other)
        return self if type(found) is int and found == self else found

    return operation


for _name in ("add", "sub", "mul", "floordiv"):
    for _side in ("", "r"):
        setattr(Tokens, f"__{_side}{_name}__", _keeping(f"__{_side}{_name}__"))


def read(sequence: CutSequence, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.shape`, or `tensor.size()`; sizes that are the tokens here are marked."""
    found = func(tensor, *args, **kwargs)
    if sequence.shards is None:
        return found
    if sequence.local not in (found if isinstance(found, tuple) else (found,)):
        return found
    dims = _at(sequence, tensor)
    if isinstance(found, int):
        dim = args[0] if args else kwargs["dim"]
        return Tokens(found) if dim % tensor.dim() in dims else found
    return torch.Size([Tokens(size) if dim in dims else size for dim, size in enumerate(found)])


def _at(sequence: CutSequence, tensor: Tensor) -> list[int]:
    """The dims of `tensor` that are the tokens here; none where two may be."""
    shape, n = list(tensor.shape), sequence.local
    if isinstance(tensor, nn.Parameter):
        return []
    first = int(len(shape) > 1 and shape[0] == sequence.rows)  # behind the sequences
    last = len(shape) - (len(shape) > 2)  # before the features
    if len(shape) == 2 and not first and shape[0] != n:
        return []
    dims = [dim for dim in range(first, last) if shape[dim] == n]
    return dims if len(dims) == 1 or len(shape) == 2 else []


def check(sequence: CutSequence, number: Any, text: str) -> None:
    """Refuse `number`, which is as large as the tokens here, where it may as well be one of the model's own.

    Raises:
        ValueError: with what of the model has this number, and how to say what is meant.
    """
    if isinstance(number, Tokens) or (found := sequence.numbers.get(int(number))) is None:
        return
    raise ValueError(
        f"{text} has as many numbers as a sequence has tokens on this context rank ({sequence.local} of "
        f"{sequence.cut.tokens}), and the model has this number too ({found}), so that positions cannot be told from "
        f"it. Where positions are meant, take the number from a tensor: torch.arange(x.size(1)), table[: x.size(1)]; "
        f"where not, make the tensor in __init__; or give sequences another length"
    )
