"""The swept values of a Hydra command line, and what is left of them once impossible points are dropped.

It is: the product of a sweep's discrete values as points, and the values that still occur in one. It is not: the choice
of points, which stays with the sweeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

MOST = 10_000
"""Most points looked at before a sweep; larger products are only looked at job by job."""


@dataclass(frozen=True)
class Space:
    """A sweep's arguments.

    Attributes:
        values: key -> "key=value" for each of its values, in order; one for a key that is not swept.
            One swept over an interval is there with its lower end.
    """

    values: Mapping[str, Sequence[str]]

    def points(self) -> list[tuple[str, ...]]:
        """Every combination, as Hydra's own sweeper makes them; none when there are more than `MOST`."""
        count = 1
        for values in self.values.values():
            count *= len(values)
        return list(product(*self.values.values())) if count <= MOST else []

    def varied(self, overrides: Sequence[str]) -> tuple[str, ...]:
        """Those of a point's overrides whose key is swept."""
        fixed = {values[0] for values in self.values.values() if len(values) == 1}
        return tuple(override for override in overrides if override not in fixed)

    def narrowed(self, kept: Sequence[Sequence[str]]) -> dict[str, str]:
        """For each swept key that has lost values: what to write instead of its override."""
        left: dict[str, str] = {}
        for key, values in self.values.items():
            used = [value for value in values if any(value in point for point in kept)]
            if len(values) > 1 and len(used) < len(values):
                left[key] = f"{key}=choice({','.join(value.partition('=')[2] for value in used)})"
        return left


def space(params: Mapping[str, Any], arguments: Sequence[str], loader: Any) -> Space:
    """The space of `hydra.sweeper.params` and of the command line, which goes before it."""
    texts = [f"{key}={value}" for key, value in params.items()]
    values: dict[str, Sequence[str]] = {}
    for override in OverridesParser.create(config_loader=loader).parse_overrides([*texts, *arguments]):
        key = override.get_key_element()
        values[key] = _values(override, key)
    return Space(values)


def _values(override: Override, key: str) -> list[str]:
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if override.is_discrete_sweep():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    interval: Any = override.value()
    return [f"{key}={interval.start}"]
