"""Every key of a configuration: its type, default, unit and meaning, read from the dataclass itself.

It is: the docstrings below the attributes of a dataclass, found in its source, and the walk over nested ones. It is
not: a second list of keys.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: with dots: "layout.zero_stage".
        type: as written in the dataclass: "int | None".
        default: as YAML would show it.
        unit: "" when it has none.
        meaning: one or a few sentences.
    """

    name: str
    type: str
    default: str
    unit: str
    meaning: str


def attribute_docs(cls: type) -> dict[str, str]:
    """The docstring below each annotated attribute of `cls`, on one line; "" where there is none."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else ""
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """The keys of dataclass `cls`, in order, those of nested dataclasses in their place."""
    docs, hints = attribute_docs(cls), get_type_hints(cls)
    for field in fields(cls):
        name = f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            yield from keys(hints[field.name], f"{name}.")
        else:
            yield _key(name, field, docs.get(field.name, ""))


def find(cls: type, name: str) -> Key | None:
    """The key called `name`, with dots; None when there is none."""
    return next((key for key in keys(cls) if key.name == name), None)


def names_beside(cls: type, name: str) -> list[str]:
    """What could stand in place of the last part of `name`, "layout.tensr": the names of its group."""
    group = name.rpartition(".")[0]
    for part in filter(None, group.split(".")):
        hint = get_type_hints(cls).get(part)
        if hint is None or not is_dataclass(hint):
            return []
        assert isinstance(hint, type)
        cls = hint
    return [field.name for field in fields(cls)]


def _key(name: str, field: Field[Any], doc: str) -> Key:
    unit = re.search(r"Unit: (.*?)\.(?:\s|$)", doc)
    meaning = re.sub(r"Unit: .*?\.(\s|$)", r"\1", doc)
    default = re.search(r"Default (.*)$", meaning)
    if default is not None and ":" not in default[1]:
        meaning = meaning[: default.start()]  # it says no more than the column of defaults
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    return Key(name, kind, _default(field), unit[1] if unit else "", " ".join(meaning.split()))


def _default(field: Field[Any]) -> str:
    make: Any = field.default_factory
    value: Any = field.default if make is MISSING else make()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
