"""The contract between the strategy and whatever makes a model parallel along one axis.

It is: the abstract `ParallelPlugin`, the description of how a local tensor sits in the whole one
(`ParamShard`), and nothing else. It is not: discovery (see `registry.py`) or any axis's own code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh

if TYPE_CHECKING:
    from parallax.strategies.theory import Case, Expected


@dataclass(frozen=True)
class ParamShard:
    """How this rank's tensor of one parameter sits in the whole parameter.

    Used wherever local and whole meet: initial weights, pretrained weights, checkpoints, export, the
    gradient norm and tests.

    Attributes:
        shape: shape of the whole parameter, without padding.
        dim: the tensor dim that is cut; None when this rank holds everything.
        ranges: [start, stop) rows of `dim` held here, concatenated in this order (several for a fused
            projection, where each block is cut separately).
        pad: zero rows appended along `dim` after the ranges (vocabulary padding).
        axis: mesh axis the parameter is cut over, or replicated over when `dim` is None.
        owner: whether this rank counts the parameter in the gradient norm. Exactly one replica of every
            element does.
        inner: a further cut, over another axis, of what this one leaves (its `shape` is this `local_shape` without it);
            None for none.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    pad: int = 0
    axis: str = "tp"
    owner: bool = True
    inner: ParamShard | None = None

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.inner is not None:
            return self.inner.local_shape
        return self._outer_shape

    @property
    def _outer_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.ranges) + self.pad
        return tuple(shape)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole` (a new, contiguous tensor; works on the meta device)."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(f"expected the whole tensor of shape {self.shape}, got {tuple(whole.shape)}")
        if self.inner is not None:
            return self.inner.take(replace(self, inner=None).take(whole))
        if self.dim is None:
            return whole.clone()
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if self.pad:
            shape = list(self.shape)
            shape[self.dim] = self.pad
            parts.append(whole.new_zeros(shape))
        return torch.cat(parts, dim=self.dim).contiguous()

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Write this rank's part back into `whole` in place; padding is dropped."""
        if self.inner is not None:
            outer = replace(self, inner=None)
            between = outer.take(whole)
            self.inner.put(between, local)
            outer.put(whole, between)
            return
        if self.dim is None:
            whole.copy_(local)
            return
        at = 0
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, at, stop - start))
            at += stop - start

    def without_padding(self, local: Tensor) -> Tensor:
        """`local` without the padding (a copy then); anything of another shape as it is."""
        if not self.pad or self.dim is None or tuple(local.shape) != self.local_shape:
            return local
        return local.narrow(self.dim, 0, local.shape[self.dim] - self.pad).clone()

    def with_padding(self, saved: Tensor) -> Tensor:
        """The counterpart of `without_padding`: zeros where the padding was."""
        if not self.pad or self.dim is None or saved.dim() != len(self.shape):
            return saved
        zeros = saved.new_zeros(*saved.shape[: self.dim], self.pad, *saved.shape[self.dim + 1 :])
        whole = torch.cat([saved, zeros], self.dim)
        return whole if tuple(whole.shape) == self.local_shape else saved


class ParallelPlugin(ABC):
    """One form of model parallelism. A fresh instance serves one model; nothing is shared between instances.

    The strategy calls, in this order: `check`, `apply`, `finish`, then every step `shard_batch`, `begin`,
    `whole_output` and `finalize_grads`.
    `model` is always the user's LightningModule (or any `nn.Module`); parameter names (FQNs) are its own and
    must stay as they are.
    """

    name: ClassVar[str]
    """Name of the entry point, e.g. "tensor"."""
    axis: ClassVar[str]
    """Mesh axis it works along, e.g. "tp". The plugin is applied when that axis is longer than 1."""
    also: ClassVar[tuple[str, ...]] = ()
    """Further axes that call for it when longer than 1."""

    @abstractmethod
    def check(self, layout: Layout, model: nn.Module) -> None:
        """Refuse what cannot work, before anything is changed and without communication.

        Runs on every rank with the same arguments, so every rank raises the same error.

        Raises:
            ValueError: with the numbers and the change that fixes it.
        """

    @abstractmethod
    def apply(self, model: nn.Module, *, mesh: Mesh, layout: Layout) -> None:
        """Change `model` in place to this rank's part. Parameters may be on the meta device."""

    def finish(self, model: nn.Module) -> None:
        """After every plugin's `apply`: put in place what must go around modules in their final form."""

    def shard_batch(self, batch: Any, *, mesh: Mesh) -> Any:
        """This rank's part of a batch (identity unless the axis cuts the batch)."""
        return batch

    def begin(self, microbatch: int) -> None:
        """The user's step is called next, with the part of `microbatch`, the how-manieth `shard_batch` has made."""

    @property
    def completes_grads(self) -> bool:
        """Whether the plugin has something to do in `finalize_grads`."""
        return type(self).finalize_grads is not ParallelPlugin.finalize_grads

    def finalize_grads(self, model: nn.Module, *, mesh: Mesh) -> None:
        """Complete `param.grad` after the last backward and before the reduction over the data axis."""

    def whole_output(self, output: Any) -> Any:
        """What the user's step returned, with every tensor as it would be without the axis. Collective."""
        return output

    def restore(self, model: nn.Module) -> None:
        """Take back what `apply` has hooked into `model` and its libraries. Parameters stay as they are."""

    def param_shard(self, fqn: str) -> ParamShard | None:
        """How the local tensor of parameter `fqn` sits in the whole; None when the axis leaves it alone."""
        return None

    def averaged_over(self, fqn: str) -> str | None:
        """The mesh group whose ranks hold replicas of the local tensor of `fqn`, when that is not "data"."""
        return None

    def traffic(self, case: Case, out: Expected) -> None:
        """Add to `out` what this rank sends because of the plugin in one optimizer step, by closed formula.

        Called on a plugin that has changed nothing, with the whole model. `parallax verify --bytes` compares the sum of
        all plugins' with what was counted.

        Raises:
            NotImplementedError: there is no formula (for `case`); `--bytes` then fails and names the plugin.
        """
        raise NotImplementedError(f"plugin {self.name!r} states no formula of what it sends (ParallelPlugin.traffic)")

    def describe(self) -> dict[str, str]:
        """What this rank holds, shares and sends along the axis: short label -> text, for the layout table."""
        return {}
