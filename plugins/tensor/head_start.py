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


@dataclass(frozen=True, eq=False)
class Begun:
    """x W^T + b of which the rows of this rank's own tokens are there.

    Attributes:
        out: [*tokens.shape, out].
        own: those rows.
        of: the parameter W, and how often it had been changed in place.
    """

    out: Tensor
    own: slice
    of: tuple[Tensor, int]

    def finish(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """All rows, for the whole x [*tokens.shape, in] and the weight [out, in] and bias in its dtype."""
        flat, out = x.reshape(-1, x.shape[-1]), self.out.view(-1, self.out.shape[-1])
        for rows in (slice(0, self.own.start), slice(self.own.stop, len(out))):
            linear_into(flat[rows], weight, bias, out[rows])
        return self.out


class HeadStart:
    """The readers of one block's input, from call to call."""

    def __init__(self) -> None:
        self._seen: list[Reader] = []
        self._begun: dict[int, Begun] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadStart:
        return HeadStart()  # a copy has weights of its own

    def begin(self, shard: Tensor, tokens: Tokens, index: int) -> None:
        """The products of rank `index`'s tokens, [*tokens.shard_shape, in], for the readers of the last call."""
        readers, self._seen = self._seen, []
        self._begun = {}
        start, stop = (min(at * tokens.each, tokens.count) for at in (index, index + 1))
        mine = shard.reshape(-1, shard.shape[-1])[: stop - start]
        for reader in readers:
            if (parameters := reader.parameters()) is None:
                continue
            (parameter, bias), dtype = parameters, autocast_dtype(shard)
            weight = parameter.t() if reader.transposed else parameter
            if is_autocast(shard):
                weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            out = shard.new_empty(*tokens.shape, weight.shape[0])
            linear_into(mine, weight, bias, out.view(-1, weight.shape[0])[start:stop])
            self._begun[id(parameter)] = Begun(out, slice(start, stop), (parameter, parameter._version))

    def take(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> Begun | None:
        """What was begun for the layer with these parameters, which reads the input now."""
        self._seen.append(Reader(ref(weight), None if bias is None else ref(bias), transposed))
        begun = self._begun.pop(id(weight), None)
        same = begun is not None and begun.of[0] is weight and begun.of[1] == weight._version
        return begun if same else None
