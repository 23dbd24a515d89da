"""The entry of a region: where the column layers of one block meet the tensor they read.

It is: `SharedInput`, which makes the layers that read one tensor pay for one collective, and the mark by which a
gathered tensor is known. It is not: the products themselves (`overlap.py`).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from parallax.plugins.tensor.functions import copy_to_region
from parallax.plugins.tensor.overlap import Gathering, Layer, follow_gathered, lead, lead_gathered
from parallax.strategies.accumulating import autocast_dtype, is_autocast, linear, products_are_watched
from parallax.strategies.comm import AxisComm

_MARK = "_parallax_gathered"


def _version(tensor: Tensor) -> int:
    """How often `tensor` was changed in place; without a gradient in sight (inference mode) nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def mark_gathered(whole: Tensor, shard: Tensor, gathering: Gathering) -> None:
    """Note on `whole` that it was gathered from `shard`."""
    setattr(whole, _MARK, (shard, gathering, _version(whole)))


def gathered_from(x: Tensor) -> tuple[Tensor, Gathering] | None:
    """What `x`, or the tensor that `x` is a view of all of, was gathered from; None if it was changed since."""
    whole = x if x._base is None or hasattr(x, _MARK) else x._base
    if x is not whole and (x.shape != whole.shape or x.stride() != whole.stride()):
        return None
    mark: tuple[Tensor, Gathering, int] | None = getattr(whole, _MARK, None)
    return mark[:2] if mark is not None and mark[2] == _version(whole) else None


def _as_used(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype that a product with `x` runs in."""
    if not is_autocast(x):
        return weight, bias
    dtype = autocast_dtype(x)
    return weight.to(dtype), None if bias is None else bias.to(dtype)


class LastGathered:
    """What a model's blocks have gathered last, found by its memory: hooks (DeepSpeed's ZeRO-3 has some around every
    module) hand a layer a tensor of its own that lies where the gathered one does."""

    def __init__(self) -> None:
        self._whole: weakref.ref[Tensor] | None = None

    def mark(self, whole: Tensor, shard: Tensor, gathering: Gathering) -> None:
        mark_gathered(whole, shard, gathering)
        self._whole = weakref.ref(whole)

    def behind(self, x: Tensor) -> tuple[Tensor, Gathering] | None:
        """What `x`, all of the memory gathered last, was gathered from; None if it was changed since."""
        whole = None if self._whole is None else self._whole()
        if whole is None or x.data_ptr() != whole.data_ptr() or _version(x) != _version(whole):
            return None
        return gathered_from(whole) if x.shape == whole.shape and x.stride() == whole.stride() else None


class SharedInput:
    """The input of the column layers of one block that read the same tensor.

    Query, key and value (or gate and up) receive one and the same tensor object. The first of them leads: it takes the
    tensor into the region and leaves it here; the others pick it up, so autograd adds their gradients *before* the one
    collective. What the leader left is handed out only for the same tensor object, unchanged in place since, in the
    same autocast state, and once per layer; anything else (cross-attention, a block called twice, a recomputation)
    gets a leader of its own, which is always right and costs one more collective. It is dropped when every layer has
    had it or when the input dies, whichever is first. Without gradients nothing is kept.

    Args:
        comm: the axis of the region.
        members: how many layers share this entry.
        inside: given where the block's own entry has gathered its input (see `sequence.py`). Then a tensor that is not
            the gathered one was made from it inside the region, and its gradient is partial, as it should be.
    """

    def __init__(self, comm: AxisComm, members: int, inside: LastGathered | None = None) -> None:
        self.comm = comm
        self.members = members
        self.inside = inside
        self._forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedInput:
        return SharedInput(self.comm, self.members, self.inside)  # a half-used result is not shared

    def _forget(self, dead: object = None) -> None:
        if dead is None or dead is self._input:
            self._input: weakref.ref[Tensor] | None = None
            self._output: Tensor | None = None
            self._state: tuple[int, torch.dtype] | None = None
            self._served: set[int] = set()

    def linear(
        self, x: Tensor, member: int, weight: Tensor, bias: Tensor | None, *, transposed: bool = False
    ) -> Tensor:
        """x W^T + b of layer number `member` of the block; `weight` is [out, in], or [in, out] when `transposed`."""
        if products_are_watched():
            return linear(self.enter(x, member), weight, bias, transposed=transposed)
        source = gathered_from(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return linear(x, weight, bias, transposed=transposed)
        if self.inside is not None and source is None:
            return self._made_inside(x, self.inside.behind(x), weight, bias, transposed)
        handed = self._handed(x, member)
        if handed is not None and source is None:
            out = linear(handed, weight, bias, transposed=transposed)
        else:
            begun = None if source is None else source[1].start.take(x, weight, bias, transposed)
            layer = Layer(*_as_used(x, weight, bias), transposed, begun)
            if handed is None:
                out, handed = self._lead(x.to(autocast_dtype(x)), source, layer)
                self._keep(x, handed)
            else:
                assert source is not None
                out = follow_gathered(handed, source[0].to(handed.dtype), layer, source[1])
        self._serve(member)
        return out

    def enter(self, x: Tensor, member: int) -> Tensor:
        """`x` for number `member` of the block, inside the region; for what is no product."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        handed = self._handed(x, member)
        if handed is None:
            if self.inside is not None:
                return x
            handed = copy_to_region(x.to(autocast_dtype(x)), self.comm)
            self._keep(x, handed)
        self._serve(member)
        return handed

    def _handed(self, x: Tensor, member: int) -> Tensor | None:
        """What the leader left, if it is for `x` as it is now and `member` has not had it."""
        same = self._input is not None and self._input() is x and self._state == (x._version, autocast_dtype(x))
        return self._output if same and member not in self._served else None

    def _keep(self, x: Tensor, handed: Tensor) -> None:
        self._input, self._output = weakref.ref(x, self._forget), handed
        self._state = (x._version, autocast_dtype(x))
        self._served = set()

    def _serve(self, member: int) -> None:
        self._served.add(member)
        if len(self._served) == self.members:
            self._forget()

    def _made_inside(
        self,
        x: Tensor,
        source: tuple[Tensor, Gathering] | None,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        """The product of what was made inside the region. Of the very memory that was gathered a shard is saved."""
        if source is None:
            return linear(x, weight, bias, transposed=transposed)
        layer = Layer(*_as_used(x, weight, bias), transposed)
        x = x.to(autocast_dtype(x))
        return follow_gathered(x, source[0].to(x.dtype), layer, source[1])

    def _lead(self, x: Tensor, source: tuple[Tensor, Gathering] | None, layer: Layer) -> tuple[Tensor, Tensor]:
        if source is None:
            return lead(x, layer, self.comm)
        shard, gathering = source
        return lead_gathered(x, shard.to(x.dtype), layer, gathering)
