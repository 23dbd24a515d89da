"""How many bytes each axis of a layout moves in one optimizer step.

It is: the textbook volumes, from the layout and, where known, the sizes of the model. It is not: a time (see
`cost.py`), and nothing is counted while training: the counted bytes are in the ledger of `strategies/comm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from parallax.strategies.layout import Layout

AXES = ("tp", "ep", "cp", "pp", "dp")
"""Axes that communicate, in the order in which they are placed. "dp" stands for the ranks that hold the same weights:
dp x cp, the mesh's "data"."""

MIB = 2**20

WEIGHTS: Mapping[str, float] = MappingProxyType({"tp": 4096.0, "ep": 256.0, "cp": 256.0, "pp": 16.0, "dp": 1.0})
"""MiB per step assumed of each axis when nothing is known of the model. Not a model: a ranking, in factors of 16, of
what cannot wait (tp sits between two matrix products of every layer) over what overlaps with computation (dp)."""


@dataclass(frozen=True)
class ModelShape:
    """What the volumes depend on. Lengths in elements, weights in parameters.

    Attributes:
        layers: transformer blocks of the whole model.
        hidden: size of the residual stream.
        sequence: tokens of one sample.
        parameters: parameters of the whole model.
        micro_batch: samples in one micro-batch.
        kv_hidden: key/value heads times head size; 0 means `hidden` (no grouped queries).
        moe_layers: blocks with experts.
        top_k: experts each token visits.
        element_bytes: bytes of an activation, a weight and a gradient on the wire.
        recompute: whether activations are computed again in backward, with their communication.
    """

    layers: int
    hidden: int
    sequence: int
    parameters: float
    micro_batch: int = 1
    kv_hidden: int = 0
    moe_layers: int = 0
    top_k: int = 1
    element_bytes: int = 2
    recompute: bool = False

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        """Read `"layers=32,hidden=4096,sequence=4096,parameters=7e9"`.

        Raises:
            ValueError: an unknown or missing name, or a value that is not a number.
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for token in text.replace(",", " ").split():
            name, _, value = token.partition("=")
            if name not in known:
                raise ValueError(f"a model has no {name!r}; it is described by {', '.join(known)}")
            try:
                values[name] = float(value)
            except ValueError:
                raise ValueError(f"{name}={value!r} is not a number") from None
        missing = [name for name in ("layers", "hidden", "sequence", "parameters") if name not in values]
        if missing:
            raise ValueError(f"the model's {', '.join(missing)} must be given too")
        kinds: dict[str, Any] = {"parameters": float, "recompute": bool}
        return cls(**{name: kinds.get(name, int)(value) for name, value in values.items()})


@dataclass(frozen=True)
class AxisTraffic:
    """What one axis moves in one step.

    Attributes:
        axis: one of `AXES`.
        pattern: who sends to whom: "reduce" (a ring through the group, in any order), "exchange" (all to all),
            "rotate" (each rank to the next, the last to the first) or "chain" (neighbours, both ways, no wrap).
        size: ranks in a group.
        edge_bytes: bytes over each directed edge of that pattern: ring edge, ordered pair, neighbours.
    """

    axis: str
    pattern: str
    size: int
    edge_bytes: float


PATTERNS: Mapping[str, str] = MappingProxyType(
    {"tp": "reduce", "ep": "exchange", "cp": "rotate", "pp": "chain", "dp": "reduce"}
)


def traffic_of(layout: Layout, model: ModelShape | None = None) -> tuple[AxisTraffic, ...]:
    """Traffic of every axis of a resolved `layout` with more than one rank, in the order of `AXES`.

    With a model (b samples of s tokens in a micro-batch, h hidden, m micro-batches, L/pp layers a rank):

    - tp: 4 all-reduces of b x s/cp x h per layer and micro-batch, 6 with recomputation (Shoeybi et al. 2019); the
      all-gather and reduce-scatter of sequence parallelism have the same volume (Korthikanti et al. 2022).
    - ep: 2 all-to-alls forward and 2 backward of b x s/cp x h x top_k per expert layer (Lepikhin et al. 2020), over
      tp/etp where experts fold over tp.
    - cp: cp-1 rotations of K and V forward, of K, V and their gradients backward (Liu et al. 2023), cut over tp.
    - pp: b x s/cp x h forward and as much backward per boundary and micro-batch (Narayanan et al. 2021).
    - dp: an all-reduce of the gradients held here; with ZeRO-3 two all-gathers of the weights and a reduce-scatter,
      1.5 times as much (Rajbhandari et al. 2020).

    A ring all-reduce moves 2(n-1)/n of its payload over each edge (Patarasuk & Yuan 2009), an all-to-all 1/n of it over
    each pair. Without a model the volumes are `WEIGHTS`.
    """
    sizes = {
        "tp": layout.tensor_parallel_size,
        "ep": layout.expert_parallel_size,
        "cp": layout.context_parallel_size,
        "pp": layout.pipeline_parallel_size,
        "dp": (layout.data_parallel_size or 1) * layout.context_parallel_size,
    }
    edges = _assumed(sizes) if model is None else _volumes(layout, model, sizes)
    return tuple(
        AxisTraffic(axis, PATTERNS[axis], sizes[axis], edges[axis]) for axis in AXES if sizes[axis] > 1 and edges[axis]
    )


def _assumed(sizes: Mapping[str, int]) -> dict[str, float]:
    def edge(axis: str) -> float:
        n, payload = sizes[axis], WEIGHTS[axis] * MIB
        return {"reduce": 2 * (n - 1) / n * payload, "exchange": payload / n}.get(PATTERNS[axis], payload)

    return {axis: edge(axis) for axis in AXES}


def _volumes(layout: Layout, model: ModelShape, sizes: Mapping[str, int]) -> dict[str, float]:
    tp, pp, cp, dp = (sizes[axis] for axis in ("tp", "pp", "cp", "dp"))
    passes = layout.num_microbatches or pp
    tokens = model.micro_batch * model.sequence / cp
    activation = tokens * model.hidden * model.element_bytes
    kv = 2 * tokens * (model.kv_hidden or model.hidden) / tp * model.element_bytes
    again = 1.5 if model.recompute else 1.0
    weights = model.parameters / (tp * pp) * model.element_bytes
    zero3 = 1.5 if layout.zero_stage == 3 else 1.0
    beside = layout.experts_cut_over / tp  # ranks of tp that hold other experts share the tokens
    return {
        "tp": 2 * (tp - 1) / tp * 4 * again * activation * model.layers / pp * passes,
        "ep": 4 * again * activation * model.top_k * model.moe_layers / pp * passes / sizes["ep"] * beside,
        "cp": (cp - 1) * (4 if model.recompute else 3) * kv * model.layers / pp * passes,
        "pp": activation * passes,
        "dp": 2 * (dp - 1) / dp * zero3 * weights,
    }
