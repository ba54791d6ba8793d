"""Score curves as PNG files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from credit_like import outputs
from credit_like.evaluation.scorecard import IN_UNITS, channels, labels
from credit_like.naming import channel_text, exponent_of, hours_text, level_units_of, times_text, with_units

log = logging.getLogger(__name__)

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
            paths.append(save_figure(_scores_figure(results, panels, metric, label), folder / f"{metric}.png"))
    return paths


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure, log its path at once, because a figure of many panels takes seconds, and return the path.

    Raises UserError where it would replace anything but an earlier one.
    """
    outputs.save_figure(figure, path, dpi=110)
    log.info("%s", path)
    return path


def panel_figure(count: int, what: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with the title `what` and so many panels of one size, in rows of up to four; margins in inches."""
    columns = min(4, count)
    rows = -(-count // columns)
    left, right, top, bottom, across, down = 0.75, 0.15, 0.6, 0.5, 0.55, 0.5
    width = max(5.4, left + right + columns * _PANEL[0] + (columns - 1) * across)  # room for the title
    height = top + bottom + rows * _PANEL[1] + (rows - 1) * down
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = []
    for number in range(count):
        row, column = divmod(number, columns)
        x, y = left + column * (_PANEL[0] + across), height - top - _PANEL[1] - row * (_PANEL[1] + down)
        axes.append(figure.add_axes((x / width, y / height, _PANEL[0] / width, _PANEL[1] / height)))
        axes[-1].grid(alpha=0.3)
        axes[-1].tick_params(labelsize=7)
    figure.text(left / width, 1 - 0.2 / height, what, fontsize=11, weight="bold", va="center")
    return figure, axes


def legend_and_labels(figure: Figure, axes: list[Axes], x: str, y: str) -> None:
    """Label the outer axes of `panel_figure`, and put a legend of what any panel has at the top right."""
    columns = min(4, len(axes))
    for number, ax in enumerate(axes):
        if number % columns == 0:
            ax.set_ylabel(y, fontsize=9)
        if number + columns >= len(axes):
            ax.set_xlabel(x, fontsize=9)
    shown: dict[str, Artist] = {}
    for ax in axes:
        for line, name in zip(*ax.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, line)
    width, height = figure.get_size_inches()
    figure.legend(
        list(shown.values()), list(shown), loc="upper right", ncols=max(1, len(shown)), fontsize=8, frameon=False,
        bbox_to_anchor=(1 - 0.15 / width, 1 - (0.05 if width > 6 else 0.24) / height),
    )  # fmt: skip


def _scores_figure(results: xr.Dataset, panels: list[tuple[str, xr.DataArray]], metric: str, label: str) -> Figure:
    """Return the curves of one metric."""
    figure, axes = panel_figure(len(panels), f"{label}, mean over {times_text(results)}")
    for ax, (name, scores) in zip(axes, panels, strict=True):
        exponent = exponent_of(scores.sel(metric=metric).values) if metric in IN_UNITS else 0
        _curves(ax, scores, metric, exponent)
        _title(ax, results, name, exponent, metric in IN_UNITS)
    legend_and_labels(figure, axes, "lead time (h)", label)
    return figure


def _title(ax: Axes, results: xr.Dataset, name: str, exponent: int = 0, in_units: bool = False) -> None:
    units = str(results[name.partition("@")[0]].attrs.get("units", "")) if in_units else ""
    title = with_units(channel_text(name, level_units_of(results)), units, exponent)
    ax.set_title(title, fontsize=9, loc="left", y=1.0)


def _curves(ax: Axes, scores: xr.DataArray, metric: str, exponent: int) -> None:
    hours = scores["lead_time"].values / np.timedelta64(1, "h")
    for number, source in enumerate(map(str, scores["source"].values)):
        values = scores.sel(source=source, metric=metric).values / 10.0**exponent
        if not np.isfinite(values).any():
            continue
        colour, line = _STYLE.get(source, (f"C{number}", "-"))
        ax.plot(hours, values, line, color=colour, label=source, marker=_marker(hours))
        if f"{metric}_low" in scores["metric"].values:
            low, high = (
                scores.sel(source=source, metric=f"{metric}_{end}").values / 10.0**exponent for end in ("low", "high")
            )
            ax.fill_between(hours, low, high, color=colour, alpha=0.15, linewidth=0)
    _lead_axis(ax, hours)
    if metric == "rmse":
        ax.set_ylim(bottom=0)
    elif metric == "acc":
        finite = scores.sel(metric=metric).values
        ax.set_ylim(min(0.0, float(np.nanmin(finite))), 1.02)
        ax.axhline(_SKILFUL, color="0.7", linewidth=0.8)
    elif metric == "bias":
        ax.axhline(0, color="0.7", linewidth=0.8)
    elif metric == "spread-error":
        ax.axhline(1, color="0.7", linewidth=0.8)


def _marker(hours: NDArray[np.float64]) -> str | None:
    """Return the marker of a curve, without which one of a single lead would not be seen."""
    return "." if len(hours) < 3 else None


def _lead_axis(ax: Axes, hours: NDArray[np.float64]) -> None:
    every = next((step for step in _TICKS if hours[-1] / step <= 6), _TICKS[-1])
    ax.set_xticks(np.arange(0, hours[-1] + every / 2, every))
    ax.set_xlim(0, hours[-1] * 1.02)


def plot_ensemble(results: xr.Dataset, folder: Path) -> list[Path]:
    """Plot spread and error of the ensemble mean, rank histograms and reliability diagrams over the globe.

    Histograms are those of the first, a middle and the last lead; reliability is that of the last one, with a curve per
    event. What was not computed has no figure.
    """
    figures = {"spread": _spread_figure, "rank-histogram": _rank_figure, "reliability": _reliability_figure}
    drawn = {name: figure for name, draw in figures.items() if (figure := draw(results)) is not None}
    folder.mkdir(parents=True, exist_ok=True)
    return [save_figure(figure, folder / f"{name}.png") for name, figure in drawn.items()]


def _spread_figure(results: xr.Dataset) -> Figure | None:
    if not {"rmse", "spread"} <= set(results["metric"].values):
        return None
    there = [(name, scores.sel(source="model")) for name, scores in channels(results)]
    panels = [(name, scores) for name, scores in there if bool(np.isfinite(scores.sel(metric="spread")).any())]
    if not panels:
        return None
    figure, axes = panel_figure(len(panels), "Spread and error of the ensemble mean")
    for ax, (name, scores) in zip(axes, panels, strict=True):
        exponent = exponent_of(scores.sel(metric="rmse").values)
        hours = scores["lead_time"].values / np.timedelta64(1, "h")
        for metric, label, colour in (("rmse", "RMSE of the mean", "C0"), ("spread", "spread", "C1")):
            values = scores.sel(metric=metric).values / 10.0**exponent
            ax.plot(hours, values, color=colour, label=label, marker=_marker(hours))
        _lead_axis(ax, hours)
        ax.set_ylim(bottom=0)
        _title(ax, results, name, exponent, in_units=True)
    legend_and_labels(figure, axes, "lead time (h)", "RMSE, spread")
    return figure


def _of_channels(results: xr.Dataset, suffix: str) -> list[tuple[str, xr.DataArray]]:
    """Return (name, scores over lead_time and more) of every channel where the model has data of a metric with more dimensions."""
    found = []
    for name, _ in channels(results):
        variable, _, level = name.partition("@")
        if f"{variable}{suffix}" in results:
            array = results[f"{variable}{suffix}"].sel(region="global", source="model")
            array = array.sel(level=float(level), method="nearest") if level else array
            if bool(np.isfinite(array).any()):
                found.append((name, array))
    return found


def _rank_figure(results: xr.Dataset) -> Figure | None:
    panels = _of_channels(results, "_rank_histogram")
    if not panels:
        return None
    figure, axes = panel_figure(len(panels), "Rank of the truth among the members")
    leads = sorted({0, results.sizes["lead_time"] // 2, results.sizes["lead_time"] - 1})
    for ax, (name, array) in zip(axes, panels, strict=True):
        ranks = int(np.isfinite(array.values).any(0).sum())  # sources with fewer members have fewer
        for lead, colour in zip(leads, ("C2", "C1", "C0"), strict=False):
            one = array.isel(lead_time=lead, rank=slice(ranks))
            ax.stairs(
                one.values,
                np.arange(ranks + 1) - 0.5,
                color=colour,
                label=hours_text(results["lead_time"].values[lead]),
            )
        ax.axhline(1 / ranks, color="0.7", linewidth=0.8)
        ax.set_ylim(bottom=0)
        ax.set_xlim(-0.5, ranks - 0.5)
        _title(ax, results, name)
    legend_and_labels(figure, axes, "rank", "frequency")
    return figure


def _reliability_figure(results: xr.Dataset) -> Figure | None:
    panels = _of_channels(results, "_reliability")
    if not panels:
        return None
    last = hours_text(results["lead_time"].values[-1])
    figure, axes = panel_figure(len(panels), f"Reliability of probabilities, {last}")
    for ax, (name, array) in zip(axes, panels, strict=True):
        ax.plot([0, 1], [0, 1], color="0.7", linewidth=0.8)
        for number, event in enumerate(map(str, array["threshold"].values)):
            one = array.isel(lead_time=-1).sel(threshold=event)
            share, probability, frequency = (
                one.sel(reliability_part=part).values for part in ("fraction", "probability", "frequency")
            )
            there = share > 0
            ax.plot(probability[there], frequency[there], ".-", color=f"C{number}", label=event)
        ax.set_xlim(-0.02, 1.02)
        ax.set_ylim(-0.02, 1.02)
        _title(ax, results, name)
    legend_and_labels(figure, axes, "forecast probability", "observed frequency")
    return figure
