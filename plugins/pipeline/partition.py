"""Which layers go to which virtual stage.

It is: what each layer costs, by a rule or as given, and the contiguous split that makes the dearest stage cheapest; or
the split the user has written down. It is not: the cut (`plugin.py`), or a measurement (`layer_costs.py`).

Rules:

- `"cost"`, the default: matrix elements, since a product takes 2 operations per element and token, forward, and twice
  that backward. A head counts like any matrix, also when its weight is the embedding's; an embedding, which is looked
  up, counts one row. Attention's own products grow with the sequence, alike in all layers, and are left out; so is how
  few experts a token visits. Where that matters, measure.
- `"parameters"`: all elements, embedding and head included: an even use of memory.
- `"uniform"`: the number of layers alone; the first stages take those left over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from parallax.plugins.pipeline.plans import Structure
from parallax.strategies.names import nearest_name

RULES = ("cost", "parameters", "uniform")

Asked = str | Mapping[str, float] | Sequence[int] | Sequence[str] | Sequence[Sequence[str]]
"""A rule; a .json file of costs or the costs, by name; layers per stage; first layer of each stage after the first; or
the layers of each stage."""


@dataclass(frozen=True)
class Partition:
    """Layers of each virtual stage, and what the stages cost.

    Attributes:
        bounds: [lo, hi) of every stage; contiguous, none empty.
        shares: share of the whole cost of every stage, modules before and after the layers included.
        how: in words, how it came about.
    """

    bounds: tuple[tuple[int, int], ...]
    shares: tuple[float, ...]
    how: str


def make_partition(model: nn.Module, structure: Structure, num_stages: int, asked: Asked = "cost") -> Partition:
    """Split the layers of `model` into `num_stages`.

    Raises:
        ValueError: more stages than layers; an unknown rule; costs, counts or names that do not fit the model.
    """
    if num_stages > structure.num_layers:
        raise ValueError(f"{structure.num_layers} layers cannot fill {num_stages} stages")
    if isinstance(asked, str) and asked.endswith(".json"):
        how = f"by the costs in {Path(asked).name}"
        asked = _read(Path(asked))
    else:
        how = f"by {asked}" if isinstance(asked, str) else "by given costs" if isinstance(asked, Mapping) else "by hand"
    if isinstance(asked, str) and asked not in RULES:
        raise ValueError(
            f"pp_partition={asked!r} is no rule; use one of {', '.join(RULES)}, a .json file of costs by module name, "
            f"or a list with the number of layers of each of the {num_stages} stages"
        )
    if isinstance(asked, str | Mapping):
        layers, before, after = _costs(model, structure, asked)
        if asked == "uniform":
            counts = [len(part) for part in _even(structure.num_layers, num_stages)]
        else:
            counts = balance(layers, num_stages, before, after)
    else:
        layers, before, after = _costs(model, structure, "cost")
        counts = _by_hand(structure, num_stages, asked)
    ends = list(accumulate(counts))
    bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
    parts = [sum(layers[lo:hi]) for lo, hi in bounds]
    parts[0], parts[-1] = parts[0] + before, parts[-1] + after
    whole = sum(parts) or 1.0
    return Partition(bounds, tuple(part / whole for part in parts), how)


def balance(layers: Sequence[float], num_stages: int, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Number of layers of each stage, so that the dearest stage is as cheap as can be.

    Among such splits the one whose stages are most alike (least sum of squares), then the one with longer stages first.
    Exact, by dynamic programming over (stage, layers used), in O(stages x layers^2).

    Args:
        layers: cost of each layer.
        before, after: what the first and the last stage carry besides.
    """
    sums = [0.0, *accumulate(layers)]
    total = len(layers)

    def cost(stage: int, lo: int, hi: int) -> float:
        return sums[hi] - sums[lo] + (before if stage == 0 else 0.0) + (after if stage == num_stages - 1 else 0.0)

    def best(limit: float | None) -> tuple[float, list[int]]:
        """Least maximum (limit None), or least sum of squares of stages within `limit`; and its ends, last first."""
        table: list[tuple[float, list[int]]] = [(0.0, []), *[(float("inf"), [])] * total]
        for stage in range(num_stages):
            new: list[tuple[float, list[int]]] = [(float("inf"), [])] * (total + 1)
            for hi in range(stage + 1, total - (num_stages - 1 - stage) + 1):
                for lo in range(hi - 1, stage - 1, -1):
                    so_far, ends = table[lo]
                    here = cost(stage, lo, hi)
                    if so_far == float("inf") or (limit is not None and here > limit):
                        continue
                    value = max(so_far, here) if limit is None else so_far + here * here
                    if value < new[hi][0] * (1 - 1e-12):
                        new[hi] = value, [*ends, hi]
            table = new
        return table[total]

    limit, _ = best(None)
    _, ends = best(limit * (1 + 1e-9))
    return [hi - lo for lo, hi in zip([0, *ends[:-1]], ends, strict=True)]


def _even(num_layers: int, num_stages: int) -> list[range]:
    size, extra = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, extra) for stage in range(num_stages + 1)]
    return [range(lo, hi) for lo, hi in zip(starts, starts[1:], strict=False)]


def _costs(
    model: nn.Module, structure: Structure, rule: str | Mapping[str, float]
) -> tuple[list[float], float, float]:
    """Cost of each layer, of what runs before them and of what runs after."""
    names = [f"{structure.layers}.{i}" for i in range(structure.num_layers)]
    if isinstance(rule, Mapping):
        return _given(structure, names, rule)
    if rule == "uniform":
        return [1.0] * structure.num_layers, 0.0, 0.0

    def cost(fqn: str, *, recurse: bool) -> float:
        modules = model.get_submodule(fqn).modules() if recurse else [model.get_submodule(fqn)]
        return sum(_module_cost(module, rule) for module in modules)

    ends = [sum(cost(fqn, recurse=False) for fqn in part) for part in (structure.before, structure.after)]
    return [cost(fqn, recurse=True) for fqn in names], ends[0], ends[1]


def _module_cost(module: nn.Module, rule: str) -> float:
    """Of a module's own parameters."""
    params = [p for p in module._parameters.values() if p is not None]
    if rule == "parameters":
        return float(sum(p.numel() for p in params))
    if isinstance(module, nn.Embedding):
        return float(module.embedding_dim)
    return float(sum(p.numel() for p in params if p.dim() > 1))


def _given(structure: Structure, layers: list[str], costs: Mapping[str, float]) -> tuple[list[float], float, float]:
    known = [*layers, *structure.before, *structure.after]
    for name, value in costs.items():
        if name not in known:
            near = nearest_name(name, known)
            raise ValueError(
                f"pp_partition gives a cost for {name!r}, which is neither a layer of {structure.layers!r} nor a "
                f"module before or after them" + (f"; did you mean {near!r}?" if near else "")
            )
        if not value >= 0:
            raise ValueError(f"pp_partition gives {name!r} the cost {value}; costs are at least 0")
    absent = [name for name in layers if name not in costs]
    if absent:
        raise ValueError(f"pp_partition gives no cost for {', '.join(absent[:3])}; every layer needs one")
    ends = [sum(float(costs.get(fqn, 0.0)) for fqn in part) for part in (structure.before, structure.after)]
    return [float(costs[name]) for name in layers], ends[0], ends[1]


def _by_hand(structure: Structure, num_stages: int, asked: Sequence[Any]) -> list[int]:
    """Counts from: counts; the first layers of all stages but the first; or the layers of each stage."""
    names = [f"{structure.layers}.{i}" for i in range(structure.num_layers)]
    if asked and all(isinstance(part, str) for part in asked):
        starts = [0, *(_layer(str(part), names) for part in asked)]
        counts = [hi - lo for lo, hi in zip(starts, [*starts[1:], len(names)], strict=True)]
    elif asked and all(isinstance(part, int) for part in asked):
        counts = [int(part) for part in asked]
    else:
        order = [_layer(str(name), names) for part in asked for name in part]
        if order != list(range(len(names))):
            raise ValueError(f"pp_partition must name each layer of {structure.layers!r} once, in order, by stage")
        counts = [len(part) for part in asked]
    if len(counts) != num_stages or sum(counts) != len(names) or min(counts) < 1:
        example = [len(part) for part in _even(len(names), num_stages)]
        raise ValueError(
            f"pp_partition {list(asked)} gives stages of {counts} layers; there must be {num_stages} stages of at "
            f"least 1 layer, {len(names)} in all, e.g. {example}"
        )
    return counts


def _layer(name: str, names: list[str]) -> int:
    if name not in names:
        near = nearest_name(name, names)
        guess = f"; did you mean {near!r}?" if near else f", which are {names[0]!r} to {names[-1]!r}"
        raise ValueError(f"pp_partition names {name!r}, which is none of the layers{guess}")
    return names.index(name)


def _read(path: Path) -> Mapping[str, float]:
    if not path.is_file():
        raise ValueError(f"pp_partition: no file {str(path)!r}")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"pp_partition: {str(path)!r} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise ValueError(f'pp_partition: {str(path)!r} must map module names to costs, {{"model.layers.0": 1.0, ...}}')
    return found
