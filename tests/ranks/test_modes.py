"""Communication under a mode of torch functions, which is for calls of the user's code."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from tests.procs import run_ranks


class _Refusing(TorchFunctionMode):
    """As strict as the routing of context parallelism, which takes `t[:n]` for a table when n fits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            raise AssertionError("a message was sliced where a mode sees it")
        return func(*args, **(kwargs or {}))


def _rank(rank: int, world: int) -> tuple[list[int], int]:
    mesh = Mesh.build(Layout(tensor_parallel_size=world).resolve(world), rank)
    with _Refusing():
        return mesh["tp"].gather_objects(rank), mesh["tp"].broadcast_object(rank + 5, src=1)


def test_messages_of_ours_are_no_calls_of_the_users_code() -> None:
    assert run_ranks(2, _rank) == [([0, 1], 6), ([0, 1], 6)]
