"""Score curves and maps as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.evaluation.derived import forecast_files
from credit_like.evaluation.scorecard import channels, labels, lead_text
from credit_like.evaluation.sources import Truth, open_forecast
from credit_like.variables import Variables

_STYLE = {"model": ("C0", "-"), "persistence": ("0.4", "--"), "climatology": ("0.4", ":")}


def plot_scores(results: xr.Dataset, folder: Path, units: dict[str, str] | None = None) -> list[Path]:
    """Plot every labelled metric against lead time, one panel per variable and level, with any bounds shaded."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for metric, label in labels(results).items():
        if metric not in results["metric"].values:
            continue
        panels = list(channels(results))
        columns = min(4, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(3.6 * columns, 2.7 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        for ax, (name, scores) in zip(axes, panels, strict=False):
            _curves(ax, scores, metric)
            unit = (units or {}).get(name.split("@")[0], "")
            ax.set_title(f"{name} ({unit})" if unit and metric in ("rmse", "bias") else name, fontsize=9)
        for ax in axes[len(panels) :]:
            ax.axis("off")
        axes[0].set_ylabel(label)
        axes[0].legend(fontsize=7)
        figure.supxlabel("lead time (days)", fontsize=9)
        paths.append(_save(figure, folder / f"{metric}.png"))
    return paths


def plot_maps(
    forecasts: Path | xr.Dataset,
    truth: FieldStore,
    variables: Variables,
    folder: Path,
    init: int = 0,
    leads: Sequence[int] | None = None,
) -> list[Path]:
    """Plot forecast, truth and error of every variable (its middle level) from initial time number `init`.

    `leads` are positions among the forecast's leads, by default the first and the last. Land is outlined if the store
    has a land-sea mask or orography among its static fields.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dataset = open_forecast(forecasts) if isinstance(forecasts, Path) else forecasts
    files = forecast_files(dataset, truth, "the forecasts")
    second = int(files.init[init])
    chosen = sorted({0, len(files.leads) - 1}) if leads is None else list(leads)
    land = land_mask(truth)
    paths = []
    for variable in variables.outputs:
        if not (levels := files.levels_of(variable)):
            continue
        level = [levels[len(levels) // 2]]
        figure = Figure(figsize=(12, 2.6 * len(chosen) + 0.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(chosen), 3, squeeze=False)
        for row, lead in zip(axes, chosen, strict=True):
            seconds = int(files.leads[lead])
            forecast = files.fields(second, [seconds], variable, level)
            assert forecast is not None
            analysed = Truth(truth).at(np.array([second + seconds]), variable, level)[0, 0]
            _maps(row, forecast.mean(0)[0, 0], analysed, truth, land)
            row[0].set_ylabel(lead_text(np.timedelta64(seconds, "s")))
        start = calendar.to_text(calendar.from_seconds(np.array([second]), truth.calendar)[0])
        at = f" at {variable.levels[level[0]]:g}" if variable.levels else ""
        unit = truth.attrs(variable).get("units", "")
        figure.suptitle(f"{variable.name}{at} ({unit}) from {start}", fontsize=10)
        paths.append(_save(figure, folder / f"map_{variable.name}.png"))
    return paths


def land_mask(store: FieldStore) -> NDArray[np.float32] | None:
    """Return the static land-sea mask (H, W), 1 on land, or None if there is none."""
    start = 0
    for variable in store.variables.role("static"):
        if "land" in variable.name.lower() or variable.name.lower() in ("lsm", "mask"):
            return store.static()[start]
        start += len(variable)
    return None


def _curves(ax: Axes, scores: xr.DataArray, metric: str) -> None:
    days = scores["lead_time"].values / np.timedelta64(1, "D")
    for number, source in enumerate(map(str, scores["source"].values)):
        values = scores.sel(source=source, metric=metric).values
        if not np.isfinite(values).any():
            continue
        colour, line = _STYLE.get(source, (f"C{number}", "-"))
        ax.plot(days, values, line, color=colour, label=source, marker="." if len(days) < 3 else None)
        if f"{metric}_low" in scores["metric"].values:
            low, high = (scores.sel(source=source, metric=f"{metric}_{end}").values for end in ("low", "high"))
            ax.fill_between(days, low, high, color=colour, alpha=0.15, linewidth=0)
    ax.set_ylim(bottom=0 if metric == "rmse" else None)
    ax.grid(alpha=0.3)
    ax.tick_params(labelsize=7)


def _maps(
    row: NDArray[np.object_],
    forecast: NDArray[np.float64],
    analysed: NDArray[np.float64],
    store: FieldStore,
    land: NDArray[np.float32] | None,
) -> None:
    """Plot truth and forecast on one colour scale, the error on its own, symmetric about zero."""
    error = forecast - analysed
    both = np.concatenate([forecast.ravel(), analysed.ravel()])
    both = both[np.isfinite(both)]
    low, high = (both.min(), both.max()) if both.size else (0.0, 1.0)
    finite = np.abs(error[np.isfinite(error)])
    most = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    grid = store.grid
    for ax, title, values in zip(row, ("truth", "forecast", "error"), (analysed, forecast, error), strict=True):
        scale = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"} if title == "error" else {"vmin": low, "vmax": high}
        drawn = ax.pcolormesh(grid.longitude, grid.latitude, np.ma.masked_invalid(values), shading="nearest", **scale)
        if land is not None and land.min() < 0.5 < land.max():
            ax.contour(grid.longitude, grid.latitude, land, [0.5], colors="k", linewidths=0.5)
        ax.set_title(title, fontsize=8)
        ax.tick_params(labelsize=6)
        ax.figure.colorbar(drawn, ax=ax, shrink=0.9).ax.tick_params(labelsize=6)


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
