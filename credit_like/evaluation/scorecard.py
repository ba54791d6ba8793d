"""Scores as a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import xarray as xr
from rich.table import Table
from rich.text import Text

_HOURS = (6, 24, 72, 120, 240)
_REFERENCES = ("persistence", "climatology")


def scorecard(results: xr.Dataset, source: str = "model", region: str = "global") -> Table:
    """Return a table of the RMSE of `source` and all other sources, and of its other labelled metrics, for a few leads.

    A green number is better than both persistence and climatology, a red one worse than one of them.
    """
    others = [str(name) for name in results["source"].values if name != source]
    metrics = set(map(str, results["metric"].values))
    times = int(results["initial_times"])
    shown = {metric: label for metric, label in labels(results).items() if metric in metrics and metric != "rmse"}
    more = f"; {' and '.join(shown.values())} of {source}" if shown else ""
    table = Table(title=f"RMSE over {times} initial times, {region}{more}")
    table.add_column("variable", no_wrap=True)
    table.add_column("lead", justify="right", no_wrap=True)
    for name in (source, *others):
        table.add_column(name, justify="right", min_width=5)
    table.add_column("/ pers.", justify="right", no_wrap=True)
    for label in shown.values():
        table.add_column(label, justify="right", no_wrap=True)
    for name, scores in channels(results, region):
        for number, lead in enumerate(_some(results["lead_time"].values)):
            here = scores.sel(lead_time=lead)
            rmse = {which: float(here.sel(source=which, metric="rmse")) for which in (source, *others)}
            row: list[str | Text] = [name if number == 0 else "", lead_text(lead), _coloured(rmse, source)]
            row += [_number(rmse[other]) for other in others]
            ratio = rmse[source] / rmse["persistence"] if rmse.get("persistence") else np.nan
            row.append(f"{ratio:.2f}" if np.isfinite(ratio) else "–")
            row += [_number(float(here.sel(source=source, metric=metric))) for metric in shown]
            table.add_row(*row, end_section=number == len(_some(results["lead_time"].values)) - 1)
    return table


def channels(results: xr.Dataset, region: str = "global") -> Iterator[tuple[str, xr.DataArray]]:
    """Yield (name, scores over source, metric and lead_time) of every variable and level that was scored."""
    for name, array in results.data_vars.items():
        if "metric" not in array.dims:
            continue
        one = array.sel(region=region)
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


def lead_text(lead: np.timedelta64) -> str:
    """Format a lead as `6 h` or `3 d`."""
    hours = lead / np.timedelta64(1, "h")
    return f"{hours / 24:g} d" if hours >= 48 and hours % 24 == 0 else f"{hours:g} h"


def _some(leads: np.ndarray) -> list[np.timedelta64]:
    """Choose from many leads the first, the last, and those usually quoted."""
    if len(leads) <= 6:
        return list(leads)
    quoted = [np.timedelta64(hours, "h") for hours in _HOURS]
    return sorted({leads[0], leads[-1], *(lead for lead in leads if lead in quoted)})


def _number(value: float) -> str:
    """Format with three significant digits, without an exponent where that is readable."""
    if not np.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.1e}"


def _coloured(rmse: dict[str, float], source: str) -> Text:
    references = [rmse[name] for name in _REFERENCES if np.isfinite(rmse.get(name, np.nan))]
    if not references or not np.isfinite(rmse[source]):
        return Text(_number(rmse[source]))
    return Text(_number(rmse[source]), style="green" if rmse[source] < min(references) else "red")
