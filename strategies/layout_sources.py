"""What a layout is made of: a string, a YAML file, a mapping, an OmegaConf config or another layout.

It is: any of these read into {field name: value}, with the names that plugins add through entry points. It is not: the
words and keys themselves (`layout_words.py`) or what the values may be (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from parallax.strategies.layout_words import (
    GROUP_OF_FIELD,
    RECOMPUTE,
    SHARDINGS,
    TEXT_FIELDS,
    read_mapping,
    read_text,
    unique_words,
)


def names_of(field: str) -> list[str]:
    """The names a text field takes."""
    from parallax.plugins import registry  # plugins are written against layouts: imported when names are looked up

    if field == "context_sharding":
        return list(SHARDINGS)
    if field == "recompute":
        return list(RECOMPUTE)
    names = registry.names(GROUP_OF_FIELD[field])
    return names if field == "schedule" else ["auto", *names]


def words() -> dict[str, str]:
    """Bare word of a string -> the text field it sets."""
    defaults = ("auto", "none")
    return unique_words({field: [name for name in names_of(field) if name not in defaults] for field in TEXT_FIELDS})


def read_source(source: Any, layout: type) -> dict[str, Any]:
    """Fields that `source` sets.

    Args:
        source: None, a string, a path to .yaml or .yml, a mapping, an OmegaConf config, or an instance of `layout`.
        layout: the dataclass of layouts. What an instance or a structured config of it leaves at its default counts as
            not set: both carry every field, chosen or not.

    Raises:
        ValueError: an unknown word or key, no such file, or a `source` of another type.
    """
    if source is None:
        return {}
    if isinstance(source, layout):
        return _without_defaults(asdict(source), layout)  # type: ignore[call-overload]
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith((".yaml", ".yml"))):
        return _read_yaml(Path(source), layout)
    if isinstance(source, str):
        return read_text(source, words())
    if isinstance(source, DictConfig):
        return _read_config(source, layout)
    if isinstance(source, Mapping):
        return read_mapping(source)
    raise ValueError(
        "a layout is made of a string such as 'tp2 pp2', a path to YAML, a mapping or a Layout; "
        f"got {type(source).__name__}"
    )


def _read_yaml(path: Path, layout: type) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no layout file {str(path)!r}")
    try:
        config = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"layout file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"layout file {str(path)!r} must hold `key: value` lines, e.g. `tp: 2`")
    return _read_config(config, layout)


def _read_config(config: DictConfig, layout: type) -> dict[str, Any]:
    structured = OmegaConf.get_type(config) is layout
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"the layout configuration is incomplete: {error}") from error
    assert isinstance(values, dict)
    found = read_mapping(values)
    return _without_defaults(found, layout) if structured else found


def _without_defaults(found: Mapping[str, Any], layout: type) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(layout)}
    return {name: value for name, value in found.items() if value != defaults[name]}
