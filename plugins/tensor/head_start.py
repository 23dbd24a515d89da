"""Products at a block's entry that begin before all of its input is there.

It is: which layers read a block's gathered input, as its last call has shown, and their products of this rank's own
tokens, made while the other ranks' arrive. It is not: autograd (`overlap.py`), nor anything that a result hangs on: a
layer that was not expected, or has another weight now, makes its whole product when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor

from parallax.plugins.tensor.sequence_functions import Tokens
from parallax.strategies.accumulating import autocast_dtype, is_autocast
from parallax.strategies.products import linear_into


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads the gathered input: its parameters as they are, [in, out] when `transposed`."""

    weight: ref[Tensor]
    bias: ref[Tensor] | None
    transposed: bool

    def parameters(self) -> tuple[Tensor, Tensor | None] | None:
        """Those it has now; None while a data engine holds only a share of them."""
        weight, bias = self.weight(), None if self.bias is None else self.bias()
        if weight is None or (bias is None) != (self.bias is None) or not weight.untyped_storage().size():
            return None
        return weight, bias


def product_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, own: slice, begun: Tensor | None) -> Tensor:
    """x W^T + b [..., out] for the whole x [..., in]; of `begun`, rows `own` are there.

    Made in the same parts whether or not something was begun: a product's last bits depend on the number of rows, and
    a run that goes on from a checkpoint shall compute what it would have computed.
    """
    out = x.new_empty(*x.shape[:-1], weight.shape[0]) if begun is None else begun
    flat, rows = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    for part in (own, slice(0, own.start), slice(own.stop, len(rows))):
        if begun is None or part is not own:
            linear_into(flat[part], weight, bias, rows[part])
    return out


class HeadStart:
    """The readers of one block's input, from call to call."""

    def __init__(self) -> None:
        self._seen: list[Reader] = []
        self._begun: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadStart:
        return HeadStart()  # a copy has weights of its own

    def begin(self, shard: Tensor, tokens: Tokens, index: int) -> None:
        """The products of rank `index`'s tokens, [*tokens.shard_shape, in], for the readers of the last call."""
        readers, self._seen = self._seen, []
        self._begun = {}
        own, dtype = tokens.of_rank(index), autocast_dtype(shard)
        mine = shard.reshape(-1, shard.shape[-1])[: own.stop - own.start].to(dtype)
        for reader in readers:
            if (parameters := reader.parameters()) is None:
                continue
            parameter, bias = parameters
            weight = parameter.t() if reader.transposed else parameter
            if is_autocast(shard):
                weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            out = mine.new_empty(*tokens.shape, weight.shape[0])
            linear_into(mine, weight, bias, out.view(-1, weight.shape[0])[own])
            self._begun[id(parameter)] = parameter, parameter._version, out

    def take(self, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
        """The product [*tokens.shape, out] that was begun for the layer with these parameters, which reads x now."""
        self._seen.append(Reader(ref(weight), None if bias is None else ref(bias), transposed))
        parameter, version, out = self._begun.pop(id(weight), (None, 0, None))
        if out is None or parameter is not weight or version != weight._version or out.dtype is not autocast_dtype(x):
            return None
        return out
