"""Calls a function that `hydra.main` has made, with mistakes explained and errors left to whom they concern.

It is: the translation of Hydra's errors (a mistyped group, an unknown key) into one sentence with the nearest right
name. It is not: a replacement of `hydra.main`, whose decorated functions also work without this; then Hydra prints its
own messages, and under mpirun each rank prints them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from parallax.conf.reading import explain
from parallax.conf.schema import RunConf
from parallax.plugins.launch import same_on_every_rank
from parallax.strategies.layout import Layout
from parallax.strategies.names import nearest_name, unknown_name

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's own switch: with "1" errors leave `hydra.main` as they are, instead of a printed line and SystemExit, which
hides them from whatever ends a job when a rank has failed."""


def run_hydra(main: Callable[[], Any], schema: type = RunConf) -> None:
    """Call `main`, which `hydra.main` has decorated.

    Raises:
        ValueError: what Hydra or OmegaConf did not understand; the same on every rank.
    """
    with same_on_every_rank(), _full_errors():
        try:
            main()
        except (HydraException, OmegaConfBaseException) as error:
            raise explain_hydra(error, schema) from None


def explain_hydra(error: Exception, schema: type = RunConf) -> ValueError:
    """What `error` of Hydra means for someone who wrote a command line."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MissingConfigException):
            return _missing(seen)
        if isinstance(seen, OmegaConfBaseException):
            return explain(seen, schema)
        seen = seen.__cause__
    return ValueError(" ".join(str(error).split()))


def _missing(error: MissingConfigException) -> ValueError:
    """A group's option, or a whole group, that is not there."""
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    if group == "layout":
        try:
            Layout.parse(name)
        except ValueError as reason:
            files = ", ".join(error.options or [])
            return ValueError(f"layout={name} is neither a file ({files}) nor a layout in words: {reason}")
    if error.options:
        return unknown_name(f"option of group {group!r}", name, error.options)
    groups = sorted(path.name for path in Path(__file__).parent.iterdir() if any(path.glob("*.yaml")))
    near = nearest_name(group or name, groups)
    guess = f"; did you mean {near!r}?" if near else "."
    return ValueError(f"there is no configuration {error.missing_cfg_file!r}{guess} Groups: {', '.join(groups)}.")


@contextmanager
def _full_errors() -> Iterator[None]:
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before
