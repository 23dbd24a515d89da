"""The store that torch's rendezvous leads to: torchrun's, or one that rank 0 opens at the launcher's port.

It is: a store that every rank is known to share. It is not: MPI's meeting (`rendezvous.py`), nor the process group.

Where a process leaves one group and joins another, the port is the same, and rank 0 may still be closing the old store
while others look for the new one. They would join the old one, and lose it. So rank 0 answers everybody who comes, and
whoever sees a store close before it has been answered comes again.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined] # not in its __all__
from torch.distributed.rendezvous import rendezvous

BETWEEN_TRIES = 0.05
"""Seconds."""


def join_store(where: str, rank: int, size: int, timeout: timedelta) -> Store:
    """The store at `where`, an address that torch's rendezvous reads. Collective.

    Args:
        where: "env://" or "tcp://host:port", without rank and size.

    Raises:
        DistNetworkError, DistStoreError: the peers were not there within `timeout`.
    """
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store: Store = next(rendezvous(where, rank, size, timeout=timeout))[0]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return store  # the launcher's, which outlives us
        try:
            _answer(store, size) if rank == 0 else _ask(store, rank)
            return store
        except DistNetworkError:
            if rank == 0 or time.monotonic() > end:
                raise
            time.sleep(BETWEEN_TRIES)


def _ask(store: Store, rank: int) -> None:
    name = uuid4().hex
    store.set(f"parallax/here/{rank}", name)
    store.wait([f"parallax/heard/{name}"])


def _answer(store: Store, size: int) -> None:
    for rank in range(1, size):
        name = store.get(f"parallax/here/{rank}").decode()
        store.delete_key(f"parallax/here/{rank}")  # nobody is answered for an earlier visit
        store.set(f"parallax/heard/{name}", "")
