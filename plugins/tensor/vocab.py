"""Reductions over a vocabulary whose logits are cut over the ranks of the axis, without gathering them.

It is: where the cut falls (`VocabCut`), and cross-entropy, log-sum-exp, sum, look-up by id, arg-max and top-k over the
last dim of this rank's piece. It is not: the tensor that carries the piece (`logits.py`).

A piece is [..., rows]: the scores of ids [start, start + valid), then padding. Padding enters no reduction and gets
exactly zero gradients. Every result is whole and the same on every rank; what is sent is one number or a few per
token, never per id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.tensor.functions import gather_last_dim, reduce_from_region
from parallax.strategies.comm import AxisComm


@dataclass(frozen=True)
class VocabCut:
    """How `width` ids are cut over the ranks of `comm`: `rows` each, the last ones padded.

    Attributes:
        comm: the tensor axis.
        width: number of ids, without padding.
        rows: length of every rank's piece, padding included.
    """

    comm: AxisComm
    width: int
    rows: int

    @property
    def start(self) -> int:
        """First id of this rank."""
        return min(self.comm.index * self.rows, self.width)

    @property
    def valid(self) -> int:
        """Ids of this rank, without padding; may be 0."""
        return max(0, min(self.rows, self.width - self.comm.index * self.rows))

    @property
    def fewest(self) -> int:
        """Ids of the rank that has the fewest."""
        return max(0, min(self.rows, self.width - (self.comm.size - 1) * self.rows))

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's piece of a tensor whose `dim` is `width` long, zeros in the padding."""
        part = whole.narrow(dim, self.start, self.valid)
        if self.valid == self.rows:
            return part
        shape = list(part.shape)
        shape[dim] = self.rows - self.valid
        return torch.cat([part, part.new_zeros(shape)], dim=dim)

    def live(self, piece: Tensor) -> Tensor:
        """`piece` without its padding (a view)."""
        return piece[..., : self.valid]

    def gather(self, piece: Tensor) -> Tensor:
        """The whole [..., width] on every rank; the gradient is this rank's piece of it."""
        return gather_last_dim(piece, self.comm, self.width)

    def local(self, ids: Tensor, ignore: int | None = None) -> tuple[Tensor, Tensor]:
        """Column of each id in this rank's piece (0 for foreign ones), and whether it is this rank's.

        An id outside the vocabulary, except `ignore`, becomes -1, on which a look-up fails as it does on whole logits.
        """
        mine = (ids >= self.start) & (ids < self.start + self.valid)
        known = (ids >= 0) & (ids < self.width)
        if ignore is not None:
            known |= ids == ignore
        fallback = known.to(ids.dtype) - 1
        return torch.where(mine, ids - self.start, fallback), mine


def _peak(piece: Tensor, cut: VocabCut) -> Tensor:
    """[...]: the largest score of each token over all ranks. No gradient."""
    live = cut.live(piece.detach())
    peak = live.amax(-1) if cut.valid else piece.new_full(piece.shape[:-1], -torch.inf)
    cut.comm.all_reduce(peak, op=dist.ReduceOp.MAX)
    return peak


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, ids: Tensor, cut: VocabCut, ignore: int, smoothing: float) -> Tensor:
        width = torch.promote_types(piece.dtype, torch.float32)
        peak = _peak(piece, cut).to(width)
        columns, mine = cut.local(ids, ignore)
        shares = torch.zeros_like(piece, dtype=width) if cut.valid < cut.rows else torch.empty_like(piece, dtype=width)
        live = cut.live(shares)
        torch.sub(cut.live(piece), peak.unsqueeze(-1), out=live)
        sums = torch.empty(3 if smoothing else 2, *ids.shape, dtype=width, device=piece.device)
        sums[0] = shares.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)
        if smoothing:
            torch.sum(live, -1, out=sums[2])
        torch.sum(live.exp_(), -1, out=sums[1])
        cut.comm.all_reduce(sums)
        loss = sums[1].log() - sums[0]
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (sums[1].log() - sums[2] / cut.width)
        ctx.cut, ctx.smoothing, ctx.dtype = cut, smoothing, piece.dtype
        ctx.save_for_backward(shares, columns, mine, sums[1].clone())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        shares, columns, mine, total = ctx.saved_tensors
        if torch._C._autograd._get_current_graph_task_keep_graph():
            shares = shares.clone()  # a second backward will need them
        shares.mul_((grad / total).unsqueeze(-1))
        if ctx.smoothing:
            ctx.cut.live(shares).sub_((grad * (ctx.smoothing / ctx.cut.width)).unsqueeze(-1))
        hit = (grad * -(1 - ctx.smoothing)).masked_fill_(~mine, 0)
        shares.scatter_add_(-1, columns.unsqueeze(-1), hit.unsqueeze(-1))
        return shares.to(ctx.dtype), None, None, None, None


def cross_entropy(piece: Tensor, ids: Tensor, cut: VocabCut, *, ignore: int = -100, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of each token (Shoeybi et al. 2019, section 3), and nothing per id leaves the rank.

    Sends one maximum and two sums per token (three with label smoothing) forward, nothing backward. Keeps one piece of
    exponentials, which becomes the gradient in place.

    Args:
        piece: [..., rows].
        ids: [...] targets, the same on every rank.
        ignore: target whose loss and gradient are 0.
        smoothing: weight of the uniform distribution in the target, in [0, 1].

    Returns:
        [...], in fp32 or wider.

    Raises:
        RuntimeError: a target outside the vocabulary (on a GPU a device assertion), as on whole logits.
    """
    loss = cast(Tensor, _CrossEntropy.apply(piece, ids, cut, ignore, smoothing))
    return loss.masked_fill(ids == ignore, 0)


def logsumexp(piece: Tensor, cut: VocabCut) -> Tensor:
    """[...]: log of the summed exponentials over all ids."""
    peak = _peak(piece, cut)
    peak = torch.where(peak.isfinite(), peak, torch.zeros_like(peak))
    total = reduce_from_region((cut.live(piece) - peak.unsqueeze(-1)).exp().sum(-1), cut.comm)
    return total.log() + peak


def total(piece: Tensor, cut: VocabCut) -> Tensor:
    """[...]: the sum over all ids."""
    return reduce_from_region(cut.live(piece).sum(-1), cut.comm)


def pick(piece: Tensor, ids: Tensor, cut: VocabCut) -> Tensor:
    """The scores [..., k] of `ids` [..., k], for each token its own."""
    columns, mine = cut.local(ids)
    return reduce_from_region(piece.gather(-1, columns).masked_fill(~mine, 0), cut.comm)


def argmax(piece: Tensor, cut: VocabCut) -> Tensor:
    """[...]: the id with the largest score, the first of equals."""
    if cut.valid:
        best, at = cut.live(piece.detach()).max(-1)
    else:
        best = piece.new_full(piece.shape[:-1], -torch.inf)
        at = torch.zeros_like(best, dtype=torch.long)
    bests = cut.comm.all_gather(best.unsqueeze(0))
    ids = cut.comm.all_gather((at + cut.start).unsqueeze(0))
    return ids.gather(0, bests.argmax(0, keepdim=True)).squeeze(0)


def topk(piece: Tensor, k: int, cut: VocabCut, *, largest: bool = True) -> Tensor:
    """[..., k]: the ids with the largest (smallest) scores, in order. Every rank must hold min(k, rows) ids or more."""
    best, at = cut.live(piece.detach()).topk(min(k, cut.rows), largest=largest)
    bests, ids = cut.comm.all_gather(best, dim=-1), cut.comm.all_gather(at + cut.start, dim=-1)
    return ids.gather(-1, bests.topk(k, largest=largest).indices)


def nll(scores: Tensor, ids: Tensor, cut: VocabCut, *, ignore: int) -> Tensor:
    """[...]: minus the score of each token's id, 0 where that is `ignore`."""
    ignored = ids == ignore
    return -pick(scores, ids.masked_fill(ignored, 0).unsqueeze(-1), cut).squeeze(-1).masked_fill(ignored, 0)


def reduce_losses(losses: Tensor, ids: Tensor, ignore: int, reduction: str) -> Tensor:
    """Losses of tokens as `F.cross_entropy` reduces them: "none", "sum" or "mean" over targets not ignored."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / (ids != ignore).sum()
    raise ValueError(f"{reduction} is not a valid value for reduction")
