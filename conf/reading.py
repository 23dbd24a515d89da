"""A configuration, checked against the schema: structured, or refused with the nearest thing that is right.

It is: the way from OmegaConf (files, Hydra's command line, mappings) to a `RunConf`, and the wording of what is wrong.
It is not: composition, which is Hydra's or the caller's, nor the schema (`schema.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ReadonlyConfigError,
    ValidationError,
)

from parallax.conf.keys import find, keys, names_beside
from parallax.conf.schema import RunConf
from parallax.plugins.launch import same_on_every_rank
from parallax.strategies.layout import Layout
from parallax.strategies.names import unknown_name


def structured(cls: type = RunConf) -> DictConfig:
    """The schema `cls` as a config that holds every key at its default and refuses others."""
    config = OmegaConf.structured(cls)
    for _, node in config._content.items() if is_dataclass(cls) else ():
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, None)  # OmegaConf takes a frozen dataclass for a config that is never merged
    return config


def read(config: Any, *changes: str) -> RunConf:
    """The run that `config` describes, every value checked.

    Args:
        config: a path to YAML, a mapping, or a config, composed by Hydra or loaded by `OmegaConf.load`.
        changes: "trainer.max_steps=5", as on a command line; they go before `config`.

    Raises:
        ValueError: an unknown key, a value of the wrong type or out of range, or an interpolation that leads nowhere;
            with the nearest key, or what would do. The same on every rank.
    """
    with same_on_every_rank():
        try:
            return _read(config, changes)
        except OmegaConfBaseException as error:
            raise explain(error) from None


def _read(config: Any, changes: tuple[str, ...]) -> RunConf:
    if isinstance(config, str | Path):
        if not Path(config).is_file():
            raise ValueError(f"there is no configuration file {str(config)!r}")
        config = OmegaConf.load(config)
    asked = without_hydra(config)
    missing = sorted(OmegaConf.missing_keys(asked))
    if missing:  # a merge would keep the default instead
        raise ValueError(f"{missing[0]} must be given; {_about(missing[0], RunConf)}")
    merged = OmegaConf.merge(structured(), asked, OmegaConf.from_dotlist(list(changes)))
    assert isinstance(merged, DictConfig)
    OmegaConf.resolve(merged)
    made = OmegaConf.to_object(merged)
    assert isinstance(made, RunConf)
    made.layout = Layout.from_any(made.layout)  # names of schedules and engines too
    return made


def explain(error: Exception, schema: type = RunConf) -> ValueError:
    """What `error` of OmegaConf means for someone who wrote a configuration of `schema`."""
    name = str(getattr(error, "full_key", None) or "")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        valid = names_beside(schema, name)
        group, _, last = name.rpartition(".")
        where = f"key in {group!r}" if group else "key"
        return unknown_name(where, last, valid) if valid else ValueError(f"unknown key {name!r}: {_first(error)}")
    if isinstance(error, InterpolationResolutionError):
        return ValueError(f"{name}: an interpolation leads nowhere: {_first(error)}")
    if isinstance(error, ReadonlyConfigError):
        return ValueError(f"{name} cannot be changed: {_first(error)}")
    if isinstance(error, ValidationError):
        return ValueError(f"{name}: {_first(error)}; {_about(name, schema)}")
    return ValueError(f"{name}: {_first(error)}" if name else _first(error))


def without_hydra(config: Any) -> DictConfig:
    """A plain copy of `config`, without Hydra's own node and without a schema; interpolations stay."""
    plain = OmegaConf.to_container(config) if OmegaConf.is_config(config) else dict(config)
    assert isinstance(plain, dict)
    return OmegaConf.create({key: value for key, value in plain.items() if key != "hydra"})


def relative_paths(config: Any, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """(key, value) of every path in a `RunConf` that does not start at the root."""
    for key in keys(type(config)):
        value = config
        for part in key.name.split("."):
            value = getattr(value, part)
        if "Path" in key.type and value is not None and not Path(value).expanduser().is_absolute():
            yield key.name, Path(value)


def _first(error: Exception) -> str:
    """The message without the lines about OmegaConf's own types."""
    return str(error).split("\n    full_key", 1)[0].replace("\n", " ").strip()


def _about(name: str, schema: type) -> str:
    key = find(schema, name)
    if key is None:
        return f"keys: {', '.join(names_beside(schema, name))}"
    unit = f", in {key.unit}" if key.unit else ""
    return f"{key.type} is expected{unit} (default {key.default}): {key.meaning}"
