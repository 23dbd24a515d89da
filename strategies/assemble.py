"""Turns the user's module into this rank's part of the parallel model.

It is: the one visible order in which parallelism is applied, with the reason beside each step. It is not: any
axis's own work (`plugins/`), or the data engine, which comes last and needs the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parallax.plugins import registry
from parallax.plugins.base import ParallelPlugin, ParamShard
from parallax.plugins.data.base import DataEngine
from parallax.strategies import recompute
from parallax.strategies.deferred import Recording
from parallax.strategies.fingerprint import fingerprint
from parallax.strategies.layout import Layout
from parallax.strategies.materialize import materialize
from parallax.strategies.mesh import Mesh
from parallax.strategies.precision import ParallaxPrecision

ORDER: Sequence[tuple[str, str]] = (
    ("pp", "drops foreign layers before anything is materialised, so no rank ever holds the whole model"),
    ("ep", "cuts the experts before tensor parallelism cuts what is inside one"),
    ("tp", "cuts the parameters that are left"),
    ("cp", "changes attention only, which by now has its final heads"),
)
"""Order of application of the model axes. Materialising and the data engine (ZeRO) come after all of them."""


def make_plugins(layout: Layout, options: Mapping[str, Mapping[str, Any]]) -> list[ParallelPlugin]:
    """One fresh plugin per axis that is longer than 1, in `ORDER`.

    Args:
        layout: resolved.
        options: axis -> keyword arguments of its plugins that the user gave; None leaves them out. "plan" is relative
            to the root module; without it plugins read the model's own.

    Raises:
        ValueError: an axis is used and no installed plugin serves it.
    """
    sizes = {**layout.axis_sizes(), "ep": layout.expert_parallel_size}
    wanted = [axis for axis, _ in ORDER if sizes[axis] > 1]
    found: dict[str, list[ParallelPlugin]] = {axis: [] for axis, _ in ORDER}
    if any(size > 1 for size in sizes.values()):
        for name in registry.names("parallax.parallelism"):
            kind: Any = registry.load("parallax.parallelism", name)
            if any(sizes[axis] > 1 for axis in (kind.axis, *kind.also)):
                given = {name: value for name, value in options.get(kind.axis, {}).items() if value is not None}
                found[kind.axis].append(kind(**given))
    unused = [n for n, value in options.get("ep", {}).items() if n != "plan" and value is not None and not found["ep"]]
    if unused:
        raise ValueError(f"expert_{unused[0]} is set, but on one rank nothing is done to experts; leave it out")
    if options.get("tp", {}).get("chunks") is not None and not found["tp"]:
        raise ValueError("tp_chunks is set, but tensor_parallel_size is 1, so that nothing is sent; leave it out")
    missing = [axis for axis in wanted if not found[axis]]
    if missing:
        served = registry.names("parallax.parallelism")
        raise ValueError(
            f"the layout {layout} uses axis {', '.join(f'{a}={sizes[a]}' for a in missing)}, but no installed plugin "
            f"serves it (installed: {', '.join(served)}); set it to 1 or install a plugin for it"
        )
    return [plugin for axis, _ in ORDER for plugin in found[axis]]


def make_data_engine(layout: Layout, options: Mapping[str, Any]) -> DataEngine:
    """A fresh data engine.

    Args:
        layout: resolved.
        options: keyword arguments of the engine that the user gave; None leaves them out.

    Raises:
        ValueError: it cannot work, or an option does nothing at `layout`.
    """
    kind: type[DataEngine] = registry.load("parallax.data_engines", layout.resolved_data_engine)
    kind.check(layout)
    given = {name: value for name, value in options.items() if value is not None}
    if given and (layout.zero_stage, layout.resolved_data_engine) != (3, "deepspeed"):
        raise ValueError(
            f"zero3_prefetch is set, but data engine {layout.resolved_data_engine!r} at ZeRO stage {layout.zero_stage} "
            f"has nothing to gather ahead in DeepSpeed's way; leave it out"
        )
    if given.get("prefetch") and not layout.may_gather_ahead:
        raise ValueError(
            "zero3_prefetch=True, but ZeRO-3 gathers ahead by the order of layers, which does not repeat under a "
            "pipeline (several forwards are in flight), and ranks were seen to wait for each other with expert "
            f"parallelism ({layout}); leave it out"
        )
    return kind(**given)


def shard_lookup(plugins: Sequence[ParallelPlugin]) -> Callable[[str], ParamShard | None]:
    """How a local parameter sits in the whole one, over all axes: where it is cut, and whether it counts here."""

    def shard_of(fqn: str) -> ParamShard | None:
        shards = [s for p in plugins if (s := p.param_shard(fqn)) is not None]
        if not shards:
            return None
        cut = [s for s in shards if s.dim is not None]
        if len(cut) > 1:
            raise RuntimeError(f"parameter {fqn!r} is cut over several axes: {[s.axis for s in cut]}")
        base = cut[0] if cut else shards[0]
        covered = {s.axis for s in (base, base.inner) if s is not None and s.dim is not None}
        owner = all(s.owner for s in shards if s is base or s.axis not in covered)
        return base if base.owner == owner else replace(base, owner=owner)

    return shard_of


def averaged_lookup(plugins: Sequence[ParallelPlugin]) -> Callable[[str], str]:
    """FQN -> the mesh group over which its gradient is averaged: "data" unless a plugin says otherwise."""

    def averaged_over(fqn: str) -> str:
        return next((group for p in plugins if (group := p.averaged_over(fqn)) is not None), "data")

    return averaged_over


def owned_lookup(shard_of: Callable[[str], ParamShard | None]) -> Callable[[str], bool]:
    """FQN -> whether this rank counts the parameter in the gradient norm."""

    def owned(fqn: str) -> bool:
        shard = shard_of(fqn)
        return shard is None or shard.owner

    return owned


def assemble(
    module: nn.Module,
    plugins: Sequence[ParallelPlugin],
    *,
    mesh: Mesh,
    recording: Recording | None,
    precision: ParallaxPrecision,
    device: torch.device,
    together: Callable[[str], AbstractContextManager[None]],
) -> None:
    """Make `module` this rank's part of the parallel model, in place, with real tensors on `device`. Collective.

    Args:
        module: the user's LightningModule: on the meta device as far as `recording` built it, else real.
        plugins: in order of application.
        recording: what `configure_model` did; None when it built nothing.
        precision: dtype of the weights.
        together: a context within which an error of one rank is one of all.
    """
    if recording is not None:
        recording.capture(module)
    seed = mesh["control"].broadcast_object(torch.initial_seed())
    with together("the comparison of the ranks' models"):
        agree_on_weights(module, mesh)
    with together("the assembly of the model"):
        for plugin in plugins:
            plugin.apply(module, mesh=mesh, layout=mesh.layout)
        for plugin in plugins:
            plugin.finish(module)
        recompute.apply(mesh.layout, module)
        if recording is not None:
            materialize(module, recording, shard_of=shard_lookup(plugins), seed=seed, device=device)
        precision.convert_module(module)
        module.to(device)
    # Dropout and the like: the same on ranks that hold the same samples, different on others.
    torch.manual_seed(seed + mesh.index("data") + mesh.size("data") * mesh.index("pp"))


def agree_on_weights(module: nn.Module, mesh: Mesh) -> None:
    """Give every rank rank 0's values where real tensors differ between ranks (a model built without one seed).

    As DDP does; cheap when they agree already: one number per tensor travels.
    """
    tensors = [(n, t) for n, t in (*module.named_parameters(), *module.named_buffers()) if not t.is_meta]
    mine = [(n, tuple(t.shape), str(fingerprint(t))) for n, t in tensors]  # as text, where nan equals nan
    everyones = mesh["control"].gather_objects(mine)
    if all(other == everyones[0] for other in everyones):
        return
    if any([x[:2] for x in other] != [x[:2] for x in everyones[0]] for other in everyones):
        raise ValueError("the ranks built different models: parameter names or shapes differ between ranks")
    with torch.no_grad():
        for _, tensor in tensors:
            mesh["world"].broadcast(tensor.data)
