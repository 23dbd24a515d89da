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
            mean. Needs matplotlib.

    Attributes:
        loads: at each log, for each layer the tokens of its experts.
    """

    def __init__(self, every: int = 50, heat_map: str | Path | None = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 batch; got {every}")
        self._every, self._path = every, None if heat_map is None else Path(heat_map)
        self.loads: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._every:
            return
        assert self.counter is not None
        load = self.counter.take()
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
        if self._path is not None and self.loads and trainer.is_global_zero and self.counter is not None:
            _draw(self.counter.layers, self.loads, self._path)


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


def _draw(layers: list[str], loads: list[list[Tensor]], path: Path) -> None:
    from matplotlib.figure import Figure

    totals = [torch.stack(each).double().sum(0) for each in zip(*loads, strict=True)]
    widest = max(len(t) for t in totals)
    rows = torch.full((len(totals), widest), float("nan"), dtype=torch.float64)
    for row, total in zip(rows, totals, strict=True):
        row[: len(total)] = total / total.mean().clamp(min=1)
    figure = Figure(figsize=(2 + 0.25 * widest, 1.5 + 0.3 * len(layers)), layout="constrained")
    ax = figure.subplots()
    image = ax.imshow(rows.numpy(), aspect="auto", cmap="coolwarm", vmin=0, vmax=2)
    ax.set_yticks(range(len(layers)), layers, fontsize=7)
    ax.set_xlabel("expert")
    figure.colorbar(image, label="load over the mean")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
