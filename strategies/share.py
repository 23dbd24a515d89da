"""Brings what one rank knows to the others of its axis, at the price of one small tensor.

It is: the trip of a tree (logs, losses, outputs of the user's step) from the last pipeline stage to every rank of its
pipeline. Its form (structure, shapes, whatever is no tensor) travels once and is remembered on both sides; after that
the numbers in it travel together as one tensor, and larger tensors as they are. It is not: aware of its meaning.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallax.strategies.comm import AxisComm
from parallax.strategies.tree import join_tensors, split_tensors

NEW = -1.0
"""Sent instead of a form's number when the receivers do not know the form yet."""


@dataclass(frozen=True)
class Form:
    """A tree without its values.

    Attributes:
        skeleton: the tree with a slot for each tensor.
        tensors: shape, dtype and home ("cpu" or the device) of each tensor.
    """

    skeleton: Any
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, str], ...]

    @property
    def numbers(self) -> list[int]:
        """Tensors that travel together: those that fp64 holds exactly."""
        return [i for i, (shape, dtype, _) in enumerate(self.tensors) if not shape and dtype.is_floating_point]


class TreeShare:
    """Shares trees along an axis.

    Args:
        comm: the axis.
        device: where tensors travel.
        source: index on the axis of the rank whose trees are shared.
    """

    def __init__(self, comm: AxisComm, device: torch.device, source: int) -> None:
        self._comm, self._device, self._source = comm, device, source
        self._forms: list[Form] = []
        self._numbers_of: dict[bytes, int] = {}

    @property
    def is_source(self) -> bool:
        """Whether this rank's trees are the ones that are shared."""
        return self._comm.index == self._source

    def __call__(self, tree: Any) -> Any:
        """The source's tree, on every rank of the axis. Collective; the others' argument is not used.

        Tensors come without gradient. Numbers keep their dtype; anything that is no tensor is pickled with the form.
        """
        comm = self._comm
        if comm.size == 1:
            return tree
        tensors: list[Tensor] = []
        at = len(self._forms)
        new = False
        if self.is_source:
            tensors, skeleton = split_tensors(tree)
            tensors = [t.detach() for t in tensors]
            form = Form(skeleton, tuple((tuple(t.shape), t.dtype, t.device.type) for t in tensors))
            raw = pickle.dumps(form)
            new = raw not in self._numbers_of
            at = self._numbers_of.setdefault(raw, at)
            if new:
                self._forms.append(form)
        box = self._box(at, tensors, room=len(self._forms) - new, new=new)
        comm.broadcast(box, src=self._source)
        if (number := int(box[0])) == NEW:
            form = comm.broadcast_object(self._forms[-1] if self.is_source else None, src=self._source)
            if not self.is_source:
                self._forms.append(form)
            number = len(self._forms) - 1
            box = self._box(number, tensors, room=len(self._forms), new=False)
            comm.broadcast(box, src=self._source)
        return self._receive(self._forms[number], tensors, box)

    def _box(self, number: int, tensors: list[Tensor], *, room: int, new: bool) -> Tensor:
        """[the form's number, its numbers]; as long on every rank, whichever of the first `room` forms it is."""
        longest = max((len(form.numbers) for form in self._forms[:room]), default=0)
        box = torch.zeros(1 + longest, dtype=torch.float64, device=self._device)
        box[0] = NEW if new else number
        if tensors and not new:
            values = [tensors[i] for i in self._forms[number].numbers]
            if values:
                box[1 : 1 + len(values)] = torch.stack([v.to(self._device, torch.float64) for v in values])
        return box

    def _receive(self, form: Form, mine: list[Tensor], box: Tensor) -> Any:
        comm = self._comm
        out: list[Tensor] = []
        place = {i: at for at, i in enumerate(form.numbers)}
        for i, (shape, dtype, home) in enumerate(form.tensors):
            if i in place:
                out.append(mine[i] if self.is_source else box[1 + place[i]].to(_device(home, self._device), dtype))
                continue
            tensor = mine[i].to(self._device).contiguous() if self.is_source else None
            travelling = torch.empty(shape, dtype=dtype, device=self._device) if tensor is None else tensor
            comm.broadcast(travelling, src=self._source)
            out.append(mine[i] if self.is_source else travelling.to(_device(home, self._device)))
        return join_tensors(out, form.skeleton)


def _device(home: str, here: torch.device) -> torch.device:
    return here if home == here.type else torch.device(home)
