"""What backward keeps, counted exactly: with sequence shards a rank keeps its share of everything in a layer, as
Korthikanti et al. (2022), table 2, have it; recomputation keeps what it says and changes no number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies import recompute
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import run_ranks
from tests.ranks.test_tensor import _cut, _step
from tests.tensor_models import VOCAB, build

BATCH, SEQ, HIDDEN, HEADS, LAYERS, FP64 = 2, 64, 32, 4, 2, 8
IDS = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(3))


class Kept:
    """Storages that autograd saves, by address, without those of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.tensors: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._own:
            self.tensors[address] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


def _model(name: str, layers: int) -> Any:
    model: Any = build(name, layers=layers, positions=SEQ)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def _forward(model: Any) -> Kept:
    """The trunk alone: from token ids to the last norm."""
    kept = Kept(model)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        model.base_model(IDS, use_cache=False)
    return kept


def _per_layer(rank: int, world: int, name: str, sequence: bool) -> int:
    """Bytes a layer keeps: what two more layers add, halved."""
    found = []
    for layers in (2, 4):
        model = _model(name, layers)
        if world > 1:
            _cut(model, rank, world, sequence=sequence)
        found.append(_forward(model).bytes)
    return (found[1] - found[0]) // 2


def _all_layers(rank: int, world: int, names: list[str]) -> dict[tuple[str, bool], int]:
    return {(name, sequence): _per_layer(rank, world, name, sequence) for name in names for sequence in (True, False)}


def test_a_rank_keeps_its_share_of_a_layer() -> None:
    names = ["llama-eager", "gpt2-eager", "llama"]
    whole = {name: _per_layer(0, 1, name, False) for name in names}
    for ranks in (2, 4):
        for found in run_ranks(ranks, _all_layers, names):
            for name in names:
                share = whole[name] / ranks
                assert abs(found[name, True] - share) < 0.05 * share, (name, ranks, found[name, True], share)
                # without shards of sequences, norms, residuals and inputs of blocks are whole: at least 4 b s h more
                more = found[name, False] - found[name, True]
                assert more > 4 * BATCH * SEQ * HIDDEN * FP64 * (1 - 1 / ranks), (name, ranks, more)


def _recomputed(rank: int, world: int) -> None:
    runs: dict[str, tuple[Tensor, dict[str, Tensor], Kept]] = {}
    for kind in ("none", "selective", "full"):
        layout = Layout(tensor_parallel_size=world, recompute=kind).resolve(world)
        model = _model("gpt2-eager", LAYERS)
        plugin, mesh = _cut(model, rank, world, sequence=True)
        recompute.check(layout, model)
        recompute.apply(layout, model)
        torch.manual_seed(5)
        kept = _forward(model)
        torch.manual_seed(5)
        loss = _step(model, plugin, mesh, IDS)
        runs[kind] = loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, kept
    loss, grads, kept = runs["none"]
    scores = {(BATCH, HEADS // world, SEQ, SEQ)}
    for kind in ("selective", "full"):
        assert torch.equal(runs[kind][0], loss)
        for name, grad in runs[kind][1].items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-12, atol=1e-12, msg=name)
        assert not scores & {tuple(t.shape) for t in runs[kind][2].tensors.values()}
    # softmax, the noise of dropout (as wide as it on a CPU) and their product; the causal mask, which all layers share,
    # is kept to compute them again
    matrix, mask = BATCH * HEADS // world * SEQ * SEQ * FP64, BATCH * SEQ * SEQ * FP64
    assert kept.bytes - runs["selective"][2].bytes == LAYERS * 3 * matrix - mask
    each = BATCH * SEQ // world * HIDDEN * FP64
    assert runs["full"][2].bytes < kept.bytes - LAYERS * 10 * each


def test_recomputation_keeps_no_scores_or_nothing_and_changes_no_number() -> None:
    run_ranks(2, _recomputed)


def _plain(rank: int, world: int) -> None:
    reference, model = build("modular"), build("modular")
    layout = Layout(tensor_parallel_size=world, recompute="full").resolve(world)
    reference(IDS).square().mean().backward()
    plugin, mesh = _cut(model, rank, world, sequence=True)
    model.pp_plan = {"embed": ([], []), "layers": ([], []), "norm": ([], []), "head": ([], [])}
    recompute.check(layout, model)
    recompute.apply(layout, model)
    before = _count(mesh)
    model(IDS).square().mean().backward()
    plugin.finalize_grads(model, mesh=mesh)
    assert _count(mesh) > before
    for name, param in model.named_parameters():
        shard = plugin.param_shard(name)
        assert shard is not None and param.grad is not None
        torch.testing.assert_close(param.grad, shard.take(reference.get_parameter(name).grad), rtol=1e-10, atol=1e-10)


def _count(mesh: Mesh) -> int:
    return sum(t.calls for t in mesh.ledger.counts.values())


def test_layers_of_plain_modules_are_recomputed_too() -> None:
    run_ranks(2, _plain)
