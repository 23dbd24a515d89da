"""Sequence parallelism on real ranks: the loss and every gradient of one process, and the textbook's messages.

Ten tokens over two ranks are odd shards; over four ranks they are padded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from parallax.strategies.comm import wire_bytes
from tests.procs import RankError, run_ranks
from tests.ranks.test_tensor import _cut, _step, _whole_grads
from tests.ranks.test_tensor import _textbook as textbook_of_tensor
from tests.tensor_models import BATCH, HIDDEN, SEQ, VOCAB, build, loss_of, token_ids

FP64, LAYERS = 8, 2
Counts = dict[tuple[str, str], tuple[int, int]]


def _compare(model: nn.Module, reference: nn.Module, plugin: Any, mesh: Any, fp32: str = "") -> None:
    """Every gradient, to 1e-10; those of modules whose name has `fp32` in it are computed in fp32 by the model."""
    grads, wanted = _whole_grads(model, plugin, mesh), dict(reference.named_parameters())
    assert grads.keys() == wanted.keys()
    for fqn, grad in grads.items():
        tolerance = 1e-6 if fp32 and fp32 in fqn else 1e-10
        torch.testing.assert_close(
            grad, wanted[fqn].grad, rtol=tolerance, atol=tolerance, msg=lambda m, f=fqn: f"{f}: {m}"
        )


def _counts(mesh: Any) -> Counts:
    return {(kind, phase): (t.calls, t.bytes) for (_, kind, phase), t in mesh.ledger.counts.items() if t.bytes}


def _parity(rank: int, world: int, names: list[str]) -> dict[str, Counts]:
    counts = {}
    for name in names:
        reference, model, ids = build(name), build(name), token_ids()
        expected = loss_of(reference, ids)
        expected.backward()
        plugin, mesh = _cut(model, rank, world, sequence=True)
        loss = _step(model, plugin, mesh, ids)
        counts[name] = _counts(mesh)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
        _compare(model, reference, plugin, mesh, fp32="norm" if "gemma" in name else "")
        model.eval()
        with torch.no_grad():  # another length, without gradients
            torch.testing.assert_close(loss_of(model, ids[:1, :3]), loss_of(reference, ids[:1, :3]))
    return counts


def _textbook(world: int, step: int, *, recomputed: bool = False, positions: bool = False) -> Counts:
    """Per layer, attention and MLP each gather and scatter in both directions, and gather their input once more.

    Further, the embedding's scatter (an all-reduce where learned `positions` are added to it), the loss's messages (see
    test_tensor), the exit's gather, in backward the entry's, and the head's gather and scatter. `step`: elements of
    norms and row biases, in one message. A recomputed layer gathers
    twice and scatters once, the scatter after its MLP not being needed, and gathers nothing once more.
    """
    padded = -(-BATCH * SEQ // world) * world * HIDDEN * FP64
    losses = 3 * (BATCH * SEQ * 4 + BATCH * (SEQ - 1) * FP64)
    blocks = 2 * LAYERS
    counts = {
        ("all_reduce", "forward"): (2 * 2, losses),
        ("all_gather", "forward"): (blocks + 1, (blocks + 1) * padded),
        ("reduce_scatter", "forward"): (blocks + 1, (blocks + 1) * padded),
        ("all_gather", "backward"): (2 * blocks + 2, (2 * blocks + 2) * padded),
        ("reduce_scatter", "backward"): (blocks + 1, (blocks + 1) * padded),
        ("all_reduce", "step"): (1, step * FP64),
    }
    if positions:
        counts["all_reduce", "forward"] = (1 + 2 * 2, BATCH * SEQ * HIDDEN * FP64 + losses)
        counts["reduce_scatter", "forward"] = (blocks, blocks * padded)
    if recomputed:
        counts["reduce_scatter", "backward"] = (blocks + 1 + LAYERS, (blocks + 1 + LAYERS) * padded)
    return counts


def test_two_ranks_equal_one_process_and_send_what_the_textbook_says() -> None:
    names = ["llama-bias", "gpt2", "qwen3", "modular", "in place", "gemma2-eager"]
    norms = (2 * LAYERS + 1) * HIDDEN
    for counts in run_ranks(2, _parity, names):
        assert counts["llama-bias"] == _textbook(2, norms + 2 * LAYERS * HIDDEN)
        assert counts["gpt2"] == _textbook(2, 2 * norms + 2 * LAYERS * HIDDEN, positions=True)
        scaled = counts["gemma2-eager"]["all_reduce", "forward"]
        assert scaled == _textbook(2, norms)["all_reduce", "forward"], "a scaled embedding waits for its sum, too"
        assert counts["qwen3"] == _textbook(2, norms + LAYERS * 2 * 4)  # and the norms of its heads
        one = BATCH * SEQ * HIDDEN * FP64
        shards = wire_bytes("all_gather", one, 2) + wire_bytes("reduce_scatter", one, 2)
        assert shards == wire_bytes("all_reduce", one, 2), "a block on shards sends what one on whole sequences sends"


def test_four_ranks_pad_ten_tokens_to_twelve() -> None:
    norms = (2 * LAYERS + 1) * HIDDEN
    for counts in run_ranks(4, _parity, ["llama-tied", "gpt2", "modular"]):
        assert counts["llama-tied"] == _textbook(4, norms)
        assert counts["gpt2"] == _textbook(4, 2 * norms + 2 * LAYERS * HIDDEN, positions=True)


def _chunked(rank: int, world: int) -> dict[bool, Counts]:
    counts = {}
    for sequence in (True, False):
        reference, model, ids = build("llama-bias"), build("llama-bias"), token_ids()
        loss_of(reference, ids).backward()
        plugin, mesh = _cut(model, rank, world, sequence=sequence, chunks=2)
        _step(model, plugin, mesh, ids)
        counts[sequence] = _counts(mesh)
        _compare(model, reference, plugin, mesh)
    return counts


def _hidden_states(rank: int, world: int) -> None:
    for name in ("llama", "gpt2"):
        reference, model, ids = build(name), build(name), token_ids()[:1]
        plugin, mesh = _cut(model, rank, world, sequence=True)
        losses = []
        for each in (reference, model):
            out = each(input_ids=ids, output_hidden_states=True)
            losses.append(F.cross_entropy(out.logits[0, :-1], ids[0, 1:]))
            for i, state in enumerate(out.hidden_states):
                losses[-1] = losses[-1] + (i + 1) * (state**2).mean()
            losses[-1].backward()
        plugin.finalize_grads(model, mesh=mesh)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        found = _whole_grads(model, plugin, mesh)
        for fqn, param in reference.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(found[fqn], param.grad, rtol=1e-10, atol=1e-10)


def test_hidden_states_of_every_layer_leave_the_model_whole() -> None:
    """A loss of all of them, of padded shards: its value and every gradient."""
    run_ranks(2, _hidden_states)


def test_products_in_pieces_send_the_same_bytes_in_more_messages() -> None:
    """Three tokens of each rank, in runs of two and one: a row layer's collectives are two, of the same bytes."""
    shards = _textbook(4, (2 * LAYERS + 1) * HIDDEN + 2 * LAYERS * HIDDEN)
    whole = {(kind, phase): count for (_, kind, phase), count in textbook_of_tensor(4).items()}
    for want, key in (
        (shards, ("reduce_scatter", "forward")),
        (shards, ("all_gather", "backward")),
        (whole, ("all_reduce", "forward")),
    ):
        calls, sent = want[key]
        want[key] = calls + 2 * LAYERS, sent
    for counts in run_ranks(4, _chunked):
        assert counts == {True: shards, False: whole}


# Recomputation


def _recompute(rank: int, world: int, how: str) -> Counts:
    reference, model, ids = build("llama"), build("llama"), token_ids()
    (loss_of(reference, ids) + loss_of(reference, ids[:1, :4])).backward()
    plugin, mesh = _cut(model, rank, world, sequence=True)
    if how == "transformers":
        model.gradient_checkpointing_enable()
    elif how == "user":
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    counts = {}
    if how == "transformers":
        _step(model, plugin, mesh, ids)
        counts = _counts(mesh)
        model.zero_grad()
    # two lengths under way at once: the layers of the first are recomputed after the second has run
    (loss_of(model, ids) + loss_of(model, ids[:1, :4])).backward()
    plugin.finalize_grads(model, mesh=mesh)
    _compare(model, reference, plugin, mesh)
    return counts


def _recompute_both(rank: int, world: int) -> Counts:
    _recompute(rank, world, "user")
    return _recompute(rank, world, "transformers")


def test_recomputed_layers_send_no_more_than_the_formula() -> None:
    for counts in run_ranks(2, _recompute_both):
        assert counts == _textbook(2, (2 * LAYERS + 1) * HIDDEN, recomputed=True)


def _reentrant(rank: int, world: int) -> None:
    model: Any = build("modular")
    _cut(model, rank, world, sequence=True)
    x = model.embed(token_ids())
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    model.head(model.norm(x)).square().mean().backward()


# Random numbers


def _masks(model: nn.Module) -> dict[str, list[Tensor]]:
    """Which elements each dropout of a GPT-2 has kept, by its name; filled as the model runs."""
    kept: dict[str, list[Tensor]] = {}

    def note(fqn: str, module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        out = out[1] if isinstance(out, tuple) else out  # eager attention returns its probabilities, dropped out
        kept.setdefault(fqn, []).append(out.detach() != 0)

    for fqn, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if isinstance(module, nn.Dropout) or fqn.endswith(".attn"):
            module.register_forward_hook(partial(note, fqn))
    return kept


def _dropout(rank: int, world: int, sequence: bool) -> dict[str, Any]:
    ids = torch.randint(0, VOCAB, (4, 16), generator=torch.Generator().manual_seed(3))
    losses, first = [], {}
    for recompute in (False, True, False):
        model = build("gpt2-eager")
        plugin, mesh = _cut(model, rank, world, sequence=sequence)
        kept = _masks(model)
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(7)
        loss = _step(model, plugin, mesh, ids)
        grads = {n: p.grad for n, p in model.named_parameters()}
        losses.append((float(loss), torch.get_rng_state().sum().item()))
        first = first or grads
        for name, grad in grads.items():  # the masks of the recomputed forward are those of the forward
            torch.testing.assert_close(grad, first[name], rtol=1e-12, atol=1e-12, msg=name)
    assert len(set(losses)) == 1, "the same seed gives the same run, recomputed or not"
    alike = {}
    for fqn, masks in kept.items():
        everyones = [part[0] for part in mesh["tp"].gather_objects(masks)]
        alike[fqn] = all(torch.equal(other, everyones[0]) for other in everyones[1:])
        share = torch.cat([m.flatten() for m in everyones]).double().mean()
        n = sum(m.numel() for m in (everyones[:1] if alike[fqn] else everyones))
        if not fqn.endswith(".attn"):  # which is zero above the diagonal anyway
            assert abs(float(share) - 0.7) < 4.5 * (0.21 / n) ** 0.5, (fqn, float(share), n)
    assert len(set(mesh["tp"].gather_objects(losses[0][0]))) == 1
    return alike


def test_dropout_differs_where_ranks_hold_different_things_and_agrees_elsewhere() -> None:
    for sequence in (True, False):
        for alike in run_ranks(2, _dropout, sequence):
            layers = {fqn: same for fqn, same in alike.items() if ".h." in fqn}
            assert len(layers) == 3 * LAYERS and alike["transformer.drop"]
            local = {fqn for fqn, same in layers.items() if not same}
            assert local == {fqn for fqn in layers if sequence or fqn.endswith(".attn")}


def test_layers_do_not_repeat_each_others_masks() -> None:
    """Attention masks of the two layers, of two steps, and of two ranks: all different."""
    seen = [mask for ranks in run_ranks(2, _attention_masks) for mask in ranks]
    assert len(seen) == 8 and len({mask.numpy().tobytes() for mask in seen}) == 8


def _attention_masks(rank: int, world: int) -> list[Tensor]:
    model = build("gpt2-eager")
    plugin, mesh = _cut(model, rank, world, sequence=True)
    kept = _masks(model)
    for _ in range(2):
        _step(model, plugin, mesh, token_ids())
    return [mask for fqn, masks in kept.items() if fqn.endswith(".attn") for mask in masks]


# Refusals


def _bad(rank: int, world: int) -> None:
    _cut(build("plain"), rank, world, sequence=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_bad, r"sequence_parallel=True, but the residual stream of Plain cannot be cut: .*blocks.0 \(Block\) holds"),
        (_reentrant, r"has lost its sequence length: use torch.utils.checkpoint with use_reentrant=False"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(function: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as failed:
        run_ranks(2, function)
    assert [kind for kind, _, _ in failed.value.errors.values()] == ["ValueError"] * 2
