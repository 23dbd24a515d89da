"""Where ZeRO keeps this rank's share of gradients, masters and weights, under one name for all stages.

It is: the reading of DeepSpeed's bookkeeping (stages 1, 2 in one class, stage 3 in another) that norm, clipping,
tests and saving need. It is not: a change of anything in DeepSpeed (see `deepspeed_shims.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallax.strategies.comm import AxisComm


class Shards(ABC):
    """This rank's share of what `optimizer` (DeepSpeed's) holds.

    `comm_of` gives the axis a parameter is shared over: the data axis, "edp" for experts.
    """

    def __init__(self, optimizer: Any, comm_of: Callable[[nn.Parameter], AxisComm]) -> None:
        self.optimizer = optimizer
        self.comm_of = comm_of

    @abstractmethod
    def members(self) -> list[tuple[int, list[nn.Parameter]]]:
        """Key in `averaged_gradients` -> parameters its list of gradients begins with, in order."""

    @property
    @abstractmethod
    def masters(self) -> list[Tensor]:
        """Flat tensors the user's optimizer works on."""

    @abstractmethod
    def offset(self, key: int, param: nn.Parameter) -> int:
        """Where in the flattened parameter this rank's share begins."""

    @abstractmethod
    def length(self, key: int, param: nn.Parameter) -> int:
        """Elements of the parameter's share in the master `key`, padding included, if nothing cuts them off."""

    def place(self, key: int, param: nn.Parameter) -> tuple[int, int]:
        """(start, length) of this rank's share of `param` in the flat master `key`."""
        at, end = 0, self.masters[key].numel()
        for other in dict(self.members())[key]:
            length = min(self.length(key, other), end - at)
            if other is param:
                return at, length
            at += length
        raise ValueError("the parameter is not in this master")

    @abstractmethod
    def publish_masters(self) -> None:
        """Make the weights of every data rank equal to the masters. Collective over the data axis."""

    @abstractmethod
    def full_param(self, param: nn.Parameter) -> Tensor:
        """The whole weight, a new tensor. Collective over the data axis."""

    @abstractmethod
    def stored(self, param: nn.Parameter) -> Tensor:
        """What this rank keeps of a weight between steps."""

    @contextmanager
    def optimizer_params(self) -> Iterator[None]:
        """Inside, the user's optimizer lists the masters in its groups."""
        yield

    def refresh_masters(self) -> None:
        """Take the masters from the weights."""
        self.optimizer.refresh_fp32_params()

    def grads(self, wanted: set[nn.Parameter] | None = None) -> list[Tensor]:
        """This rank's shares of the reduced gradients (of `wanted` only), in the dtype of the masters."""
        out = []
        for key, params in self.members():
            shares = self.optimizer.averaged_gradients[key]
            dtype = self.masters[0].dtype
            if shares and shares[0].dtype != dtype:  # widened once, in place of what DeepSpeed would widen later
                shares = self.optimizer.averaged_gradients[key] = [share.to(dtype) for share in shares]
            out += [s for s, p in zip(shares, params, strict=False) if wanted is None or p in wanted]
        return out

    def full_grad(self, param: nn.Parameter, shape: torch.Size) -> Tensor:
        """The whole reduced gradient of `param`, of `shape`, a new tensor. Collective over the data axis."""
        whole = torch.zeros(shape, dtype=self.masters[0].dtype, device=param.device)
        for key, params in self.members():
            for share, p in zip(self.optimizer.averaged_gradients[key], params, strict=False):
                if p is param:
                    start = self.offset(key, param)
                    flat = share.reshape(-1)[: max(whole.numel() - start, 0)]  # the last share of ZeRO-3 is padded
                    whole.view(-1)[start : start + flat.numel()] += flat
        self.comm_of(param).all_reduce(whole)
        return whole

    def full_state(self, param: nn.Parameter, shape: torch.Size) -> dict[str, Tensor]:
        """The optimizer's states of `param`, of `shape`, new tensors. Collective over its axis."""
        out: dict[str, Tensor] = {}
        with self.optimizer_params():
            states = [(key, m, self.optimizer.optimizer.state.get(m, {})) for key, m in enumerate(self.masters)]
            everything = ((n, t, m) for _, m, state in states for n, t in state.items())
            shaped = {n: t for n, t, m in everything if isinstance(t, Tensor) and t.shape == m.shape}
            for name in sorted(shaped):  # the same names everywhere, also where this rank has no share of the parameter
                out[name] = torch.zeros(shape, dtype=shaped[name].dtype, device=param.device)
                for (key, params), (_, _, state) in zip(self.members(), states, strict=True):
                    if name in state and any(p is param for p in params):
                        self._fill(out[name], state[name].view(-1), key, param)
                self.comm_of(param).all_reduce(out[name])
        return out

    def _fill(self, whole: Tensor, flat: Tensor, key: int, param: nn.Parameter) -> None:
        at, length = self.place(key, param)
        start = self.offset(key, param)
        length = min(length, max(whole.numel() - start, 0))  # the last share of ZeRO-3 is padded
        whole.view(-1)[start : start + length] = flat[at : at + length]


class PartitionedStates(Shards):
    """ZeRO-1 and ZeRO-2: weights whole, one flat partition per parameter group."""

    def members(self) -> list[tuple[int, list[nn.Parameter]]]:
        return list(enumerate(self.optimizer.params_in_partition))

    @property
    def masters(self) -> list[Tensor]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def offset(self, key: int, param: nn.Parameter) -> int:
        zero = self.optimizer
        return int(zero.grad_start_offset[key][self.comm_of(param).index][zero.get_param_id(param)])

    def length(self, key: int, param: nn.Parameter) -> int:
        return param.numel() - self.offset(key, param)

    def publish_masters(self) -> None:
        self.optimizer.update_lp_params()

    def full_param(self, param: nn.Parameter) -> Tensor:
        return param.detach().clone()

    def stored(self, param: nn.Parameter) -> Tensor:
        return param


class PartitionedWeights(Shards):
    """ZeRO-3: every parameter cut into one equal share per data rank, the last one padded."""

    def members(self) -> list[tuple[int, list[nn.Parameter]]]:
        return list(enumerate(self.optimizer.fp16_groups))

    @property
    def masters(self) -> list[Tensor]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def offset(self, key: int, param: Any) -> int:
        return int(self.comm_of(param).index * param.partition_numel())

    def length(self, key: int, param: Any) -> int:
        return int(param.partition_numel())

    @contextmanager
    def optimizer_params(self) -> Iterator[None]:
        self.optimizer._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()

    def publish_masters(self) -> None:
        for group, _ in self.members():
            self.optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self.regather()

    def refresh_masters(self) -> None:
        super().refresh_masters()
        self.regather()

    def regather(self) -> None:
        """Parameters small enough to stay whole are whole copies of shares that have changed."""
        self.optimizer._partition_all_parameters()
        small = self.optimizer.persistent_parameters
        if small:
            small[0].all_gather(small)

    def full_param(self, param: Any) -> Tensor:
        flat = self.comm_of(param).all_gather(param.ds_tensor.detach().reshape(-1).clone())
        if flat.numel() > param.ds_numel:
            flat = flat[: param.ds_numel].clone()  # without the padding of the last share
        return flat.view(param.ds_shape)

    def stored(self, param: Any) -> Tensor:
        share: Tensor = param.ds_tensor
        return share
