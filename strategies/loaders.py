"""Data loaders that end at the same batch on every rank.

It is: a check of lengths before the first batch, and, for loaders without a length, an agreement at every batch.
It is not: sampling, which stays Lightning's and the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import sized_len

from parallax.plugins.launch import mark_shared
from parallax.strategies.mesh import Mesh
from parallax.strategies.names import name_ranks


def process_loader(loader: Any, mesh: Mesh, among: str = "control") -> Any:
    """`loader`, made safe. Collective.

    Args:
        among: the group whose ranks need as many batches as each other: all ranks, or those of one "model" copy.

    Raises:
        ValueError: on every rank, when ranks have loaders of different lengths: the longer ones would wait for ever.
    """
    lengths = mesh[among].gather_objects(sized_len(loader))
    if all(length == lengths[0] for length in lengths):
        return loader if lengths[0] is not None or mesh.world_size == 1 else TogetherLoader(loader, mesh)
    raise mark_shared(_different_lengths(lengths))


def _different_lengths(lengths: list[int | None]) -> ValueError:
    by_length: dict[int | None, list[int]] = {}
    for rank, length in enumerate(lengths):
        by_length.setdefault(length, []).append(rank)
    each = "; ".join(
        f"{'no length' if length is None else f'{length} batches'} on {name_ranks(ranks)}"
        for length, ranks in by_length.items()
    )
    return ValueError(
        f"the data loaders differ in length between ranks: {each}. Give every data rank the same number of batches "
        f"(drop_last=True, or pad the shards); ranks of one data index must read the same samples"
    )


class TogetherLoader:
    """A loader of unknown length whose ranks agree, before every batch, that all of them have one."""

    def __init__(self, loader: Any, mesh: Mesh) -> None:
        self._loader, self._mesh = loader, mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        missing = object()
        batches = iter(self._loader)
        count = 0
        while True:
            batch = next(batches, missing)
            have = self._mesh["control"].gather_objects(batch is not missing)
            if not any(have):
                return
            if not all(have):
                ended = [rank for rank, has in enumerate(have) if not has]
                raise mark_shared(
                    ValueError(
                        f"the data loader of {name_ranks(ended)} ended after {count} batches while others have more; "
                        f"give every data rank the same number of batches, or set limit_train_batches "
                        f"(limit_val_batches, ...) to at most {count}"
                    )
                )
            count += 1
            yield batch
