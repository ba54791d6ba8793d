"""Maps of truth, forecast and error as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.evaluation.charts import Row, Style, chart
from credit_like.evaluation.coasts import coastlines
from credit_like.evaluation.derived import forecast_files
from credit_like.evaluation.plots import save_figure
from credit_like.evaluation.sources import ForecastFiles, Truth, open_forecast
from credit_like.naming import hours_text, level_text
from credit_like.registry import did_you_mean
from credit_like.variables import Variable, Variables


@dataclass(frozen=True)
class Choice:
    """The fields to draw; None means the default of `plot_maps`."""

    variable: str | None = None
    level: float | None = None
    """In the units of the files, or in hPa where these are in Pa."""
    lead_seconds: int | None = None
    init: str | None = None
    """Initial time, such as 2000-09-27T00."""

    @property
    def is_default(self) -> bool:
        return self == Choice()


def plot_maps(
    forecasts: Path | xr.Dataset,
    truth: FieldStore,
    variables: Variables,
    folder: Path,
    choice: Choice = Choice(),
    style: Style = Style(),  # noqa: B008, it is frozen
) -> list[Path]:
    """Plot truth, forecast and error of every variable.

    By default the first initial time, the middle level and the first and last lead are drawn. Coasts are those of the
    store's land-sea mask, else Natural Earth's. Raises UserError if the forecasts do not have what is chosen.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dataset = open_forecast(forecasts) if isinstance(forecasts, Path) else forecasts
    files = forecast_files(dataset, truth, "the forecasts")
    second = _init(files, choice.init, truth.calendar)
    leads = _leads(files, choice.lead_seconds)
    coast = coastlines(truth)
    paths = []
    for variable in _variables(variables, files, choice.variable):
        level = _level(variable, files.levels_of(variable), choice.level, truth.level_units(variable))
        rows = [_row(files, Truth(truth), second, lead, variable, level) for lead in leads]
        name, suffix = variable.name, ""
        if variable.levels:
            shown = level_text(variable.levels[level], truth.level_units(variable))
            name += f" {shown}"
            suffix = f"_{shown.replace(' ', '')}" if choice.level is not None else ""
        if choice.init is not None:
            suffix += f"_{calendar.compact(calendar.one_time(second, truth.calendar))}"
        suffix += f"_{leads[0] / 3600:g}h" if choice.lead_seconds is not None else ""
        suffix += f"_{style.projection}" if style.projection is not None else ""
        units = str(truth.attrs(variable).get("units", ""))
        figure = chart(name, units, _time_text(second, truth.calendar), rows, truth.grid, coast, style)
        paths.append(save_figure(figure, folder / f"map_{variable.name}{suffix}.png"))
    return paths


def _row(files: ForecastFiles, truth: Truth, init: int, lead: int, variable: Variable, level: int) -> Row:
    """Return the truth and the forecast, the mean of its members, at one lead (seconds)."""
    forecast = files.fields(init, [lead], variable, [level])
    assert forecast is not None, "only variables of the files are drawn"
    analysed = truth.at(np.array([init + lead]), variable, [level])[0, 0]
    valid = _time_text(init + lead, truth.store.calendar)
    return Row(analysed, forecast.mean(0)[0, 0], valid, hours_text(np.timedelta64(lead, "s")))


def _init(files: ForecastFiles, wanted: str | None, of: str) -> int:
    """Return an initial time in seconds, by default the first."""
    if wanted is None:
        return int(files.init[0])
    date, _, clock = wanted.strip().replace(" ", "T").partition("T")
    hour, minute, whole_second = (*(clock or "00").split(":"), "00", "00")[:3]
    try:
        second = calendar.parse(f"{date}T{hour}:{minute}:{whole_second}", of)
    except UserError as error:
        raise UserError(f"--init: expected a time such as 2020-01-05T12, got {wanted!r}: {error}; change it") from error
    if second in files.init:
        return second
    first, last = (calendar.to_text(time) for time in calendar.from_seconds(files.init[[0, -1]], of))
    raise UserError(f"--init: expected an initial time of the forecasts, {first} to {last}, got {wanted}; change it")


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


def _time_text(second: int, of: str) -> str:
    """Return `2000-10-02 06 UTC`, with minutes only where there are some."""
    date, _, clock = calendar.to_text(calendar.one_time(second, of)).partition("T")
    return f"{date} {clock[:2] if clock.endswith(':00:00') else clock[:5]} UTC"
