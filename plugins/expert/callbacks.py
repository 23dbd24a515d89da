"""Lightning callbacks around the load of experts: what it is, and a balance without an auxiliary loss.

It is: `ExpertLoad`, which logs, and `ExpertBiasBalance`, which moves the routers' correction biases. It is not: the
counting (`load.py`). Both work at every layout, with whole experts on one rank as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from parallax.plugins.expert.load import LoadCounter
from parallax.plugins.expert.picture import heat_map

BIAS = "e_score_correction_bias"
"""Name of a router's buffer that is added to the scores by which experts are chosen, not to their weights."""


class _Counting(Callback):
    """Counts while training runs."""

    counter: LoadCounter | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self.counter = LoadCounter(pl_module, strategy.mesh, strategy.root_device, strategy.ep_plan)
        if not self.counter.layers:
            raise ValueError(
                f"{type(self).__name__} needs a model with experts, and {type(pl_module).__name__} has no `ep_plan` "
                f"that names any; give one to the model or the strategy, or leave the callback out"
            )

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.counter is not None:
            self.counter.close()
            self.counter = None


class ExpertLoad(_Counting):
    """Logs how evenly tokens spread over the experts of each layer.

    For each layer, named after the module that holds its experts: `expert_load/<layer>/imbalance`, the largest load
    over the mean one (1 is even, the number of experts the worst), `/idle`, the share of experts without a token,
    `/dropped`, the share of choices that were given to no expert, and `/bytes`, what its exchanges carried, mean over
    steps and summed over ranks. `expert_load/imbalance` is the worst layer's.

    Args:
        every: batches between two logs, each of which sums one small tensor over the ranks.
        heat_map: a picture file (.png, .svg, ...), written at the end: load of every expert of every layer over the
            mean. Needs matplotlib. In a sweep the page of results shows it anyhow.

    Attributes:
        loads: at each log, for each layer the tokens of its experts.
    """

    def __init__(self, every: int = 50, heat_map: str | Path | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 batch; got {every}")
        self._every, self._path = every, None if heat_map is None else Path(heat_map)
        self.loads: list[list[Tensor]] = []
        self._layers: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._every:
            return
        assert self.counter is not None
        load = self.counter.take()
        self._layers = self.counter.layers
        self.loads.append(load.tokens)
        exchanged = 4 if trainer.strategy.mesh.size("ep") > 1 else 0
        worst = []
        for at, (layer, tokens) in enumerate(zip(self.counter.layers, load.tokens, strict=True)):
            shares = tokens.double()
            worst.append(shares.max() / shares.mean().clamp(min=1e-9))
            values = {
                "imbalance": worst[-1],
                "idle": (tokens == 0).double().mean(),
                "dropped": load.nowhere[at] / (load.nowhere[at] + tokens.sum()).clamp(min=1),
                "bytes": load.bytes[at].double() * exchanged / self._every,
            }
            pl_module.log_dict({f"expert_load/{layer}/{name}": value for name, value in values.items()})
        pl_module.log("expert_load/imbalance", torch.stack(worst).max())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._path is not None and self.loads and trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            heat_map(self.totals()).savefig(self._path)

    def totals(self) -> dict[str, list[int]]:
        """Layer -> tokens of each of its experts, over all logs; empty before the first."""
        sums = [torch.stack(each).sum(0).tolist() for each in zip(*self.loads, strict=True)]
        return dict(zip(self._layers, sums, strict=True))


class ExpertBiasBalance(_Counting):
    """Balances experts without a loss: the bias of one chosen too often goes down by `rate`, the others' up.

    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2; Wang et al. 2024, "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts", algorithm 1: b_i += rate * sign(mean load - load_i), once for each
    optimizer step, with the load of the whole global batch, so that all ranks move alike.

    Args:
        rate: size of a move; the papers use 0.001.

    Raises:
        ValueError: at the start of training, for a layer whose router has no `e_score_correction_bias`.
    """

    def __init__(self, rate: float = 1e-3) -> None:
        if not rate > 0:
            raise ValueError(f"rate must be above 0; got {rate}")
        self._rate, self._step = rate, 0
        self._biases: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        assert self.counter is not None
        self._step = trainer.global_step
        self._biases = {layer: _bias(pl_module, layer) for layer in self.counter.here}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        assert self.counter is not None
        loads = dict(zip(self.counter.layers, self.counter.take().tokens, strict=True))
        for layer, bias in self._biases.items():
            load = loads[layer].double()
            bias.add_((self._rate * torch.sign(load.mean() - load)).to(bias.dtype))


def _bias(model: Any, layer: str) -> Tensor:
    block = model.get_submodule(layer.rpartition(".")[0])
    found = [buffer for name, buffer in block.named_buffers() if name.rpartition(".")[2] == BIAS]
    if len(found) != 1:
        raise ValueError(
            f"ExpertBiasBalance moves the buffer {BIAS!r} of a router, as DeepSeek-V3 has it; the block of {layer!r} "
            f"has {len(found)} of them. Balance this model by its auxiliary loss (output_router_logits=True)"
        )
    return found[0]
