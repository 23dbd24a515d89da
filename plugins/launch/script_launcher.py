"""Lightning's own launcher, with children started by the very command the user typed, and ended with a failed parent.

It is: the line of Lightning's `_SubprocessScriptLauncher` that makes a child's command, replaced. Lightning runs
`python <script>` again, which loses `-m parallax` and with it the registered strategies, and Python's own options.
And the half of the watch that Lightning leaves out: it ends the parent when a child fails, not the other way round. It
is not: a launcher of its own; environment and Hydra's run folders are Lightning's. Written against lightning 2.6.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.pytorch.strategies.launchers import subprocess_script

HYDRA_OVERRIDES = 3
"""What Lightning appends to the command of a script that Hydra runs: run.dir, job.name and output_subdir."""

FAREWELL = 5.0
"""Seconds the children of a failed process get to end by themselves: longer than they stay silent for its error."""


class ScriptLauncher(subprocess_script._SubprocessScriptLauncher):
    """Starts the processes of one node that no launcher has started."""

    def _call_children_scripts(self) -> None:
        with _own_commands():
            super()._call_children_scripts()
        atexit.register(self.end_children)

    def end_children(self) -> None:
        """After an uncaught exception here: children may wait for this process in a collective for ever."""
        if getattr(sys, "last_value", None) is None:
            return
        deadline = time.monotonic() + FAREWELL
        for process in self.procs:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def same_command() -> list[str]:
    """The command line of this process, with this Python."""
    return [sys.executable, *sys.orig_argv[1:]]


@contextmanager
def _own_commands() -> Iterator[None]:
    """Lightning offers no hook for the command: its two functions are replaced while it starts the children."""
    basic, hydra = subprocess_script._basic_subprocess_cmd, subprocess_script._hydra_subprocess_cmd

    def same_command_for_hydra(local_rank: int) -> tuple[Sequence[str], str]:
        command, folder = hydra(local_rank)
        return [*same_command(), *command[-HYDRA_OVERRIDES:]], folder

    subprocess_script._basic_subprocess_cmd = same_command
    subprocess_script._hydra_subprocess_cmd = same_command_for_hydra
    try:
        yield
    finally:
        subprocess_script._basic_subprocess_cmd = basic
        subprocess_script._hydra_subprocess_cmd = hydra
