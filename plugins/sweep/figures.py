"""Pictures of a sweep: bars with their spread, a heat map over two axes, memory against time, load of experts.

It is: drawings of the same runs, one panel for each series. It is not: the reading of records (`results.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from parallax.plugins.expert.picture import heat_map as expert_heat_map
from parallax.plugins.sweep.results import Run, axes_of
from parallax.strategies.names import unknown_name

BLUE, GREY, ORANGE, RED = "#3b6ea8", "#c8ccd0", "#d9822b", "#a33333"
PANEL = 5.2
"""Width of a panel in inches."""
NAME_SIZE = 7
"""Of the names beside points."""
ROWS = 40
"""Most bars in a panel: the fastest."""


def bars(runs: Sequence[Run]) -> Any:
    """Step time of every layout, fastest first, with its quartiles; failed ones are named below."""
    panels = _panels(runs)
    rows = max(min(ROWS, len(ran)) + 0.8 * bool(failed) for _, ran, failed in panels)
    figure, axes = _figure(len(panels), height=1.4 + 0.3 * max(rows, 3))
    for ax, (title, ran, failed) in zip(axes, panels, strict=True):
        ran = sorted(ran, key=lambda run: run.value("step_time_s"))[:ROWS]
        for y, run in enumerate(ran):
            low, high = run.record["step_time_spread_s"]
            middle = run.value("step_time_s")
            ax.barh(y, middle, color=BLUE if y else ORANGE, height=0.7)
            ax.errorbar(middle, y, xerr=[[middle - low], [high - middle]], color="black", lw=1, capsize=3)
            ax.text(max(middle, high), y, f"  {middle:.3g} s", va="center", fontsize=8)
        ax.set_yticks(range(len(ran)), [run.layout for run in ran])
        ax.set_ylim(max(rows, 3) - 0.4, -0.6)
        ax.set_xlim(0, 1.18 * max((max(run.record["step_time_spread_s"][1], run.value("step_time_s")) for run in ran),
                                  default=1.0))  # fmt: skip
        if failed:
            told = ", ".join(f"{run.layout} ({run.record['status']})" for run in failed[:4])
            more = f" and {len(failed) - 4} more" if len(failed) > 4 else ""
            ax.text(0.0, len(ran) + 0.1, f"failed: {told}{more}", fontsize=8, color=RED, va="center")
        _finish(ax, title, "seconds a step: median, quartiles as whiskers")
    return figure


def heat_map(runs: Sequence[Run], x: str | None = None, y: str | None = None) -> Any | None:
    """The best step time for each pair of values of two axes; None when the runs differ in fewer than two.

    Raises:
        ValueError: an axis in which the runs do not differ.
    """
    known = axes_of(runs)
    for axis in (x, y):
        if axis is not None and axis not in known:
            raise unknown_name("axis of the heat map", axis, known)
    free = [axis for axis in known if axis not in (x, y)]
    x = x or (free.pop(0) if free else None)
    y = y or (free.pop(0) if free else None)
    if x is None or y is None:
        return None
    panels = _panels(runs)
    columns = sorted({run.value(x) for run in runs if run.value(x) is not None})
    rows = sorted({run.value(y) for run in runs if run.value(y) is not None})
    figure, axes = _figure(len(panels), height=1.6 + 0.62 * len(rows))
    for ax, (title, ran, failed) in zip(axes, panels, strict=True):
        best: dict[tuple[Any, Any], Run] = {}
        for run in sorted(ran, key=lambda run: -run.value("step_time_s")):
            best[run.value(x), run.value(y)] = run
        grid = [[_time(best.get((column, row))) for column in columns] for row in rows]
        ax.imshow(grid, cmap="YlGnBu", aspect="auto")
        times = [value for line in grid for value in line if not math.isnan(value)]
        for run in failed:
            place = run.value(x), run.value(y)
            if None not in place and place not in best:
                at = (columns.index(place[0]), rows.index(place[1]))
                ax.text(*at, run.record["status"], ha="center", va="center", fontsize=8, color=RED)
        for (column, row), run in best.items():
            value = _time(run)
            dark = value > min(times) + 0.55 * (max(times) - min(times))
            text = f"{value:.3g} s\n{run.layout}"
            place = (columns.index(column), rows.index(row))
            ax.text(*place, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), rows)
        ax.set_ylabel(y)
        _finish(ax, title, x, grid=False)
    return figure


def memory_against_time(runs: Sequence[Run]) -> Any:
    """One point a run; the line joins those that no other run beats in both. Points in a crowd go without a name."""
    panels = _panels(runs)
    figure, axes = _figure(len(panels), height=4.2)
    for ax, (title, ran, _) in zip(axes, panels, strict=True):
        points = [(run.value("step_time_s"), run.value("memory_mib"), run.layout) for run in ran]
        front = pareto([(time, memory) for time, memory, _ in points])
        ax.plot([time for time, _ in front], [memory for _, memory in front], color=ORANGE, lw=1.2, zorder=1)
        for time, memory, _ in points:
            ax.scatter(time, memory, color=ORANGE if (time, memory) in front else BLUE, s=28, zorder=2)
        ax.margins(0.2, 0.15)
        ax.set_ylim(bottom=0)
        _name_points(ax, sorted(points, key=lambda point: point[:2] not in front))
        ax.set_ylabel("peak memory of the largest rank (MiB)")
        _finish(ax, title, "seconds a step (median)")
    return figure


def expert_loads(runs: Sequence[Run]) -> list[tuple[Run, Any]]:
    """The fastest run of each series among those that counted the load of experts, and its heat map."""
    fastest: dict[str, Run] = {}
    for run in sorted((run for run in runs if run.ok), key=_time, reverse=True):
        if run.record.get("expert_load"):
            fastest[run.series] = run
    return [(run, expert_heat_map(run.record["expert_load"])) for run in fastest.values()]


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one number without losing in the other, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def png(figure: Any) -> bytes:
    """`figure` as a PNG file."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=130)
    return out.getvalue()


def _name_points(ax: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each name beside its point where no other name or point is; the first go first."""
    ax.figure.draw_without_rendering()  # the layout is known from here on
    dots = [tuple(ax.transData.transform(point[:2])) for point in points]
    unit = ax.figure.dpi / 72 * NAME_SIZE
    taken: list[tuple[float, float, float, float]] = [(px - 3, py - 3, px + 3, py + 3) for px, py in dots]
    for (time, memory, name), (px, py) in zip(points, dots, strict=True):
        width = 0.56 * unit * len(name)
        sides = ((5, 3), (5, -3 - unit), (-5 - width, 3), (-5 - width, -3 - unit), (5, 3 + unit), (5, -3 - 2 * unit))
        for dx, dy in sides:
            box = (px + dx, py + dy, px + dx + width, py + dy + unit)
            if not any(_overlap(box, other) for other in taken):
                taken.append(box)
                offset = (dx * 72 / ax.figure.dpi, dy * 72 / ax.figure.dpi)
                ax.annotate(name, (time, memory), xytext=offset, textcoords="offset points", fontsize=NAME_SIZE)
                break


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _time(run: Run | None) -> float:
    return math.nan if run is None else float(run.value("step_time_s"))


def _panels(runs: Sequence[Run]) -> list[tuple[str, list[Run], list[Run]]]:
    """(series, its runs that went well, its failed runs)."""
    names = list(dict.fromkeys(run.series for run in runs))
    found = []
    for name in names:
        mine = [run for run in runs if run.series == name]
        found.append((name, [run for run in mine if run.ok], [run for run in mine if not run.ok]))
    return found


def _figure(panels: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PANEL * min(panels, 3), height * math.ceil(panels / 3)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(math.ceil(panels / 3), min(panels, 3), squeeze=False).ravel()
    for ax in grid[panels:]:
        ax.remove()
    return figure, list(grid[:panels])


def _finish(ax: Any, title: str, xlabel: str, grid: bool = True) -> None:
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.tick_params(labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if grid:
        ax.grid(axis="x", color=GREY, lw=0.5)
        ax.set_axisbelow(True)
