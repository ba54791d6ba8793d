"""The report: scores and maps as one self-contained HTML page that needs no network.

The page contains its data as base64: scores as float32, fields as one byte per point, which is finer than a colour map
can show. Data too large for a page (0.25° fields at every level and lead) are thinned, and the page states this.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib import colormaps
from numpy.typing import NDArray

import credit_like
from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.evaluation.charts import field_shades
from credit_like.evaluation.coasts import own_coast
from credit_like.evaluation.derived import forecast_files
from credit_like.evaluation.html_page import render, save_page
from credit_like.evaluation.projections import unrolled
from credit_like.evaluation.scorecard import channels
from credit_like.evaluation.sources import ForecastFiles, Truth, open_forecast
from credit_like.naming import channel_text, level_text, level_units_of, region_text, times_text, units_text
from credit_like.variables import Variable, Variables

MISSING = 255
"""Byte of a point without data; 0 … 254 run from the lower to the upper end of the colour scale."""
_MAP_BYTES = 12 * 2**20
"""Bound of the points of all maps together."""
_ROWS, _COLUMNS = 181, 360  # a map on a page cannot show more points than this
_FEW_LEADS, _FEW_LEVELS = 21, 3
_STAMPS, _STAMP_COLUMNS = 12, 90  # members shown, and the most points of one along a row


def write_report(
    path: Path,
    results: xr.Dataset,
    forecasts: Path | xr.Dataset,
    truth: FieldStore,
    variables: Variables,
) -> Path:
    """Write the page, atomically; `results` as returned by `evaluate`, maps from the first initial time of the forecasts."""
    dataset = open_forecast(forecasts) if isinstance(forecasts, Path) else forecasts
    files = forecast_files(dataset, truth, "the forecasts")
    units = {variable.name: units_text(str(truth.attrs(variable).get("units", ""))) for variable in variables.outputs}
    data = {
        "experiment": str(results.attrs.get("experiment", "")),
        "made": f"credit-like {credit_like.__version__}",
        "initial_times": int(results["initial_times"]),
        "times_text": times_text(results),
        "scores": describe_scores(results, units),
        "spectra": describe_spectra(results),
        "ensemble": describe_ensemble(results),
        "maps": describe_maps(files, truth, variables),
    }
    return save_page(page(data), path)


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML page that shows `data` (see `write_report`)."""
    return render("report.html", data, f"Forecast scores of {data['experiment']}")


def describe_scores(results: xr.Dataset, units: Mapping[str, str]) -> dict[str, Any]:
    """Return all scores: per channel float32 over (source, metric, region, lead)."""
    rows = []
    for name, _ in channels(results):
        array, variable, level = _channel(results, name)
        values = array.transpose("source", "metric", "region", "lead_time").values
        row = {"name": name, "title": channel_text(name, level_units_of(results)), "variable": variable, "level": level}
        row["level_text"] = None if level is None else level_text(level, level_units_of(results))
        unit = units.get(variable) or units_text(str(array.attrs.get("units", "")))
        rows.append({**row, "unit": unit, "values": _floats(values)})
    return {
        "sources": [str(name) for name in results["source"].values],
        "provenance": [str(text) for text in results["provenance"].values],
        "metrics": [str(name) for name in results["metric"].values],
        "regions": [region_text(results, str(name)) for name in results["region"].values],
        "whole": region_text(results, "global"),
        "leads": _hours(results["lead_time"].values),
        "channels": rows,
    }


def describe_spectra(results: xr.Dataset) -> dict[str, Any]:
    """Return zonal energy spectra of the whole grid at up to four leads: per channel float32 over (source, lead, wavenumber).

    They are in the squared units of the variable times metres. `last` is the last wavenumber of the data, by the spectrum of
    persistence, which is that of the truth.
    """
    leads = _spread(results.sizes["lead_time"], 4)
    sources = [str(name) for name in results["source"].values]
    rows = []
    for name, _ in channels(results):
        variable = name.split("@")[0]
        if f"{variable}_spectrum" in results:
            array, _, _ = _channel(results, name, "_spectrum")
            array = array.sel(region="global").isel(lead_time=leads)
            values = array.transpose("source", "lead_time", "zonal_wavenumber").values
            last = (
                truncation(values[sources.index("persistence")]) if "persistence" in sources else values.shape[-1] - 1
            )
            row = {"name": name, "wavenumbers": values.shape[-1], "last": last, "values": _floats(values)}
            units = str(results[variable].attrs.get("units", ""))
            rows.append({**row, "unit": f"{units_text(units, 2)} m".strip() if units.strip() else ""})
    return {"leads": _hours(results["lead_time"].values[leads]), "channels": rows}


def truncation(energy_LK: NDArray[np.floating]) -> int:
    """Return the last wavenumber that the data resolve, from spectra of analyses.

    Above it the spectrum falls by two decades at once and stays below: fields that are smooth by construction, such as those
    of a spectral model, have no energy there. Without such a fall it is the last one.
    """
    energy = energy_LK.astype(np.float64)
    there = np.isfinite(energy[:, 1:-1]).any(1)
    if energy.shape[-1] < 4 or not there.any():
        return energy.shape[-1] - 1
    most = np.nanmax(energy[there], 0)
    for k in range(2, len(most) - 1):
        if most[k] > 0 and np.nanmax(most[k + 1 :], initial=0.0) < 1e-2 * most[k]:
            return k
    return len(most) - 1


def describe_ensemble(results: xr.Dataset) -> dict[str, Any]:
    """Return rank histograms, reliability and Brier scores over the whole grid, each per channel as float32.

    `rank`: (source, lead, rank) and `reliability`: (source, lead, event, bin, part) at up to six leads; `brier`:
    (source, lead, event) at all leads. What was not computed is absent.
    """
    leads = _spread(results.sizes["lead_time"], 6)
    kinds = {
        "rank": ("_rank_histogram", ("rank",), leads),
        "reliability": ("_reliability", ("threshold", "probability_bin", "reliability_part"), leads),
        "brier": ("_brier", ("threshold",), slice(None)),
    }
    rows = []
    for name, _ in channels(results):
        row: dict[str, Any] = {"name": name}
        for kind, (suffix, last, chosen) in kinds.items():
            if f"{name.split('@')[0]}{suffix}" in results:
                array, _, _ = _channel(results, name, suffix)
                array = array.sel(region="global").isel(lead_time=chosen)
                row[kind] = _floats(array.transpose("source", "lead_time", *last).values)
        if len(row) > 1:
            rows.append(row)
    return {
        "leads": _hours(results["lead_time"].values[leads]),
        "ranks": results.sizes.get("rank", 0),
        "bins": results.sizes.get("probability_bin", 0),
        "events": [str(label) for label in results["threshold"].values] if "threshold" in results.coords else [],
        "channels": rows,
    }


@dataclass(frozen=True)
class Thinning:
    """The part of the forecast shown on a page: every `stride`-th point, some leads, and some levels of each variable."""

    stride: int
    leads: tuple[int, ...]
    levels: int

    def of(self, levels: Sequence[int]) -> list[int]:
        """Return the levels of one variable that are on the page."""
        return [levels[i] for i in _spread(len(levels), self.levels)]


def thin(height: int, width: int, leads: int, levels: Sequence[int], most: int, members: int = 1) -> Thinning:
    """Return the most detailed choice within `most` bytes (three per point; of an ensemble one more, and its stamps).

    Points are dropped first, then leads, then levels. `levels` gives the number of levels of every variable. At least
    one lead, one level and every eighth point always remain.
    """
    stride = max(1, -(-height // _ROWS), -(-width // _COLUMNS))
    wanted = [(stride, leads, max(levels, default=1)), (stride, _FEW_LEADS, max(levels, default=1))]
    wanted += [(stride, _FEW_LEADS, _FEW_LEVELS), (stride, _FEW_LEADS // 2 + 1, _FEW_LEVELS)]
    wanted += [(stride * more, _FEW_LEADS // 2 + 1, _FEW_LEVELS) for more in (2, 3, 4)]
    wanted += [(stride * 4, 5, 1), (stride * 8, 2, 1), (stride * 8, 1, 1)]
    for stride, n_leads, n_levels in wanted:
        rows, columns = -(-height // stride), -(-width // stride)
        points = 3 * rows * columns
        if members > 1:
            apart = _stamp_stride(columns)
            points += rows * columns + min(members, _STAMPS) * -(-rows // apart) * -(-columns // apart)
        if points * min(n_leads, leads) * sum(min(n_levels, n) for n in levels) <= most:
            break
    return Thinning(stride, tuple(_spread(leads, n_leads)), n_levels)


def _stamp_stride(columns: int) -> int:
    """Return the distance, in points of a map of so many columns, between the points of a stamp."""
    return -(-columns // _STAMP_COLUMNS)


def describe_maps(files: ForecastFiles, truth: FieldStore, variables: Variables) -> dict[str, Any]:
    """Return truth, forecast (the mean of an ensemble) and error from the first initial time, one byte per point.

    Of an ensemble also the spread (standard deviation, ddof = 1) and up to twelve members, at fewer points.
    """
    grid, second = truth.grid, int(files.init[0])
    leads = [int(lead) for lead in files.leads if lead > 0]
    shown = [variable for variable in variables.outputs if files.levels_of(variable)]
    counts = [len(files.levels_of(variable)) for variable in shown]
    thinned = thin(grid.height, grid.width, len(leads), counts, _MAP_BYTES, files.members)
    leads = [leads[i] for i in thinned.leads]
    rows, columns = slice(None, None, thinned.stride), slice(None, None, thinned.stride)
    entries = []
    for variable in shown:
        levels = thinned.of(files.levels_of(variable))
        entries += _entries(variable, levels, files, Truth(truth), second, leads, (rows, columns))
    valid = calendar.from_seconds(second + np.array(leads, np.int64), truth.calendar)
    return {
        "init": calendar.to_text(calendar.one_time(second, truth.calendar)),
        "valid": [calendar.to_text(time) for time in valid],
        "leads": [lead / 3600 for lead in leads],
        "members": files.members,
        "stamps": {
            "members": _spread(files.members, _STAMPS) if files.members > 1 else [],
            "stride": _stamp_stride(len(grid.longitude[columns])),
        },
        "stride": thinned.stride,
        "left_out": {"leads": int((files.leads > 0).sum()) - len(leads), "levels": sum(counts) - len(entries)},
        "latitude": [round(float(x), 4) for x in grid.latitude[rows]],
        "longitude": [round(float(x), 4) for x in unrolled(grid)[columns]],
        "entries": entries,
        "coast": coast(truth),
        "colours": {name: _colours(name) for name in ("viridis", "PuOr_r", "YlGnBu", "RdBu_r", "magma")},
    }


def _entries(
    variable: Variable,
    levels: Sequence[int],
    files: ForecastFiles,
    truth: Truth,
    second: int,
    leads: Sequence[int],
    points: tuple[slice, slice],
) -> list[dict[str, Any]]:
    """Return one entry per level, reading lead by lead, so that only the fields on the page are in memory."""
    shown, analysed, spread, stamps = [], [], [], []
    chosen = _spread(files.members, _STAMPS)
    for lead in leads:
        forecast = files.fields(second, [lead], variable, levels)
        assert forecast is not None, "files without the variable have no levels of it"
        members_MKHW = forecast[:, 0][..., points[0], points[1]]
        shown.append(members_MKHW.mean(0).astype(np.float32))
        if files.members > 1:
            spread.append(members_MKHW.std(0, ddof=1).astype(np.float32))
            apart = _stamp_stride(members_MKHW.shape[-1])
            stamps.append(members_MKHW[chosen][..., ::apart, ::apart].astype(np.float32))
        there = truth.at(np.array([second + lead]), variable, levels)[0]
        analysed.append(there[..., points[0], points[1]].astype(np.float32))
    forecast_LKHW, truth_LKHW = np.stack(shown), np.stack(analysed)
    result, level_units = [], truth.store.level_units(variable)
    for k, level in enumerate(levels):
        field, real = forecast_LKHW[:, k], truth_LKHW[:, k]
        shades = field_shades(real, np.concatenate([field, real]))
        low, high = _scale(np.concatenate([field, real]))
        if shades.is_diverging:
            low, high = -max(-low, high), max(-low, high)
        most = [_scale(np.abs(error))[1] for error in field - real]
        result.append(
            {
                "variable": variable.name,
                "level": variable.levels[level] if variable.levels else None,
                "level_text": level_text(variable.levels[level], level_units) if variable.levels else None,
                "unit": units_text(str(truth.store.attrs(variable).get("units", ""))),
                "colours": shades.colours,
                "range": [low, high],
                "error_ranges": [[-one, one] for one in most],
                "truth": _bytes(real, low, high),
                "forecast": _bytes(field, low, high),
                "error": _bytes(field - real, *(np.array([[[sign * one]] for one in most]) for sign in (-1, 1))),
            }
        )
        if files.members > 1:
            deviation = np.stack(spread)[:, k]
            largest = _scale(deviation)[1]
            result[-1]["spread_range"] = [0.0, largest]
            result[-1]["spread"] = _bytes(deviation, 0.0, largest)
            result[-1]["members"] = _bytes(np.stack(stamps, 1)[:, :, k], low, high)
    return result


def coast(store: FieldStore) -> list[list[float]] | None:
    """Return the coast of the data's own land-sea mask as lines (longitude, latitude, …), or None if there is no mask."""
    lines = own_coast(store)
    return None if lines is None else [np.round(line, 2).ravel().tolist() for line in lines]


def quantise(x: NDArray[np.float32], low: float | NDArray[Any], high: float | NDArray[Any]) -> NDArray[np.uint8]:
    """Map `low` … `high`, which broadcast to `x`, to 0 … 254, clipped; `MISSING` where there is no data."""
    scaled = np.clip((x - low) / (high - low), 0, 1) * 254
    return np.where(np.isfinite(x), np.rint(np.nan_to_num(scaled)), MISSING).astype(np.uint8)


def _scale(x: NDArray[np.float32]) -> tuple[float, float]:
    """Return the ends of a colour scale, without the outermost thousandth of the points; 0 and 1 if there are none."""
    finite = x[np.isfinite(x)]
    if not finite.size:
        return 0.0, 1.0
    low, high = (float(v) for v in np.quantile(finite.astype(np.float64), [0.0005, 0.9995]))
    return (low, high) if high > low else (low, low + max(abs(low) * 1e-3, 1e-12))


def _channel(results: xr.Dataset, name: str, suffix: str = "") -> tuple[xr.DataArray, str, float | None]:
    """Return (scores, variable, level) of a channel name such as `u@500`."""
    variable, _, level = name.partition("@")
    array = results[variable + suffix]
    # Names contain the level in its shortest form, so the nearest level is the right one.
    return (
        (array.sel(level=float(level), method="nearest"), variable, float(level)) if level else (array, variable, None)
    )


def _spread(n: int, most: int) -> list[int]:
    """Return at most `most` of n positions, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int)).tolist() if n else []


def _hours(leads: NDArray[Any]) -> list[float]:
    return [float(hours) for hours in leads / np.timedelta64(1, "h")]


def _floats(x: NDArray[Any]) -> str:
    with np.errstate(over="ignore"):  # what exceeds float32 is shown as infinite
        return base64.b64encode(np.ascontiguousarray(x, "<f4").tobytes()).decode()


def _bytes(x: NDArray[np.float32], low: float | NDArray[Any], high: float | NDArray[Any]) -> str:
    return base64.b64encode(quantise(x, low, high).tobytes()).decode()


def _colours(name: str) -> str:
    """Return the 255 RGB triples of a colour map."""
    table = colormaps[name](np.linspace(0, 1, 255))[:, :3]
    return base64.b64encode((table * 255).round().astype(np.uint8).tobytes()).decode()
