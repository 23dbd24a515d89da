"""Lists of the module that a step appends to.

It is: what makes `self.validation_step_outputs.append(...)`, the way Lightning's documentation keeps outputs for the
end of an epoch, work under micro-batches and pipeline stages: every rank's lists grow by what the last stage
appended, once per batch. It is not: a copy of any other attribute; what a step assigns stays on the rank that ran it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from parallax.strategies.outputs import merge

Path = tuple[Any, ...]
"""Where a list sits: (attribute,), or (attribute, key or index) inside a dict or list."""

LIGHTNINGS_OWN = frozenset(vars(LightningModule()))


class Kept:
    """Watches the lists of `module` while a batch runs.

    Args:
        module: the user's LightningModule.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._before = {path: len(found) for path, found in self._lists()}
        self._lengths: dict[Path, int] = {}
        self._items: dict[Path, dict[int, list[Any]]] = {}

    def _lists(self) -> Iterator[tuple[Path, list[Any]]]:
        for name, value in vars(self._module).items():
            if name in LIGHTNINGS_OWN:
                continue
            if isinstance(value, list):
                yield (name,), value
            if isinstance(value, (list, dict)):
                yield from (((name, key), found) for key, found in _lists_in(value))

    def start(self) -> None:
        """A micro-batch begins."""
        self._lengths = {path: len(found) for path, found in self._lists()}

    def stop(self, microbatch: int, whole: Callable[[Any], Any]) -> None:
        """A micro-batch has run to the end of the user's step; `whole` makes its entries those of the whole model."""
        for path, found in self._lists():
            if len(found) > (length := self._lengths.get(path, 0)):
                self._items.setdefault(path, {})[microbatch] = whole(found[length:])

    def appended(self, weights: Tensor, rows: int) -> dict[Path, list[Any]]:
        """What the whole batch appends to each list: entry by entry one from all micro-batches, else all in order."""
        out: dict[Path, list[Any]] = {}
        for path, by_microbatch in self._items.items():
            parts = [by_microbatch[i] for i in sorted(by_microbatch)]
            if len({len(part) for part in parts}) == 1 and len(parts) == len(weights):
                out[path] = [merge(column, weights, rows) for column in zip(*parts, strict=True)]
            else:
                out[path] = [entry for part in parts for entry in part]
        return out

    def replay(self, appended: dict[Path, list[Any]]) -> None:
        """Let every list be what it was before the batch, and `appended` (the last stage's)."""
        for path, found in list(self._lists()):
            del found[self._before.get(path, 0) :]
        for (name, *key), entries in appended.items():
            target = getattr(self._module, name)
            if key:
                target = target.setdefault(key[0], []) if isinstance(target, dict) else target[key[0]]
            target.extend(entries)


def _lists_in(value: list[Any] | dict[Any, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """The lists in a container of lists (one per data loader, say); the first entry tells whether it is one."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    first = next(iter(entries), (None, None))[1]
    if isinstance(first, list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((key, found) for key, found in entries if isinstance(found, list))
