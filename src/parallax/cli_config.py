"""`python -m parallax config`: every key of a configuration, with its meaning, unit and default.

It is: a listing made from the dataclasses and the docstrings below their attributes. It is not: the schema
(`parallax/conf/schema.py`) or a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from textwrap import wrap
from typing import Any

from parallax.conf.keys import Key, keys
from parallax.conf.reading import read
from parallax.conf.schema import RunConf
from parallax.strategies.names import unknown_name

WIDTH = 110


def add_config(commands: Any) -> None:
    """Add the subcommand to argparse's `commands`."""
    parser = commands.add_parser(
        "config",
        help="list every key of a configuration, or check a YAML file: config layout, config run.yaml",
        add_help=False,
    )
    parser.add_argument("what", nargs="?", default="", metavar="GROUP | FILE.yaml", help="e.g. layout, hydra.launcher")
    parser.add_argument("-h", "--help", action="store_true", help="list every key")
    parser.set_defaults(command=show_config)


def show_config(options: argparse.Namespace) -> int:
    """Print the keys of a group, or of all; or check a file."""
    if options.what.endswith((".yaml", ".yml")):
        read(options.what)
        print(f"{options.what}: every key is known and every value is possible")
        return 0
    known = list(all_keys())
    wanted = [key for key in known if not options.what or key.name == options.what or _inside(key, options.what)]
    if not wanted:
        groups = {key.name.rpartition(".")[0] for key in known} - {""}
        raise unknown_name("group of keys", options.what, sorted(groups))
    if options.help:
        print("usage: parallax config [GROUP | FILE.yaml]: list the keys (of a group), or check a file\n")
    print(listing(wanted))
    return 0


def all_keys() -> Iterator[Key]:
    """The keys of a run, then those of the sweep's launcher where Hydra is installed."""
    yield from keys(RunConf)
    if find_spec("hydra") is not None:
        from hydra_plugins.hydra_parallax.launcher import ParallaxLauncherConf

        yield from (key for key in keys(ParallaxLauncherConf, "hydra.launcher.") if not key.name.endswith("._target_"))


def listing(found: Sequence[Key]) -> str:
    """Each key with type, default and unit on one line, its meaning below."""
    lines = []
    for key in found:
        unit = f" ({key.unit})" if key.unit else ""
        lines.append(f"{key.name}: {key.type} = {key.default}{unit}")
        lines += wrap(key.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _inside(key: Key, group: str) -> bool:
    return key.name.startswith(f"{group}.")
