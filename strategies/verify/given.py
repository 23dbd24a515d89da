"""Ranks as whoever started the processes has numbered them.

It is: a Lightning cluster environment for processes that are there already, with their process group. It is not: a
launcher or a guess.
"""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment


class Given(ClusterEnvironment):
    """Ranks numbered by whoever started the processes; the process group exists already."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._world

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0
