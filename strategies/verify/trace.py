"""What one process sees of one micro-batch: the shapes that formulas of traffic are made from.

It is: hooks and a torch function mode around one forward of the user's step. It is not: a formula, or a part of the
runs that are compared: it looks when these are over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallax.plugins.context.plans import read_batch
from parallax.plugins.context.shards import SequenceShards
from parallax.plugins.expert.balance import FUNCTION, arguments_of, home_of, replaced
from parallax.plugins.pipeline.captured import with_captured
from parallax.strategies.theory import Attention, Call, Log, Loss, Seen, Trace
from parallax.strategies.tree import flatten, tensors_of, unflatten


def local_tokens(batch: Any, plan: Any, size: int, order: str) -> tuple[Any, int]:
    """`batch` with as many tokens as one of `size` context ranks holds, and the tokens of a whole sequence."""
    if size == 1:
        return batch, 0
    found = read_batch(batch, plan)
    length = SequenceShards.of(found.tokens, size, order).local_length
    leaves, spec = flatten(batch)
    for entry in found.entries:
        leaves[entry.at] = leaves[entry.at].narrow(entry.dim, 0, length)
    return unflatten(leaves, spec), found.tokens


def trace(
    module: LightningModule,
    batch: Any,
    ends: Collection[nn.Module],
    *,
    tokens: int,
    context: int,
    early: Collection[nn.Module] = (),
) -> Trace:
    """Run the user's step on `batch` once and note what was seen; nothing of the module is changed.

    Args:
        batch: a micro-batch, with the tokens of one rank.
        ends: layers after which a pipeline is cut.
        tokens: of a whole sequence.
        context: ranks that share a sequence.
        early: modules that ranks call earlier than one process does: what they save is no other module's last.
    """
    out, held = Trace(tokens=tokens), list[Tensor]()
    with ExitStack() as stack:
        look = stack.enter_context(_Look(out, batch, context, held, early))
        stack.enter_context(_hooked(module, out, ends, look))
        stack.enter_context(untouched(module))
        stack.enter_context(_kept(module))
        stack.enter_context(_balances(module, out, held))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(look.saved, lambda tensor: tensor))
        stack.enter_context(unlogged(module, out.logs))
        result = module.training_step(batch, 0)
    for tensor in tensors_of(result):
        if tensor.dim() == 0 and tensor.is_floating_point():
            out.numbers += 1
        else:
            out.tensors.append(tensor.numel() * tensor.element_size())
    return out


def _seen(tensor: Tensor, held: list[Tensor]) -> Seen:
    base = tensor._base
    whole = tensor if base is None or (base.shape, base.stride()) != (tensor.shape, tensor.stride()) else base
    held.append(whole)  # as long as it lives no other tensor has its number
    fractions = tensor.is_floating_point()
    return Seen(tuple(tensor.shape), tensor.element_size(), tensor.requires_grad, id(whole), fractions)


class _Look(TorchFunctionMode):
    """Notes attention, cross-entropy and shifts of labels."""

    def __init__(
        self, out: Trace, batch: Any, context: int, held: list[Tensor], early: Collection[nn.Module]
    ) -> None:
        super().__init__()
        self._out, self._context, self._early = out, context, early
        self.held, self.running = held, list[nn.Module]()
        first = next((t for t in tensors_of(batch) if t.dim() > 1), None)
        self._rows, self._tokens = (0, 0) if first is None else (first.shape[0], first.shape[1])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._attention(*args, **kwargs)
        elif func is F.cross_entropy:
            self._loss(*args, **kwargs)
        elif func is Tensor.__getitem__:
            self._index(*args)
        return func(*args, **kwargs)

    def saved(self, tensor: Tensor) -> Tensor:
        """A tensor is saved for backward."""
        inside = next((i for i, m in enumerate(self.running) if m in self._early), 0)
        self._out.last_save |= dict.fromkeys(self.running[inside:], self.running[-1]) if self.running else {}
        return tensor

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *rest: Any, **options: Any
    ) -> None:
        module = self.running[-1]
        gqa = options.get("enable_gqa") or (len(rest) > 3 and rest[3])
        groups = 1 if gqa else int(getattr(module, "num_key_value_groups", 1))
        flag = options.get("is_causal") or (len(rest) > 1 and rest[1])
        causal = bool(flag) or options.get("attn_mask", mask) is not None
        sizes = query.shape[0], query.shape[1], key.shape[1] // groups, key.shape[3], value.shape[3]
        self._out.attentions.append(Attention(module, *sizes, query.element_size(), causal))

    def _loss(self, input: Tensor, target: Tensor, *rest: Any, **options: Any) -> None:
        rows, classes = target.numel(), input.shape[-1 if input.dim() < 2 else 1]
        if self._context > 1 and rows == self._rows * (self._tokens - 1):
            rows = self._rows * self._tokens  # of a cut sequence the last token stays, and is ignored
        mean = options.get("reduction", "mean") == "mean"
        smoothed = bool(options.get("label_smoothing"))
        self._out.losses.append(Loss(rows, classes, input.element_size(), smoothed, mean))

    def _index(self, tensor: Tensor, index: Any) -> None:
        last = index[-1] if isinstance(index, tuple) and index else None
        shifts = isinstance(last, slice) and (last.start, last.stop, last.step) == (1, None, None)
        whole = tensor.dim() == 2 and tensor.shape[0] == self._rows and 0 <= tensor.shape[1] - self._tokens <= 1
        if shifts and whole and not tensor.is_floating_point():
            self._out.shifted.append(self._rows * self._tokens * tensor.element_size())


@contextmanager
def _hooked(module: nn.Module, out: Trace, ends: Collection[nn.Module], look: _Look) -> Iterator[None]:
    hooks: list[Any] = []

    def enter(m: nn.Module, *_: Any) -> None:
        look.running.append(m)

    def leave(m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        look.running.pop()
        inputs = tuple(_seen(t, look.held) for t in tensors_of((args, kwargs)))
        out.calls.setdefault(m, []).append(Call(inputs, tuple(_seen(t, look.held) for t in tensors_of(output))))
        if m in ends:
            handed = tuple(_seen(t, look.held) for t in tensors_of(with_captured(output)))
            out.handed.setdefault(m, []).append(handed)

    for child in module.modules():
        hooks.append(child.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(child.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Inside, no layer of transformers is computed again in backward: what is saved shows."""
    on = [m for m in module.modules() if vars(m).get("gradient_checkpointing")]
    for m in on:
        vars(m)["gradient_checkpointing"] = False
    try:
        yield
    finally:
        for m in on:
            vars(m)["gradient_checkpointing"] = True


@contextmanager
def _balances(module: nn.Module, out: Trace, held: list[Tensor]) -> Iterator[None]:
    """Inside, what auxiliary losses are given is noted."""
    with ExitStack() as stack:
        for home in {h for m in module.modules() if (h := home_of(m)) is not None}:
            loss = getattr(home, FUNCTION)

            def note(*args: Any, loss: Any = loss, **kwargs: Any) -> Any:
                _, logits, mask = arguments_of(loss, *args, **kwargs)
                if logits is not None:
                    seen = tuple(_seen(one, held) for one in logits)
                    out.balanced.append((seen, None if mask is None else _seen(mask, held)))
                return loss(*args, **kwargs)

            stack.enter_context(replaced(home, note))
        yield


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Random numbers, buffers and the mode are afterwards as before."""
    state = torch.random.get_rng_state()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def unlogged(module: LightningModule, logs: list[Log]) -> Iterator[None]:
    """Inside, `self.log` adds to `logs` and does nothing else. Lightning keeps numbers in at least fp32."""

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        fractions = isinstance(value, Tensor) and value.is_floating_point()
        element = value.element_size() if fractions else torch.get_default_dtype().itemsize
        logs.append(Log(max(4, element), bool(options.get("sync_dist")) and options.get("on_step") is not False))

    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]
