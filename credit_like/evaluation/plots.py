"""Score curves as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from credit_like.evaluation.naming import channel_text, exponent_of, exponent_text, level_units_of, units_text
from credit_like.evaluation.scorecard import IN_UNITS, channels, labels

_STYLE = {"model": ("C0", "-"), "persistence": ("0.4", "--"), "climatology": ("0.4", ":")}
_PANEL = (2.9, 2.1)  # width and height of a panel in inches, without labels
_TICKS = (1, 3, 6, 12, 24, 48, 72, 120, 240, 480)  # hours between ticks of the lead time
_SKILFUL = 0.6
"""Anomaly correlation above which a forecast is usually called useful (Hollingsworth et al. 1980)."""


def plot_scores(results: xr.Dataset, folder: Path) -> list[Path]:
    """Plot every labelled metric against lead time, one panel per variable and level, with any bounds shaded.

    A variable without the metric has no panel; a metric without values has no figure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for metric, label in labels(results).items():
        if metric not in results["metric"].values:
            continue
        panels = [
            (name, scores) for name, scores in channels(results) if bool(np.isfinite(scores.sel(metric=metric)).any())
        ]
        if panels:
            path = folder / f"{metric}.png"
            _scores_figure(results, panels, metric, label).savefig(path, dpi=110)
            paths.append(path)
    return paths


def _scores_figure(results: xr.Dataset, panels: list[tuple[str, xr.DataArray]], metric: str, label: str) -> Figure:
    """Return a figure of panels of one size, with margins in inches."""
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    left, right, top, bottom, across, down = 0.75, 0.15, 0.6, 0.5, 0.55, 0.5
    width = left + right + columns * _PANEL[0] + (columns - 1) * across
    height = top + bottom + rows * _PANEL[1] + (rows - 1) * down
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    times = int(results["initial_times"])
    for number, (name, scores) in enumerate(panels):
        row, column = divmod(number, columns)
        x, y = left + column * (_PANEL[0] + across), height - top - _PANEL[1] - row * (_PANEL[1] + down)
        ax = figure.add_axes((x / width, y / height, _PANEL[0] / width, _PANEL[1] / height))
        values = scores.sel(metric=metric).values
        exponent = exponent_of(values) if metric in IN_UNITS else 0
        units = str(results[name.partition("@")[0]].attrs.get("units", "")) if metric in IN_UNITS else ""
        _curves(ax, scores, metric, exponent)
        shown = " ".join(part for part in (exponent_text(exponent) if exponent else "", units_text(units)) if part)
        title = channel_text(name, level_units_of(results))
        ax.set_title(f"{title} ({shown})" if shown else title, fontsize=9, loc="left", y=1.0)
        if column == 0:
            ax.set_ylabel(label, fontsize=9)
        if number + columns >= len(panels):
            ax.set_xlabel("lead time (h)", fontsize=9)
        if number == 0:
            lines, names = ax.get_legend_handles_labels()
    figure.legend(
        lines, names, loc="upper right", ncols=len(names), fontsize=8, frameon=False,
        bbox_to_anchor=(1 - right / width, 1 - 0.05 / height),
    )  # fmt: skip
    what = f"{label}, mean over {times} initial times"
    figure.text(left / width, 1 - 0.2 / height, what, fontsize=11, weight="bold", va="center")
    return figure


def _curves(ax: Axes, scores: xr.DataArray, metric: str, exponent: int) -> None:
    hours = scores["lead_time"].values / np.timedelta64(1, "h")
    for number, source in enumerate(map(str, scores["source"].values)):
        values = scores.sel(source=source, metric=metric).values / 10.0**exponent
        if not np.isfinite(values).any():
            continue
        colour, line = _STYLE.get(source, (f"C{number}", "-"))
        ax.plot(hours, values, line, color=colour, label=source, marker="." if len(hours) < 3 else None)
        if f"{metric}_low" in scores["metric"].values:
            low, high = (
                scores.sel(source=source, metric=f"{metric}_{end}").values / 10.0**exponent for end in ("low", "high")
            )
            ax.fill_between(hours, low, high, color=colour, alpha=0.15, linewidth=0)
    every = next((step for step in _TICKS if hours[-1] / step <= 6), _TICKS[-1])
    ax.set_xticks(np.arange(0, hours[-1] + every / 2, every))
    ax.set_xlim(0, hours[-1] * 1.02)
    if metric == "rmse":
        ax.set_ylim(bottom=0)
    elif metric == "acc":
        finite = scores.sel(metric=metric).values
        ax.set_ylim(min(0.0, float(np.nanmin(finite))), 1.02)
        ax.axhline(_SKILFUL, color="0.7", linewidth=0.8)
    elif metric == "bias":
        ax.axhline(0, color="0.7", linewidth=0.8)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=7)
