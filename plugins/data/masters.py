"""fp32 copies of narrow parameters, which the optimizer works on (Micikevicius et al. 2018, section 3.1).

It is: the exchange of parameters for masters inside `optimizer.param_groups`, in place, so that the group
dicts and the optimizer object stay the ones learning-rate schedulers know. It is not: a loss scale, and it
leaves fp32 and fp64 parameters as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallax.plugins.data.base import WIDE
from parallax.plugins.data.state import cloned


class MasterWeights:
    """Masters of every trainable parameter of `optimizer` that is narrower than fp32.

    Attributes:
        pairs: parameter of the model -> its fp32 master.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.pairs: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            group["params"] = [self._exchange(p, optimizer) for p in group["params"]]

    def _exchange(self, param: nn.Parameter, optimizer: Optimizer) -> nn.Parameter:
        if not param.requires_grad or param.dtype in WIDE:
            return param
        master = nn.Parameter(param.detach().float())
        self.pairs[param] = master
        if param in optimizer.state:  # some optimizers make their state when they are created
            optimizer.state[master] = _widened(optimizer.state.pop(param))
        return master

    def take_grads(self) -> list[Tensor]:
        """Give every master its parameter's gradient (None stays None); the fp32 gradients made."""
        for param, master in self.pairs.items():
            master.grad = None if param.grad is None else param.grad.float()
        return [m.grad for m in self.pairs.values() if m.grad is not None]

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model's parameters and drop their gradients."""
        for param, master in self.pairs.items():
            param.copy_(master)
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the masters from the model's parameters."""
        for param, master in self.pairs.items():
            master.copy_(param)

    def saved(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Copies of the optimizer's state dict and of the masters by name, and the names in the optimizer's order."""
        fqns = {self.pairs.get(param, param): fqn for fqn, param in trained.items()}
        names = [fqns.get(p, "") for group in optimizer.param_groups for p in group["params"]]
        masters = {fqns[master]: master for master in self.pairs.values()}
        return dict(cloned({"optimizer": optimizer.state_dict(), "masters": masters, "names": names}))

    @torch.no_grad()
    def load(self, optimizer: Optimizer, trained: Mapping[str, nn.Parameter], state: dict[str, Any]) -> None:
        """Take back what `saved` gave, and round the masters into the model's parameters."""
        optimizer.load_state_dict(state["optimizer"])
        for fqn, param in trained.items():
            if param in self.pairs:
                self.pairs[param].copy_(state["masters"][fqn])
        self.write_back()


def _widened(state: Any) -> Any:
    return {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in state.items()}
