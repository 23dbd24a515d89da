"""Column-parallel products whose collectives run while the gradients of the weights are computed.

It is: the autograd nodes behind `SharedInput` (`entry.py`). It is not: modules.

The layers of a block that read one tensor (query, key, value; gate, up) form a group. Its first layer leads: its node
takes the group's input into the region and hands it to the others, so that autograd brings their input gradients to it,
where they are summed *before* the one collective. The leader starts that collective, computes the gradient of its own
weight meanwhile, and waits.

With sequence shards (Korthikanti et al. 2022, section 4.2.2) the nodes save only the shard. The first of them to run
backward starts gathering the whole input once more, computes its input gradient meanwhile, and the others use the same
copy. Inside a recomputed layer that would be one more all-gather for memory that lives a moment: there the whole input
is saved (`Gathering.keeps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from parallax.plugins.tensor.head_start import HeadStart, product_in_parts
from parallax.plugins.tensor.sequence_functions import Tokens, unpadded
from parallax.plugins.tensor.workspace import Workspace
from parallax.strategies.accumulation import weight_gradient
from parallax.strategies.comm import AxisComm, Work
from parallax.strategies.products import add_product, linear_product, product


class GatherAgain:
    """The whole input of the block whose backward runs, in one buffer for all blocks."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._of: Gathering | None = None
        self._rows: Tensor | None = None
        self._work: Work | None = None

    def start(self, of: Gathering, shard: Tensor) -> None:
        """Gather `shard`'s tokens, unless they are the ones gathered last."""
        if self._of is of:
            return
        self._wait()
        self._of, self._rows = of, self._space.take("again", (of.tokens.padded, shard.shape[-1]), shard)
        self._work = of.comm.all_gather_into(self._rows, shard, async_op=True)

    def whole(self) -> Tensor:
        """[*shape, h]: what `start` has gathered, once it is there."""
        self._wait()
        assert self._of is not None and self._rows is not None
        return unpadded(self._rows, self._of.tokens)

    def end(self) -> None:
        """The block is done: the same tokens would have to be gathered anew."""
        self._wait()
        self._of = self._rows = None

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


@dataclass(eq=False)
class Gathering:
    """One gathering of a block's input, as its backward needs it; holds no tensor.

    Attributes:
        tokens: how shard and whole lie to each other.
        start: what the block's layers have begun while it was gathered.
        keeps: save the whole input rather than gather it again.
    """

    tokens: Tokens
    comm: AxisComm
    space: Workspace
    again: GatherAgain
    start: HeadStart
    keeps: bool


@dataclass(eq=False)
class Layer:
    """A column layer that runs.

    Attributes:
        weight: [out, in], or [in, out] when `transposed`: the parameter itself, or its cast.
        begun: its product, if some rows of it are there already.
    """

    weight: Tensor
    bias: Tensor | None
    transposed: bool
    begun: Tensor | None = None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _usual(weight: Tensor, transposed: bool) -> Tensor:
    """As [out, in]. Made when it is used: kept, a view would hold on to what ZeRO-3 has gathered."""
    return weight.t() if transposed else weight


def _note(ctx: Any, weight: Tensor, layer: Layer) -> Tensor:
    """What the gradients of weight and bias, inputs 1 and 2 of the node, ask for; the weight as [out, in]."""
    ctx.weight, ctx.transposed, ctx.bias_grad = weight, layer.transposed, ctx.needs_input_grad[2]
    ctx.set_materialize_grads(False)
    return _usual(weight, layer.transposed)


def _sum_input_grads(grad: Tensor | None, weight: Tensor, others: Tensor | None, out: Tensor | None = None) -> Tensor:
    """grad W + others as [rows, in], written to `out` if given."""
    if others is None:
        assert grad is not None
        return product(_flat(grad), weight, out=out)
    out = _flat(others).clone() if out is None else out.copy_(_flat(others))
    return out if grad is None else add_product(out, _flat(grad), weight)


def _weight_grads(ctx: Any, grad: Tensor | None, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias, where they are asked for."""
    if grad is None:
        return None, None
    weight = None
    if x is not None:
        left, right = (x, grad) if ctx.transposed else (grad, x)
        weight = weight_gradient(ctx.weight, _flat(left).t(), _flat(right))
    return weight, _flat(grad).sum(0) if ctx.bias_grad else None


class _Lead(Function):
    """The leader of a group whose input is whole on every rank: (x W^T + b, x for the others)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, comm: AxisComm
    ) -> tuple[Tensor, Tensor]:
        ctx.comm = comm
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # an alias: x itself would make the output a view of it
        return linear_product(x, _note(ctx, weight, layer), bias), x.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        like = grad if grad is not None else others
        if like is None:
            return None, None, None, None, None
        inputs = _sum_input_grads(grad, _usual(weight, ctx.transposed), others)
        work = ctx.comm.all_reduce(inputs, async_op=True)
        grads = _weight_grads(ctx, grad, x)
        if work is not None:
            work.wait()
        return inputs.view(*like.shape[:-1], inputs.shape[-1]), *grads, None, None


def _gathered_product(
    ctx: Any, whole: Tensor, shard: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, gathering: Gathering
) -> Tensor:
    """whole W^T + b; saves what its backward needs."""
    ctx.gathering, usual = gathering, _note(ctx, weight, layer)
    ctx.save_for_backward((whole if gathering.keeps else shard) if ctx.needs_input_grad[1] else None, weight)
    return product_in_parts(whole, usual, bias, gathering.tokens.of_rank(gathering.comm.index), layer.begun)


class _LeadGathered(Function):
    """The leader of a group whose input is gathered: (whole W^T + b, whole for the others); gradient to the shard."""

    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        whole: Tensor,
        layer: Layer,
        gathering: Gathering,
    ) -> tuple[Tensor, Tensor]:
        return _gathered_product(ctx, whole, shard, weight, bias, layer, gathering), whole.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, others: Tensor | None) -> Any:
        saved, weight = ctx.saved_tensors
        gathering, tokens = ctx.gathering, ctx.gathering.tokens
        like = grad if grad is not None else others
        if like is None:
            return None, None, None, None, None, None
        again = saved is not None and grad is not None and not gathering.keeps
        if again:
            gathering.again.start(gathering, saved)
        weight = _usual(weight, ctx.transposed)
        rows = gathering.space.take("rows", (tokens.padded, weight.shape[1]), like)
        _sum_input_grads(grad, weight, others, out=rows[: tokens.count])
        rows[tokens.count :].zero_()
        if again:
            saved = gathering.again.whole()
        shard = rows.new_empty(*tokens.shard_shape, rows.shape[-1])
        work = gathering.comm.reduce_scatter_into(shard, rows, async_op=True)
        grads = _weight_grads(ctx, grad, saved)
        if work is not None:
            work.wait()
        gathering.again.end()
        return shard, *grads, None, None, None


class _FollowGathered(Function):
    """Another layer of a group whose input is gathered; its input gradient goes to the leader."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shard: Tensor,
        layer: Layer,
        gathering: Gathering,
    ) -> Tensor:
        return _gathered_product(ctx, whole, shard, weight, bias, layer, gathering)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None, None
        saved, weight = ctx.saved_tensors
        gathering = ctx.gathering
        again = saved is not None and not gathering.keeps
        if again:
            gathering.again.start(gathering, saved)
        inputs = product(_flat(grad), _usual(weight, ctx.transposed)).view(*grad.shape[:-1], -1)
        if again:
            saved = gathering.again.whole()
        return inputs, *_weight_grads(ctx, grad, saved), None, None, None


def lead(x: Tensor, layer: Layer, comm: AxisComm) -> tuple[Tensor, Tensor]:
    """x W^T + b, and x for the other layers that read it; their gradients are summed over ranks with this layer's."""
    return cast(tuple[Tensor, Tensor], _Lead.apply(x, layer.weight, layer.bias, layer, comm))


def lead_gathered(x: Tensor, shard: Tensor, layer: Layer, gathering: Gathering) -> tuple[Tensor, Tensor]:
    """As `lead` for an `x` gathered from `shard`, which its gradient is scattered to."""
    out = _LeadGathered.apply(shard, layer.weight, layer.bias, x.detach(), layer, gathering)
    return cast(tuple[Tensor, Tensor], out)


def follow_gathered(x: Tensor, shard: Tensor, layer: Layer, gathering: Gathering) -> Tensor:
    """x W^T + b of a further layer, for the `x` that `lead_gathered` has returned, or one that shares its memory."""
    out = _FollowGathered.apply(x, layer.weight, layer.bias, shard.detach(), layer, gathering)
    return cast(Tensor, out)
