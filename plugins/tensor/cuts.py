"""This rank's part in the place of every parameter that a plan cuts.

It is: which part (`shard_parameters`), and the exchange (`replace_parameters`). It is not: the arithmetic of one
module's cut (`shards.py`), or what the modules do afterwards (`convert.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from parallax.plugins.base import ParamShard
from parallax.plugins.tensor.shards import module_shards, parameter_shard
from parallax.plugins.tensor.styles import CUTTING
from parallax.plugins.tensor.target import Target


def shard_parameters(model: nn.Module, targets: Mapping[str, Target], size: int, index: int) -> dict[int, ParamShard]:
    """id(parameter) -> rank `index`'s shard, for every parameter the targets cut.

    Raises:
        ValueError: two owners of a tied parameter do not cut it the same way.
    """
    cuts: dict[int, tuple[Target, ParamShard]] = {}
    parts: dict[tuple[int, str], ParamShard] = {}
    for target in targets.values():
        if target.style.kind in CUTTING:
            for name, part in _shards_of(target, size, index).items():
                parts[id(target.module), name] = part
                cuts.setdefault(id(target.module.get_parameter(name)), (target, part))
    for fqn, module in model.named_modules():
        for name, param in module._parameters.items():
            if id(param) in cuts and parts.get((id(module), name)) != cuts[id(param)][1]:
                target, _ = cuts[id(param)]
                mine = targets[fqn].style.word if fqn in targets else "no style"
                raise ValueError(
                    f"{fqn}.{name} is tied to a parameter of {target.fqn}, which style {target.style.word!r} cuts, but "
                    f"{fqn} ({type(module).__name__}) has {mine}, so the two need different parts of it; give both the "
                    "same style ('embedding_rowwise' and 'colwise_gather_output' match), or untie them"
                )
    return {key: part for key, (_, part) in cuts.items()}


def _shards_of(target: Target, size: int, index: int) -> dict[str, ParamShard]:
    if not target.part:
        copies = 1 if target.style.heads else target.copies  # which of a fused matrix share no element
        return module_shards(target.fqn, target.module, target.style, size, index, copies)
    part = parameter_shard(target.fqn, target.module.get_parameter(target.part), target.style, size, index)
    return {} if part is None else {target.part: part}


def holds_parameters(target: Target) -> bool:
    """False for what a pipeline cut has emptied."""
    return next(target.module.parameters(), None) is not None


def replace_parameters(model: nn.Module, cuts: Mapping[int, ParamShard]) -> None:
    """Put one new local parameter in the place of each cut one, everywhere it is used."""
    new: dict[int, nn.Parameter] = {}
    old: list[nn.Parameter] = []  # keeps ids unique until done
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or id(param) not in cuts:
                continue
            if id(param) not in new:
                local = nn.Parameter(cuts[id(param)].take(param.detach()), requires_grad=param.requires_grad)
                local.__dict__.update(param.__dict__)  # marks that others left on the parameter
                new[id(param)] = local
                old.append(param)
            module._parameters[name] = new[id(param)]
