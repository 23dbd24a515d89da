"""Making an ordinary module again of one that DeepSpeed has taken over.

It is: the removal of what DeepSpeed added to modules and parameters. It is not: a gathering of weights
(the caller brings them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LATE = {"applied_pre_backward_ref_cnt", "ds_grads_remaining", "ds_recompute_parameters"}
"""Attributes DeepSpeed adds to modules while they run, not when it is set up."""


class Restore:
    """Remembers the attributes of the modules and parameters under `root` from before DeepSpeed's set-up.

    Call `mark` right after the set-up: what users and Lightning add to their modules later is theirs.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before: dict[Any, set[str]] = {o: set(vars(o)) for o in self._owners()}
        self._added: dict[Any, set[str]] = {}

    def _owners(self) -> list[Any]:
        return [*self._root.modules(), *self._root.parameters()]

    def mark(self) -> None:
        """DeepSpeed's set-up is done."""
        self._added = {owner: set(vars(owner)) - known | LATE for owner, known in self._before.items()}

    def run(self, weight: Callable[[nn.Parameter], Tensor]) -> None:
        """Give every parameter its whole `weight(param)`, on storage of its own, and take the additions away.

        ZeRO-3 notices the use of a parameter by a special dict of parameters in each module; it becomes a plain one.
        """
        for param in self._root.parameters():
            param.data = weight(param)
        for module in self._root.modules():
            module._parameters = dict(module._parameters.items())
        for owner, names in self._added.items():
            for name in names & vars(owner).keys():
                delattr(owner, name)
