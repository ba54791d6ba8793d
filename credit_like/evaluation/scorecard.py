"""Scores as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import xarray as xr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from credit_like.naming import (
    channel_text,
    exponent_of,
    exponent_text,
    hours_text,
    level_units_of,
    region_text,
    times_text,
    units_text,
)
from credit_like.terminal import fitted, plain_console

_HOURS = (6, 24, 72, 120, 240)
_REFERENCES = ("persistence", "climatology")
IN_UNITS = ("rmse", "bias", "mae", "crps", "fair-crps", "spread", "activity")
"""Metrics in the units of their variable."""


def print_scorecard(results: xr.Dataset, console: Console | None = None) -> None:
    """Print the table of scores; columns that do not fit are left out and named below it."""
    console = console or plain_console()
    if not set(labels(results)) & set(map(str, results["metric"].values)):
        console.print("none of the metrics is shown in the table of scores; report.html and the files have all")
        return
    table = scorecard(results)
    headers = [str(column.header) for column in table.columns]
    left_out = fitted(console, table, headers[3:], folded=["variable"])
    console.print(table)
    if left_out:
        console.print(f"not shown in {console.width} columns: {', '.join(left_out)}; scores.csv has all")


def scorecard(results: xr.Dataset) -> Table:
    """Return a table of the RMSE of the model and all other sources, and of its other labelled metrics, for a few leads.

    Numbers of one row of variables share a power of ten. A green number is better than both persistence and
    climatology, a red one worse than one of them. Without the metric rmse, the table has the other metrics alone.
    """
    others = [str(name) for name in results["source"].values if name != "model"]
    metrics = set(map(str, results["metric"].values))
    has_rmse, in_units = "rmse" in metrics, [name for name in IN_UNITS if name in metrics]
    shown = {metric: label for metric, label in labels(results).items() if metric in metrics and metric != "rmse"}
    over = f"over {times_text(results)}, {region_text(results, 'global')}"
    more = f"{' and '.join(shown.values())} of model" if shown else ""
    table = Table(title=f"RMSE {over}{'; ' * bool(more)}{more}" if has_rmse else f"{more} {over}")
    table.add_column("variable", no_wrap=True)
    for heading in ("lead", *(("model", *others, "/ pers.") if has_rmse else ()), *shown.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    leads = some_leads(results["lead_time"].values)
    for name, scores in channels(results):
        rows = scores.sel(lead_time=leads, source=["model", *others])
        # An unstable forecast has no part in the power of ten where there is a reference.
        known = [name for name in _REFERENCES if name in others] or ["model", *others]
        exponent = exponent_of(rows.sel(metric=in_units[0], source=known).values) if in_units else 0
        head = [
            channel_text(name, level_units_of(results)),
            _unit(str(results[name.partition("@")[0]].attrs.get("units", "")), exponent),
        ]
        for number, lead in enumerate(leads):
            here = rows.sel(lead_time=lead)
            row: list[str | Text] = [head[number] if number < len(head) else "", hours_text(lead)]
            if has_rmse:
                rmse = {which: float(here.sel(source=which, metric="rmse")) for which in ("model", *others)}
                ratio = rmse["model"] / rmse["persistence"] if rmse.get("persistence") else np.nan
                row += [_coloured(rmse, exponent), *(_number(rmse[other], exponent) for other in others)]
                row.append("–" if not np.isfinite(ratio) else f"{ratio:.2f}" if abs(ratio) < 1e6 else f"{ratio:.2e}")
            row += [
                _number(float(here.sel(source="model", metric=metric)), exponent if metric in IN_UNITS else 0)
                for metric in shown
            ]
            table.add_row(*row, end_section=number == len(leads) - 1)
    return table


def channels(results: xr.Dataset) -> Iterator[tuple[str, xr.DataArray]]:
    """Yield (name, scores over source, metric and lead_time) of the globe for every variable and level that was scored."""
    for name, array in results.data_vars.items():
        if "metric" not in array.dims:
            continue
        one = array.sel(region="global")
        if "level" not in one.dims:
            yield str(name), one
            continue
        for level in one["level"].values:
            scores = one.sel(level=level)
            if bool(np.isfinite(scores).any()):
                yield f"{name}@{level:g}", scores


def labels(results: xr.Dataset) -> dict[str, str]:
    """Return the labels of the metrics that have one and are therefore plotted and tabulated."""
    found: dict[str, str] = json.loads(results.attrs.get("labels", '{"rmse": "RMSE", "acc": "ACC", "bias": "bias"}'))
    return found


def some_leads(leads: np.ndarray) -> list[np.timedelta64]:
    """Choose from many leads the first, the last, and those usually quoted."""
    if len(leads) <= 6:
        return list(leads)
    quoted = [np.timedelta64(hours, "h") for hours in _HOURS]
    return sorted({leads[0], leads[-1], *(lead for lead in leads if lead in quoted)})


def _unit(units: str, exponent: int) -> str:
    power = f"{exponent_text(exponent)} " if exponent else ""
    return f"  {power}{units_text(units)}".rstrip()


def _number(value: float, exponent: int = 0) -> str:
    """Format in units of 10^exponent with three significant digits; a number of a million or more has an exponent."""
    scaled = value / 10.0**exponent
    if not np.isfinite(scaled):
        return "–"
    if scaled == 0:
        return "0"
    if abs(scaled) >= 1e6:
        return f"{scaled:.2e}"
    return f"{scaled:.{max(0, min(4, 2 - int(np.floor(np.log10(abs(scaled))))))}f}"


def _coloured(rmse: dict[str, float], exponent: int) -> Text:
    references = [rmse[name] for name in _REFERENCES if np.isfinite(rmse.get(name, np.nan))]
    text = _number(rmse["model"], exponent)
    if not references or not np.isfinite(rmse["model"]):
        return Text(text)
    return Text(text, style="green" if rmse["model"] < min(references) else "red")
