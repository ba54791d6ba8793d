"""Maps of truth, forecast and error as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.evaluation.derived import forecast_files
from credit_like.evaluation.naming import exponent_of, exponent_text, latitude_text, level_text, longitude_text
from credit_like.evaluation.naming import units_text as units_of
from credit_like.evaluation.sources import ForecastFiles, Truth, open_forecast
from credit_like.grid import Grid
from credit_like.registry import did_you_mean
from credit_like.variables import Variable, Variables

_MAP = 3.9  # width of a map in inches
_OUTSIDE = 0.3  # percent of the points at either end that the colours do not resolve


@dataclass(frozen=True)
class Choice:
    """The fields to draw; None means the default of `plot_maps`."""

    variable: str | None = None
    level: float | None = None
    """In the units of the files, or in hPa where these are in Pa."""
    lead_seconds: int | None = None

    @property
    def is_default(self) -> bool:
        return self == Choice()


def plot_maps(
    forecasts: Path | xr.Dataset,
    truth: FieldStore,
    variables: Variables,
    folder: Path,
    init: int = 0,
    choice: Choice = Choice(),
) -> list[Path]:
    """Plot truth, forecast and error of every variable from initial time number `init`.

    By default the middle level and the first and last lead are drawn. Truth and forecast share one colour scale at all
    leads; the error has a scale of its own at each. Land is outlined if the store has a land-sea mask. Raises UserError
    if the forecasts do not have what is chosen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dataset = open_forecast(forecasts) if isinstance(forecasts, Path) else forecasts
    files = forecast_files(dataset, truth, "the forecasts")
    second = int(files.init[init])
    leads = _leads(files, choice.lead_seconds)
    land = land_mask(truth)
    paths = []
    for variable in _variables(variables, files, choice.variable):
        level = _level(variable, files.levels_of(variable), choice.level, truth.level_units(variable))
        fields = []
        for seconds in leads:
            forecast = files.fields(second, [seconds], variable, [level])
            assert forecast is not None, "only variables of the files are drawn"
            analysed = Truth(truth).at(np.array([second + seconds]), variable, [level])[0, 0]
            fields.append((analysed, forecast.mean(0)[0, 0]))
        times = [_time_text(second + seconds, truth.calendar) for seconds in (0, *leads)]
        name = variable.name
        suffix = ""
        if variable.levels:
            shown = level_text(variable.levels[level], truth.level_units(variable))
            name += f" {shown}"
            suffix = f"_{shown.replace(' ', '')}" if choice.level is not None else ""
        suffix += f"_{leads[0] // 3600}h" if choice.lead_seconds is not None else ""
        units = truth.attrs(variable).get("units", "")
        figure = _figure(name, units, times, [seconds / 3600 for seconds in leads], fields, truth.grid, land)
        path = folder / f"map_{variable.name}{suffix}.png"
        figure.savefig(path, dpi=110)
        paths.append(path)
    return paths


def _leads(files: ForecastFiles, wanted: int | None) -> list[int]:
    leads = [int(lead) for lead in files.leads]
    if wanted is None:
        return sorted({leads[0], leads[-1]})
    if wanted not in leads:
        near = min(leads, key=lambda lead: abs(lead - wanted))
        raise UserError(
            f"--lead: expected a lead of the forecasts, {leads[0] / 3600:g} h to {leads[-1] / 3600:g} h, got "
            f"{wanted / 3600:g} h; did you mean {near / 3600:g}h?"
        )
    return [wanted]


def _variables(variables: Variables, files: ForecastFiles, wanted: str | None) -> list[Variable]:
    there = [variable for variable in variables.outputs if files.levels_of(variable)]
    if wanted is None:
        return there
    found = [variable for variable in there if variable.name == wanted]
    if not found:
        names = [variable.name for variable in there]
        raise UserError(
            f"--variable: expected one of {', '.join(names)}, got {wanted!r}{did_you_mean(wanted, names)}; change it"
        )
    return found


def _level(variable: Variable, positions: Sequence[int], wanted: float | None, units: str) -> int:
    """Return the position of a level among the variable's own."""
    if wanted is None or not variable.levels:
        return positions[len(positions) // 2]
    there = {position: variable.levels[position] for position in positions}
    for position, level in there.items():
        if np.isclose(level, wanted) or level_text(level, units) == f"{wanted:g} hPa":
            return position
    known = ", ".join(level_text(level, units) for level in there.values())
    raise UserError(f"--level: expected a level of {variable.name} ({known}), got {wanted:g}; change it")


def land_mask(store: FieldStore) -> NDArray[np.float32] | None:
    """Return the static land-sea mask (H, W), 1 on land, or None if there is none."""
    start = 0
    for variable in store.variables.role("static"):
        if "land" in variable.name.lower() or variable.name.lower() in ("lsm", "mask"):
            return store.static()[start]
        start += len(variable)
    return None


def _time_text(second: int, of: str) -> str:
    """Return `2000-10-02 06 UTC`, with minutes only where there are some."""
    date, _, clock = calendar.to_text(calendar.from_seconds(np.array([second]), of)[0]).partition("T")
    return f"{date} {clock[:2] if clock.endswith(':00:00') else clock[:5]} UTC"


def _figure(
    name: str,
    units: str,
    times: Sequence[str],
    lead_hours: Sequence[float],
    fields: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
    grid: Grid,
    land: NDArray[np.float32] | None,
) -> Figure:
    """Return rows of maps (truth, forecast, error), one for each lead; `times` are the initial and the valid times."""
    exponent = exponent_of(np.array(fields))
    scaled = [(truth / 10.0**exponent, forecast / 10.0**exponent) for truth, forecast in fields]
    unit = " ".join(part for part in (exponent_text(exponent) if exponent else "", units_of(units)) if part)
    height = min(_MAP, _MAP * float(np.ptp(grid.latitude)) / max(1e-9, float(np.ptp(_unrolled(grid)))))
    top, bottom, left, between = 0.62, 0.75, 0.55, 0.3
    width, total = 3 * _MAP + left + 1.0, top + len(fields) * (height + between) + bottom - between + 0.05
    figure = Figure(figsize=(width, total))
    FigureCanvasAgg(figure)
    figure.text(
        left / width, 1 - 0.2 / total, f"{name}{f' ({unit})' if unit else ''}, forecast from {times[0]}", va="center",
        fontsize=11, weight="bold",
    )  # fmt: skip
    colours, scale = _colours(np.array([truth for truth, _ in scaled]), np.array(scaled))
    for i, (truth, forecast) in enumerate(scaled):
        error = forecast - truth
        finite = np.abs(error[np.isfinite(error)])
        most = float(np.percentile(finite, 100 - _OUTSIDE)) if finite.size else 0.0
        errors = Normalize(-most or -1.0, most or 1.0)
        y = total - top - height - i * (height + between)
        panels = ((truth, colours, scale), (forecast, colours, scale), (error, "RdBu_r", errors))
        weights = np.cos(np.deg2rad(grid.latitude))[:, None] * np.isfinite(error)
        rmse = np.sqrt(np.nansum(weights * error**2) / weights.sum()) if weights.sum() else np.nan
        titles = (f"truth, {times[1 + i]}", f"forecast, {lead_hours[i]:g} h", f"error, RMSE {rmse:.3g}")
        for column, ((values, colour, norm), title) in enumerate(zip(panels, titles, strict=True)):
            x = left + column * (_MAP + 0.12)
            ax = figure.add_axes((x / width, y / total, (_MAP - 0.1) / width, height / total))
            _map(ax, values, colour, norm, grid, land)
            ax.set_title(title, fontsize=8, loc="left", pad=3, y=1.0)
            if column:
                ax.tick_params(labelleft=False)
            if i < len(fields) - 1:
                ax.tick_params(labelbottom=False)
        x = left + 3 * (_MAP + 0.12) - 0.1
        _bar(figure, (x, y, 0.1, height), (width, total), errors, "RdBu_r", unit)
    _bar(figure, (left + 0.4 * _MAP, 0.38, 1.2 * _MAP, 0.1), (width, total), scale, colours, unit)
    return figure


def _unrolled(grid: Grid) -> NDArray[np.float64]:
    """Return longitudes that increase or decrease throughout."""
    return np.asarray(np.rad2deg(np.unwrap(np.deg2rad(grid.longitude))))


def _colours(truth: NDArray[np.float64], fields: NDArray[np.float64]) -> tuple[str, Normalize]:
    """Choose colours by the values: diverging around 0 for winds and others of both signs, white at 0 for rain.

    The truth decides between them, as a forecast of rain may be slightly negative; the range is that of all `fields`.
    """
    finite, real = fields[np.isfinite(fields)], truth[np.isfinite(truth)]
    if not finite.size:
        return "viridis", Normalize(0, 1)
    low, high = (float(value) for value in np.percentile(finite, (_OUTSIDE, 100 - _OUTSIDE)))
    if low < 0 < high and min(-low, high) > 0.15 * max(-low, high):
        most = max(-low, high)
        return "PuOr_r", Normalize(-most, most)
    if real.size and high > 0 and real.min() >= -1e-3 * high and np.percentile(real, _OUTSIDE) <= 0.02 * high:
        return "YlGnBu", Normalize(0, high)
    return "viridis", Normalize(low, high if high > low else low + 1)


def _map(
    ax: Axes,
    values: NDArray[np.float64],
    colours: str,
    norm: Normalize,
    grid: Grid,
    land: NDArray[np.float32] | None,
) -> None:
    longitude = _unrolled(grid)
    ax.set_facecolor("0.85")  # missing values
    spacing = np.diff(grid.latitude)
    if np.ptp(spacing) < 0.05 * abs(spacing[0]):
        dx, dy = longitude[1] - longitude[0], spacing.mean()
        extent = (longitude[0] - dx / 2, longitude[-1] + dx / 2, grid.latitude[-1] + dy / 2, grid.latitude[0] - dy / 2)
        ax.imshow(values, extent=extent, aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    else:
        ax.pcolormesh(longitude, grid.latitude, values, shading="nearest", cmap=colours, norm=norm)
    ax.set_ylim(max(-90.0, min(ax.get_ylim())), min(90.0, max(ax.get_ylim())))
    if land is not None and land.min() < 0.5 < land.max():
        ax.contour(longitude, grid.latitude, land, [0.5], colors="k", linewidths=0.6)
    steps = [1, 1.5, 3, 4.5, 6, 9, 10]
    ax.xaxis.set_major_locator(MaxNLocator(6, steps=steps))
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=steps))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda degrees, _: longitude_text(degrees)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda degrees, _: latitude_text(degrees)))
    ax.tick_params(labelsize=6.5, length=2)


def _bar(
    figure: Figure,
    box: tuple[float, float, float, float],
    of: tuple[float, float],
    norm: Normalize,
    colours: str,
    unit: str,
) -> None:
    """Add a colour bar in a box (left, bottom, width, height) of a figure (width, height) in inches."""
    x, y, wide, high = box
    ax = figure.add_axes((x / of[0], y / of[1], wide / of[0], high / of[1]))
    orientation = "horizontal" if wide > high else "vertical"
    bar = figure.colorbar(ScalarMappable(norm, colours), cax=ax, orientation=orientation, extend="both")
    bar.locator = MaxNLocator(7)
    bar.update_ticks()
    bar.set_label(unit, fontsize=7, labelpad=1)
    ax.tick_params(labelsize=6.5, length=2)
