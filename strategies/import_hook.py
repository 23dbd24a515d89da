"""Follow imports, for the length of a `with` block or until one module has been imported.

It is: ways to run a function when a given module has been imported, and to keep recording modes away from the
bodies of modules that are imported meanwhile (a constant at module level must not land on the meta device and stay
there). It is not: anything about which modules matter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch


@contextmanager
def on_import(actions: Mapping[str, Callable[[ModuleType], None]]) -> Iterator[None]:
    """Call `actions[name](module)` at once for modules already imported, and right after import for the others."""
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
    finder = _Finder(actions)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` once: now if module `name` has been imported, else right after it will be."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Once(name, action))


class _Once(MetaPathFinder):
    """Answers for one module, once, and looks at no other import."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        found = _Finder({fullname: self._action}, after=self).find_spec(fullname, path, target)
        sys.meta_path.remove(self)
        return found


class _Finder(MetaPathFinder):
    def __init__(
        self, actions: Mapping[str, Callable[[ModuleType], None]], after: MetaPathFinder | None = None
    ) -> None:
        self._actions = actions
        self._after = after or self

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        for finder in sys.meta_path[sys.meta_path.index(self._after) + 1 :]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._actions.get(fullname))
                return spec
        return None


class _Loader(Loader):
    """Runs the real loader with modes off, puts it back in the module, then calls the action."""

    def __init__(self, real: Loader, action: Callable[[ModuleType], None] | None) -> None:
        self._real = real
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self._real.exec_module(module)
        if self._action is not None:
            self._action(module)
