"""The words a layout is written in: short keys, tokens such as `tp2`, and `key=value`.

It is: the reading of strings and mappings into {field name: value}, refusing unknown words and the same
field set twice. It is not: the meaning or the limits of the values (see `layout.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from parallax.strategies.names import nearest_name, unknown_name

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "cp": "context_parallel_size",
        "inner": "context_inner_size",
        "ep": "expert_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "dp": "data_parallel_size",
        "zero": "zero_stage",
        "z": "zero_stage",
        "mb": "num_microbatches",
        "m": "num_microbatches",
        "v": "stages_per_rank",
        "sp": "sequence_parallel",
    }
)
"""Short key -> field. The first of two short keys of a field is the one printed."""

OPTIONAL = (
    "data_parallel_size",
    "num_microbatches",
    "stages_per_rank",
    "sequence_parallel",
    "expert_tensor_parallel_size",
)
"""Fields that may be left open; "auto" or null leaves them so."""

GROUP_OF_FIELD: Mapping[str, str] = MappingProxyType(
    {
        "schedule": "parallax.schedules",
        "data_engine": "parallax.data_engines",
        "context_method": "parallax.attention",
    }
)
"""Field -> entry-point group of the names it takes."""

SHARDINGS = ("zigzag", "contiguous")
"""Values of `context_sharding`."""

RECOMPUTE = ("none", "full", "selective", "stage")
"""Values of `recompute`."""

TEXT_FIELDS = (*GROUP_OF_FIELD, "context_sharding", "recompute")
"""Fields whose value is a name; in a string the bare name is enough."""

BOOL_FIELDS = ("sequence_parallel",)
"""Fields that are on or off: `sp1` and `sp0` in a string, true and false in YAML."""

FIELDS = (*dict.fromkeys(SHORT.values()), *TEXT_FIELDS)
KEYS = (*SHORT, *FIELDS)

_SEPARATORS = re.compile(r"[\s,*×]+|(?<=\d)x(?=[A-Za-z])")  # `tp2xpp4` is cut, a name with an x in it is not
_SIZED = re.compile(r"([A-Za-z]+)(\d+)")
_SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def is_own_schedule(value: Any) -> bool:
    """Whether `value` says where a user's own schedule is (a .csv file, "module:function") instead of naming one."""
    return isinstance(value, str) and (value.endswith(".csv") or ":" in value)


def put(found: dict[str, Any], field: str, value: Any) -> None:
    """Record `field`; a second, different value is an error."""
    if field in found and found[field] != value:
        raise ValueError(f"{field} is set twice, to {found[field]!r} and to {value!r}; keep one of them")
    found[field] = value


def read_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Fields of a mapping whose keys are short or long names.

    Raises:
        ValueError: an unknown key (with the nearest one), or one field set to two values.
    """
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        field = SHORT.get(key, key)
        if field not in FIELDS:
            raise unknown_name("layout key", str(key), KEYS)
        if field in OPTIONAL and value in (None, "auto"):
            continue
        put(found, field, _SWITCH.get(str(value).lower(), value) if field in BOOL_FIELDS else value)
    return found


def read_text(text: str, words: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a string such as `tp2 pp4 zero1 mb8 gpipe` or `tp=2 schedule=gpipe`.

    Args:
        text: tokens in any order, separated by spaces, commas, `x` or `*`; "auto" alone sets nothing.
        words: bare words that are values: {"gpipe": "schedule", "deepspeed": "data_engine"}.

    Raises:
        ValueError: an unknown token (with the nearest one), or one field set to two values.
    """
    found: dict[str, Any] = {}
    tokens = [token for token in _SEPARATORS.split(text) if token not in ("", "x")]
    if tokens == ["auto"]:
        return found
    for token in tokens:
        for field, value in _read_token(token, words).items():
            put(found, field, value)
    return found


def _read_token(token: str, words: Mapping[str, str]) -> dict[str, Any]:
    sized = _SIZED.fullmatch(token)
    if sized and sized[1].lower() in SHORT:
        return read_mapping({sized[1].lower(): int(sized[2])})
    for word in (token, token.lower()):
        if word in words:
            return {words[word]: word}
    if token.endswith(".csv") and "=" not in token:
        return {"schedule": token}
    key, equals, value = token.partition("=")
    if equals:
        return read_mapping({key: int(value) if re.fullmatch(r"-?\d+", value) else value})
    if token.lower() in SHORT:
        example = f"{token.lower()}{1 if SHORT[token.lower()] in BOOL_FIELDS else 2}"
        raise ValueError(f"{token!r} in a layout needs a number right after it, e.g. '{example}'")
    raise _unknown_token(token, words, sized)


def _unknown_token(token: str, words: Mapping[str, str], sized: re.Match[str] | None) -> ValueError:
    shown = (*(f"{key}<n>" for key in SHORT), *words, "<key>=<value>")
    if sized and sized[1].lower() in words:  # `fsdp2`: a word without a number
        return unknown_name("layout token", token, shown, hint=sized[1].lower())
    if sized:  # `tt2`: look for the nearest key and keep the number
        near = nearest_name(sized[1], SHORT)
        return unknown_name("layout token", token, shown, hint=near and near + sized[2])
    return unknown_name("layout token", token, shown, hint=nearest_name(token, words))


def unique_words(names: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Bare word -> field, from field -> names. A word of several fields is the first one's."""
    return {word: field for field in reversed(list(names)) for word in names[field]}
