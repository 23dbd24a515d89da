"""Loss and every gradient of a small model on some ranks, against the same model in one process.

It is: what a rank runs, for the test of a dozen architectures and for the sweep over all of them. It is not: which
architectures there are (`tests/small_models.py`).
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.strategies.assemble import averaged_lookup, make_plugins, shard_lookup
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.small_models import VOCAB, build_small, token_ids

TOLERANCE = 1e-9
SEED = 5


class Parity(NamedTuple):
    """Of a comparison that went well.

    Attributes:
        sent: "kind phase" -> payload bytes on the tensor axis.
        cut: share of the model's elements that are cut.
    """

    sent: dict[str, int]
    cut: float


class Fp64(TorchFunctionMode):
    """Computes in fp64 what a model asks to be computed in fp32 (norms, softmax), so that sums may be reordered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy in fp64; of a model without a head the mean of its hidden states, each weighed."""
    with Fp64():
        out = model(input_ids=ids, use_cache=False)
    if "logits" not in out:
        hidden = out.last_hidden_state
        return (hidden * torch.arange(hidden.shape[-1]).cos()).mean()
    logits = out.logits
    assert logits.shape == (*ids.shape, VOCAB)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def cut(model: nn.Module, mesh: Mesh) -> list[ParallelPlugin]:
    """Apply every plugin that the mesh's layout asks for."""
    plugins = make_plugins(mesh.layout, {})
    for plugin in plugins:
        plugin.check(mesh.layout, model)
    for plugin in plugins:
        plugin.apply(model, mesh=mesh, layout=mesh.layout)
    return plugins


def whole_grads(model: nn.Module, plugins: list[ParallelPlugin], mesh: Mesh) -> dict[str, Tensor]:
    """Every gradient put together from all ranks' parts. Replicas must agree; what no rank wrote stays nan."""
    shard_of, averaged_over = shard_lookup(plugins), averaged_lookup(plugins)
    mine = {}
    for fqn, param in model.named_parameters():
        if (grad := param.grad) is not None:
            mesh[averaged_over(fqn)].all_reduce(grad.div_(mesh.size("data")))
        counts = mesh.index(averaged_over(fqn)) == 0  # replicas over the data axis are no further elements
        mine[fqn] = shard_of(fqn), grad, counts
    out: dict[str, Tensor] = {}
    owned: dict[str, Tensor] = {}
    for part in mesh["world"].gather_objects(mine):
        for fqn, (shard, grad, counts) in part.items():
            if grad is None:
                continue
            shard = shard or ParamShard(tuple(grad.shape))
            assert tuple(grad.shape) == shard.local_shape, f"{fqn}: {tuple(grad.shape)} is not {shard.local_shape}"
            whole = out.setdefault(fqn, torch.full(shard.shape, float("nan"), dtype=grad.dtype))
            before = whole.clone()
            shard.put(whole, grad)
            require_close(whole.where(~before.isnan(), 0), before.nan_to_num(), f"replicas of {fqn}")
            count = owned.setdefault(fqn, torch.zeros(shard.shape))
            once = torch.zeros(shard.shape)
            shard.put(once, torch.full(shard.local_shape, float(shard.owner and counts)))
            count += once
    for fqn, count in owned.items():
        assert bool((count == 1).all()), (
            f"{fqn}: an element is counted by {sorted(set(count.flatten().tolist()))} ranks"
        )
    return out


def require_close(found: Tensor, wanted: Tensor, what: str) -> None:
    """Within `TOLERANCE` of the largest element, and of 1."""
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {tuple(found.shape)} instead of {tuple(wanted.shape)}")
    error = float((found - wanted).abs().max()) if found.numel() else 0.0
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    if not error <= TOLERANCE * scale:
        raise AssertionError(f"{what}: off by {error:.1e} of {scale:.1e}")


def compare(rank: int, world: int, model_type: str, options: dict[str, Any], changes: dict[str, Any]) -> Parity:
    """Raise unless loss and gradients on `world` ranks equal one process.

    Args:
        options: layout fields, e.g. {"sequence_parallel": False}; tensor_parallel_size is `world` unless given. Data
            ranks share the samples evenly.
        changes: to the small config.
    """
    warnings.filterwarnings("ignore")
    layout = Layout(**{"tensor_parallel_size": world} | options).resolve(world)
    reference, model, ids = build_small(model_type, **changes), build_small(model_type, **changes), token_ids()
    torch.manual_seed(SEED)  # some routers draw random numbers
    expected = loss_of(reference, ids)
    expected.backward()
    mesh = Mesh.build(layout, rank)
    try:
        plugins = cut(model, mesh)
        loss, counts = _step(model, plugins, mesh, ids.chunk(mesh.size("data"))[mesh.index("data")])
        mesh["data"].all_reduce(loss.div_(mesh.size("data")))
        require_close(loss, expected.detach(), "loss")
        found = whole_grads(model, plugins, mesh)
    finally:
        mesh.close()
    wanted = {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
    missing = sorted(wanted.keys() ^ found.keys())
    assert not missing, f"gradient on one side only: {missing[:5]}"
    for fqn, grad in found.items():
        require_close(grad, wanted[fqn], f"gradient of {fqn}")
    shard_of = shard_lookup(plugins)
    parts = {n: p.numel() for n, p in model.named_parameters() if (part := shard_of(n)) and part.dim is not None}
    whole = sum(p.numel() for p in reference.parameters())
    held = sum(p.numel() for p in model.parameters())
    cut_elements = whole - (held - sum(parts.values()))
    return Parity(counts, cut_elements / whole)


def _step(model: nn.Module, plugins: list[ParallelPlugin], mesh: Mesh, ids: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Loss, and bytes by kind and phase; gradients are finished."""
    if mesh.layout.sequence_parallel is not False:
        loss_of(model, ids[:, :-3])  # shows who reads gathered inputs, which get a head start from then on
    mesh.ledger.reset()
    torch.manual_seed(SEED)
    with mesh.ledger.during("forward"):
        loss = loss_of(model, ids)
    with mesh.ledger.during("backward"):
        loss.backward()
    with mesh.ledger.during("step"):
        for plugin in plugins:
            plugin.finalize_grads(model, mesh=mesh)
    counts: dict[str, int] = {}
    for (axis, kind, phase), traffic in mesh.ledger.counts.items():
        if axis.startswith("tp"):
            counts[f"{kind} {phase}"] = counts.get(f"{kind} {phase}", 0) + traffic.bytes
    return loss.detach(), counts
