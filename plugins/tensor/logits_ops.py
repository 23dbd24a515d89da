"""What a head returns: logits that stay cut over the vocabulary, with everything they can do without gathering.

It is: the place that fills the table of operations, by importing them. It is not: these (`logits_elements.py`,
`logits_shapes.py`, `logits_vocabulary.py`) or the tensor itself (`logits.py`).
"""

from __future__ import annotations

from torch import Tensor

from parallax.plugins.tensor import logits_elements, logits_shapes, logits_vocabulary  # noqa: F401 - fill the table
from parallax.plugins.tensor.logits import wrap
from parallax.plugins.tensor.vocab import VocabCut
from parallax.strategies.comm import AxisComm


def head_output(piece: Tensor, comm: AxisComm, width: int) -> Tensor:
    """The [..., width] logits of a head that computed `piece` [..., rows] here."""
    return wrap(piece, VocabCut(comm, width, piece.shape[-1]))
