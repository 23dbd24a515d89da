"""Which plugins are installed: found by entry point, loaded by name, checked against their contract.

It is: discovery for the five groups in `GROUPS`. Parallax's own plugins are found in the same way as anyone
else's. It is not: a place where plugins register themselves; it keeps nothing between calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from parallax.plugins.base import ParallelPlugin
from parallax.plugins.data.base import DataEngine
from parallax.strategies.names import unknown_name

GROUPS: Mapping[str, str] = MappingProxyType(
    {
        "parallax.parallelism": "parallelism plugin",
        "parallax.schedules": "schedule",
        "parallax.attention": "attention",
        "parallax.data_engines": "data engine",
        "parallax.probes": "probe",
    }
)
"""Entry-point group -> what one of its plugins is called in messages."""


class PluginError(ValueError):
    """An installed plugin cannot be used: its import fails, its name is taken twice, or it breaks its contract.

    Attributes:
        reason: what is wrong, without the name of the plugin.
    """

    def __init__(self, entry: EntryPoint, reason: str) -> None:
        super().__init__(f"{GROUPS[entry.group]} {entry.name!r} of {_label(entry)} ({entry.value}) {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Plugin:
    """One row of the list of plugins.

    Attributes:
        group: entry-point group.
        name: entry-point name.
        distribution: name of the installed distribution that declares it.
        version: that distribution's version.
        target: "module:object" it points to.
        error: why it cannot be used; None when it can.
    """

    group: str
    name: str
    distribution: str
    version: str
    target: str
    error: str | None = None


def names(group: str) -> list[str]:
    """Names in `group`, sorted; nothing is imported.

    Raises:
        ValueError: no such group.
    """
    return sorted({entry.name for entry in _entries(group)})


def load(group: str, name: str) -> Any:
    """The class or function behind `name`.

    Raises:
        ValueError: no such group or name (with the nearest one).
        PluginError: two distributions declare the name, its import fails, or it does not fit the contract of its
            group. The message names the distributions.
    """
    entries = _entries(group)
    same = [entry for entry in entries if entry.name == name]
    if not same:
        if not entries:
            raise ValueError(f"no {GROUPS[group]} {name!r}: no installed distribution has an entry point in {group}")
        raise unknown_name(GROUPS[group], name, names(group))
    return _load(same[0], same)


def available(group: str) -> list[Plugin]:
    """All plugins of `group` by name, one for each distribution that declares it, each tried.

    One that cannot be used is listed with the reason instead of raised.

    Raises:
        ValueError: no such group.
    """
    rows = []
    entries = _entries(group)
    for entry in sorted(entries, key=lambda e: (e.name, _origin(e))):
        error: str | None = None
        try:
            _load(entry, [other for other in entries if other.name == entry.name])
        except PluginError as problem:
            error = problem.reason
        distribution, version = _origin(entry)
        rows.append(Plugin(group, entry.name, distribution, version, entry.value, error))
    return rows


def _entries(group: str) -> list[EntryPoint]:
    """Entry points of `group`. A distribution found twice (an editable install) counts once: the first on the path."""
    if group not in GROUPS:
        raise unknown_name("plugin group", group, GROUPS)
    return list(entry_points(group=group))


def _origin(entry: EntryPoint) -> tuple[str, str]:
    if entry.dist is None:
        return "unknown distribution", ""
    return entry.dist.name, entry.dist.version


def _label(entry: EntryPoint) -> str:
    return " ".join(part for part in _origin(entry) if part)


def _load(entry: EntryPoint, same: list[EntryPoint]) -> Any:
    """Import `entry`, the only one of its name (`same` holds all of that name), and check it."""
    others = [other for other in same if other is not entry]
    if others:
        owners = " and ".join(f"{_label(other)} ({other.value})" for other in others)
        raise PluginError(entry, f"is also declared by {owners}; uninstall one of them or rename its entry point")
    try:
        loaded = entry.load()
    except Exception as error:  # a plugin's import may fail in any way; all of them are its distribution's fault
        raise PluginError(entry, f"cannot be imported: {type(error).__name__}: {error}") from error
    problem = _contract_problem(entry, loaded)
    if problem:
        raise PluginError(entry, problem)
    return loaded


def _contract_problem(entry: EntryPoint, loaded: Any) -> str | None:
    """What is wrong with `loaded`, None when it fits its group."""
    if entry.group == "parallax.parallelism":
        return _class_problem(loaded, ParallelPlugin, ("name", "axis"), entry.name)
    if entry.group == "parallax.data_engines":
        return _class_problem(loaded, DataEngine, ("name", "zero_stages"), entry.name)
    return None if callable(loaded) else f"must be callable, but is of type {type(loaded).__name__}"


def _class_problem(loaded: Any, base: type, attributes: tuple[str, ...], name: str) -> str | None:
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        return f"must be a subclass of {base.__module__}.{base.__qualname__}"
    missing = [attribute for attribute in attributes if not hasattr(loaded, attribute)]
    if missing:
        return f"lacks the class attribute {' and '.join(missing)}"
    if inspect.isabstract(loaded):
        return f"does not define {', '.join(sorted(getattr(loaded, '__abstractmethods__', ())))}"
    found = getattr(loaded, "name", None)
    return None if found == name else f"has name = {found!r}, but its entry point is named {name!r}"
