"""Running a user's script with the strategies registered, as `python` itself would run it.

It is: what `python -m parallax train.py ...` and `python -m parallax -m package.train ...` do. It is not: a
launcher; it starts no process.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from parallax.plugins.launch.errors import leave_together


def use_layout(layout: str) -> None:
    """Give `Trainer(strategy="parallax_4d")` this layout: a string or the path of a YAML file.

    A layout that is impossible is refused where the script makes its Trainer, on all ranks at once.
    """
    from parallax import register_strategies

    register_strategies(layout=layout)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run module `name` as `python -m name arguments...` does."""
    sys.argv = [name, *arguments]  # runpy puts the file's path in place of the name
    _replace_first_path(os.getcwd())
    with leave_together():
        runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run the file (or folder or zip file with a `__main__.py`) at `path` as `python path arguments...` does.

    The script sees its own `sys.argv`, `sys.path[0]`, `__file__` and `sys.modules["__main__"]`, the last one until
    the process ends: pickling and exit handlers work as usual.
    """
    sys.argv = [path, *arguments]
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        _replace_first_path(None)
        with leave_together():
            runpy.run_path(os.path.abspath(path), run_name="__main__")  # puts it on sys.path, and in argv[0], itself
        return
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    module = ModuleType("__main__")
    file = os.path.abspath(path)
    # What `python path` leaves in the namespace; runpy would change argv[0] and drop the module at its end.
    module.__dict__.update(__file__=file, __builtins__=builtins, __annotations__={}, __cached__=None)
    module.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = module
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)  # not this file's __future__ imports
    with leave_together():
        exec(code, module.__dict__)


def _replace_first_path(folder: str | None) -> None:
    """Put `folder` where Python put the folder of the command that started it, or only remove that one."""
    if sys.flags.safe_path:
        return  # python -P adds no folder, and neither does this
    sys.path[:1] = [] if folder is None else [folder]
