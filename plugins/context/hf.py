"""Models of Hugging Face transformers, unmodified.

It is: what is put around a model's forward (positions, padding and packed documents of the whole sequence) and around
its loss (labels shifted over the whole sequence). All of it can be taken back. It is not: the entries in transformers'
attention and mask interfaces (`hf_attention.py`, `hf_masks.py`), or the refusal of models (`refusals.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from parallax.plugins.context.base import Documents
from parallax.plugins.context.functional import documents_of_mask
from parallax.plugins.context.hf_alibi import KNOWN, require_one_run, with_slopes
from parallax.plugins.context.hf_attention import SEQUENCE, attention
from parallax.plugins.context.hf_masks import describe_mask
from parallax.plugins.context.hf_positions import adjustments, position_ids
from parallax.plugins.context.routing import paused
from parallax.plugins.context.sequence import CutSequence
from parallax.strategies.batch import IGNORE_INDEX

NAME = "parallax_context"
"""Our attention implementation in transformers."""


def models_of(module: nn.Module) -> list[Any]:
    """The transformers models in `module`, outermost first; empty where transformers is not installed."""
    return [m for m in module.modules() if hasattr(m, "base_model_prefix") and hasattr(m, "config")]


def bases_of(module: nn.Module) -> list[Any]:
    """The modules in which positions and masks are made: the models without their heads."""
    return list({id(base): base for model in models_of(module) if (base := model.base_model) is not None}.values())


def sequence_of(module: nn.Module) -> CutSequence | None:
    """The sequence a transformers model works on; None when it is not cut."""
    return next((s for m in module.modules() if (s := vars(m).get(SEQUENCE)) is not None), None)


def attach(module: nn.Module, sequence: CutSequence) -> Callable[[], None]:
    """Let the transformers models in `module` work on the cut sequence. Returns what takes it back."""
    undo: list[Callable[[], None]] = []
    bases = bases_of(module)
    if bases:
        _register()
    for base in bases:
        undo.append(_set_implementation(base.config))
        for child in base.modules():
            child.__dict__[SEQUENCE] = sequence
        undo.append(functools.partial(_forget, base))
        undo.append(_set(base, "forward", _following(base, sequence)))
        undo += [_set(part, "forward", forward) for part, forward in adjustments(base, sequence)]
        for child in base.modules():
            if (known := KNOWN.get(type(child).__name__)) is not None:
                undo.append(_set(child, "forward", MethodType(known, child)))
        if hasattr(base, "build_alibi_tensor"):
            undo.append(_set(base, "build_alibi_tensor", with_slopes))
    for model in models_of(module):
        if not any(model is base for base in bases) and _shifts(model):
            undo.append(_set(model, "_loss_function", _whole_loss(model.loss_function, sequence)))

    def detach() -> None:
        for step in reversed(undo):
            step()

    return detach


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, describe_mask)


def _set_implementation(config: Any) -> Callable[[], None]:
    before = config._attn_implementation
    config._attn_implementation = NAME

    def undo() -> None:
        config._attn_implementation = before

    return undo


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of this one module, past `nn.Module`."""
    missing = object()
    before = module.__dict__.get(name, missing)
    module.__dict__[name] = value

    def undo() -> None:
        if before is missing:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = before

    return undo


def _forget(base: nn.Module) -> None:
    for child in base.modules():
        child.__dict__.pop(SEQUENCE, None)


def _shifts(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def _following(base: Any, sequence: CutSequence) -> Callable[..., Any]:
    """The forward of a model without its head, with positions and documents of the whole sequence."""
    forward = base.forward
    signature = inspect.signature(forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")

    @functools.wraps(forward)
    def followed(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given |= given.pop(rest, {})
        with sequence.handling():
            _refuse_arguments(given, sequence)
            sequence.documents = _documents(given, sequence)
            if given.get("position_ids") is None and (rest or "position_ids" in signature.parameters):
                given["position_ids"] = position_ids(base, given, sequence)
            if hasattr(base, "build_alibi_tensor"):
                given["attention_mask"] = _mask_of_alibi(given, sequence)
            elif getattr(base, "use_alibi", False) and given.get("attention_mask") is not None:
                require_one_run(sequence.whole(given["attention_mask"], 1))
        if "use_cache" in signature.parameters:
            given["use_cache"] = False  # keys and values of other ranks' tokens would be missing in it
        with paused(sequence):
            return forward(**given)

    return followed


def _mask_of_alibi(given: dict[str, Any], sequence: CutSequence) -> Tensor:
    """A mask for BLOOM, which makes its slopes of one (`hf_alibi.with_slopes`)."""
    if (mask := given.get("attention_mask")) is not None:
        require_one_run(sequence.whole(mask, 1))
        return mask
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    return torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)


def _refuse_arguments(given: dict[str, Any], sequence: CutSequence) -> None:
    for name in ("cache", "past_key_values"):
        if given.get(name) is not None:
            raise ValueError(
                "the model is called with a cache of keys and values (generation), which cannot be cut over context "
                "ranks; use context_parallel_size=1"
            )
    for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids"):
        tensor = given.get(name)
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dim() < 2 or tensor.dim() > 3):
            raise ValueError(f"{name} must be [batch, tokens] on a cut sequence; use context_parallel_size=1 otherwise")
        if tensor is not None and tensor.shape[1] != sequence.local:
            raise ValueError(
                f"the model is called with {name} of shape {tuple(tensor.shape)}, but this context rank holds "
                f"{sequence.local} tokens of {sequence.cut.tokens}: pass the batch's tokens as they come, all of them"
            )


def _documents(given: dict[str, Any], sequence: CutSequence) -> Documents | None:
    """Padding or packed documents, by the rule of transformers: boundaries, else the mask, else positions that jump."""
    cut = sequence.cut
    if (boundaries := given.get("cu_seq_lens_q")) is not None:
        return Documents.from_cu_seqlens(boundaries, cut.length)
    if (mask := given.get("attention_mask")) is not None:
        return documents_of_mask(sequence, mask)
    if (positions := given.get("position_ids")) is None:
        return None
    whole = sequence.whole(positions, 1)
    if bool((whole.diff(dim=1) == 1).all()):
        return None
    valid = torch.arange(cut.length, device=whole.device) < cut.tokens
    return Documents.from_positions(cut.pad(whole, 1), valid.expand(whole.shape[0], -1))


def _whole_loss(loss: Callable[..., Any], sequence: CutSequence) -> Callable[..., Any]:
    """transformers' loss of a causal model, with labels shifted over the whole sequence."""

    @functools.wraps(loss)
    def whole_loss(logits: Tensor, labels: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if labels is not None and kwargs.get("shift_labels") is None:
            kwargs["shift_labels"] = sequence.next_token(labels, kwargs.get("ignore_index", IGNORE_INDEX))
        with _sums(sequence, whole=kwargs.get("num_items_in_batch") is not None):
            return loss(logits, labels, *args, **kwargs)

    return whole_loss


@contextmanager
def _sums(sequence: CutSequence, *, whole: bool) -> Iterator[None]:
    sequence.sums_are_whole = whole
    try:
        yield
    finally:
        sequence.sums_are_whole = False
