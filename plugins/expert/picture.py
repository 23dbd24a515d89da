"""The load of every expert of every layer as a heat map.

It is: one drawing, for a file of its own and for a sweep's page. It is not: the counting (`load.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def heat_map(loads: Mapping[str, Sequence[int]]) -> Any:
    """A matplotlib figure of layer -> tokens of each of its experts: a row a layer, each load over the row's mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widest = max(map(len, loads.values()))
    rows = [relative(load) + [float("nan")] * (widest - len(load)) for load in loads.values()]
    figure = Figure(figsize=(2 + 0.25 * widest, 1.5 + 0.3 * len(loads)), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    image = ax.imshow(rows, aspect="auto", cmap="coolwarm", vmin=0, vmax=2)
    ax.set_yticks(range(len(loads)), list(loads), fontsize=7)
    ax.set_xlabel("expert")
    figure.colorbar(image, label="load over the mean")
    return figure


def relative(load: Sequence[int]) -> list[float]:
    """Each load over their mean, 1 where all are even; zeros where there is none."""
    mean = sum(load) / len(load)
    return [each / mean if mean else 0.0 for each in load]
