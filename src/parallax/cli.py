"""The command line: list plugins, explain a layout, or run a script with the strategies registered.

It is: one argparse parser and one function per subcommand. It is not: training; options of a training run
belong to the user's script and its configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from parallax.cli_config import add_config
from parallax.cli_results import add_results
from parallax.cli_run import run_module, run_script, use_layout
from parallax.cli_schedule import add_schedule
from parallax.cli_verify import add_verify
from parallax.plugins.launch.launch_command import main as launch
from parallax.plugins.launch.mpirun import main as mpirun
from parallax.plugins.registry import GROUPS, available
from parallax.plugins.topology.cli import add_topo
from parallax.strategies.layout import Layout
from parallax.strategies.names import nearest_name
from parallax.strategies.report import rank_table

EPILOG = """\
to run a script that uses strategy="parallax_4d" without importing parallax:
  python -m parallax train.py [arguments of train.py]
  python -m parallax -m package.train [arguments of package.train]
under mpirun, with the flags it needs here:
  python -m parallax run -n 8 train.py [arguments of train.py]
on several machines, with labelled output and an end when a rank fails:
  python -m parallax launch --hostfile hosts.txt train.py [arguments of train.py]
and with a layout for Trainer(strategy="parallax_4d"):
  python -m parallax --layout "tp2 zero1" train.py [arguments of train.py]
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `argv` (default: the process's arguments) and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser()
    layout, arguments = _take_layout(parser, arguments)
    first = arguments[0] if arguments else ""
    if layout is not None:
        if not first or first in commands or (first.startswith("-") and first != "-m"):
            parser.error("--layout is for a script or module: parallax --layout LAYOUT script.py ...")
        use_layout(layout)
    if first in ("run", "launch"):
        return mpirun(arguments[1:]) if first == "run" else launch(arguments[1:])
    if first == "-m":
        if len(arguments) < 2:
            parser.error("-m needs the name of a module to run")
        run_module(arguments[1], arguments[2:])
        return 0
    if first and not first.startswith("-") and first not in commands:
        if not os.path.exists(first):
            parser.error(_no_such(first, commands))
        run_script(first, arguments[1:])
        return 0
    options = parser.parse_args(arguments or ["--help"])
    try:
        return int(options.command(options))
    except ValueError as error:
        print(f"parallax {first}: {error}", file=sys.stderr)
        return 2


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser and the names of its subcommands."""
    parser = argparse.ArgumentParser(
        prog="parallax",
        usage="parallax [-h] [--version] COMMAND ... | [--layout L] {script.py,-m module} ...",
        description="Every form of parallelism for a plain LightningModule.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"parallax {version('lightning-parallax')}")
    commands = parser.add_subparsers(title="commands", metavar="", prog="parallax")

    plugins = commands.add_parser("plugins", help="list the installed plugins and whether they can be used")
    plugins.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plugins.set_defaults(command=show_plugins)

    commands.add_parser("run", help="start a script under mpirun: run -n 8 train.py ...", add_help=False)
    commands.add_parser(
        "launch", help="the same on several machines, watched: launch --hostfile F train.py", add_help=False
    )

    layout = commands.add_parser("layout", help="check a layout and show which rank sits where")
    layout.add_argument("layout", nargs="*", help='e.g. "tp2 pp2 zero1", or a YAML file')
    layout.add_argument("--world", type=int, metavar="N", help="number of ranks (default: the fewest that fit)")
    layout.set_defaults(command=show_layout)
    add_topo(commands)
    add_schedule(commands)
    add_verify(commands)
    add_config(commands)
    add_results(commands)
    return parser, list(commands.choices)


def _take_layout(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[str | None, list[str]]:
    """(the value of a leading --layout, the other arguments); what follows a script's name is the script's."""
    if not arguments or arguments[0].partition("=")[0] != "--layout":
        return None, arguments
    if "=" in arguments[0]:
        return arguments[0].partition("=")[2], arguments[1:]
    if len(arguments) < 2:
        parser.error('--layout needs a value, e.g. "tp2 pp2 zero1" or a YAML file')
    return arguments[1], arguments[2:]


def _no_such(name: str, commands: Sequence[str]) -> str:
    if name.endswith(".py") or os.sep in name:
        return f"there is no script {name!r} in {os.getcwd()}"
    near = nearest_name(name, commands)
    guess = f"did you mean {near!r}? " if near else ""
    return f"{name!r} is neither a command nor a file; {guess}Commands: {', '.join(commands)}"


def show_plugins(options: argparse.Namespace) -> int:
    """Print every plugin of every group. Status 1 when one of them cannot be used."""
    rows = [plugin for group in GROUPS for plugin in available(group)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        table = Table("group", "name", "distribution", "version", "target", "status")
        for row in rows:
            table.add_row(row.group, row.name, row.distribution, row.version, row.target, row.error or "ok")
        _console().print(table)
    return int(any(row.error for row in rows))


def show_layout(options: argparse.Namespace) -> int:
    """Print the layout with every size known, and its ranks."""
    asked = Layout.from_any(" ".join(options.layout))
    layout = asked.resolve(asked.ranks_needed if options.world is None else options.world)
    console = _console()
    for name, value in layout.to_dict().items():
        chosen = f" ({layout.resolved_data_engine})" if value == "auto" else ""
        console.print(f"{name}: {value}{chosen}", highlight=False)
    console.print(rank_table(layout))
    return 0


def _console() -> Console:
    """A console that cuts nothing off when the output is a file or a pipe."""
    return Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=240)
