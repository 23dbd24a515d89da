"""What one rank of the tensor axis holds and sends, for the layout table.

It is: counts of parameters and collectives, from the plan alone. It is not: a measurement; tests hold it against the
ledger of `strategies/comm.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

from parallax.plugins.base import ParamShard
from parallax.plugins.tensor.plans import is_foreign
from parallax.plugins.tensor.sequence_plan import Trunk
from parallax.plugins.tensor.styles import Kind
from parallax.plugins.tensor.target import Target
from parallax.strategies.comm import AxisComm


def describe(
    model: nn.Module,
    targets: Mapping[str, Target],
    shards: Mapping[str, ParamShard],
    comm: AxisComm,
    trunk: Trunk | str | None,
    heads: set[int],
) -> dict[str, str]:
    """Label -> text; `model` is already this rank's part, and `heads` are ids of those whose logits stay cut."""
    params = dict(model.named_parameters())
    cut = [fqn for fqn in params if fqn not in shards or shards[fqn].dim is not None]
    held = sum(p.numel() for p in params.values())
    forward, backward = collectives(model, targets, trunk, heads)
    return {
        "holds": f"tp part {comm.index + 1} of {comm.size}",
        "parameters": f"{len(cut)} cut, {len(params) - len(cut)} whole; {held:,} elements",
        "sequence": f"sharded in {trunk.layers}" if isinstance(trunk, Trunk) else f"whole: {trunk}",
        "sends": f"per micro-batch forward {_list(forward)}; backward {_list(backward)}",
    }


def collectives(
    model: nn.Module, targets: Mapping[str, Target], trunk: Trunk | str | None, heads: set[int]
) -> tuple[Counter[str], Counter[str]]:
    """Collectives of one forward and one backward, by kind, without those of the loss.

    All parameters are trained, nothing is recomputed, and on shards the embedding's output enters the layers as it is.
    """
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    outside = set[str]()
    sharded = trunk if isinstance(trunk, Trunk) else None
    for fqn, target in targets.items():
        if target.part:
            continue
        kind, whole = target.style.kind, target.style.whole_outside
        inside = sharded is not None and sharded.is_region(fqn)
        if kind is Kind.COLUMN and not inside:
            outside.add(target.block)
        waits = kind is Kind.EMBEDDING and sharded is not None
        forward["all-reduces"] += kind in (Kind.EMBEDDING, Kind.SUM_OUTPUT) and not waits
        forward["all-reduces"] += kind is Kind.ROW and not inside
        forward["reduce-scatters"] += waits or (kind is Kind.ROW and inside)
        forward["all-gathers"] += kind is Kind.EMBEDDING_WIDTH
        forward["all-gathers"] += kind is Kind.COLUMN and whole and id(target.module) not in heads
        backward["all-gathers"] += kind is Kind.ROW and (whole or inside)
        forward["all-reduces"] += kind is Kind.WIDE_NORM
        backward["all-reduces"] += kind is Kind.WIDE_NORM
        forward["all-gathers"] += bool(target.style.heads and target.copies > 1)
        backward["reduce-scatters"] += bool(target.style.heads and target.copies > 1)
    if sharded is not None:
        readers = {name for name in outside if not sharded.contains(f"{name}.")}
        outside -= readers
        _add_shards(model, sharded, len(readers), forward, backward)
    backward["all-reduces"] += len(outside)
    return forward, backward


def _add_shards(model: nn.Module, trunk: Trunk, readers: int, forward: Counter[str], backward: Counter[str]) -> None:
    """Entry, blocks, opaque modules, exit and its readers (heads), as far as they are on this rank.

    What a block or a head reads is gathered again in backward, because only the shard was saved.
    """
    here = {fqn for fqn, module in model.named_modules() if not is_foreign(module)}
    blocks = sum(fqn in here for fqn in trunk.blocks) + sum(fqn in here for fqn in trunk.direct) // 2
    opaque = sum(fqn in here for fqn in trunk.opaque)
    forward["all-gathers"] += blocks + opaque + (trunk.end in here)
    backward["all-gathers"] += blocks + readers + opaque + (f"{trunk.layers}.0" in here)
    backward["reduce-scatters"] += blocks + readers


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "nothing"
