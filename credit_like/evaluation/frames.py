"""Scores and training logs as pandas frames."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from credit_like.errors import UserError, reading
from credit_like.evaluation.collect import BY_INIT
from credit_like.nested import leaves
from credit_like.outputs import replacing
from credit_like.small_files import LOG_BYTES, read_small

COLUMNS = ("source", "variable", "level", "metric", "region", "lead_hours", "value", "units")
BY_INIT_COLUMNS = (*COLUMNS[:6], "statistic", "init_time", *COLUMNS[6:])


def scores_frame(results: xr.Dataset) -> pd.DataFrame:
    """Return scores as a tidy frame with `COLUMNS`; scores that are missing have no row."""
    parts = []
    for name, array in results.data_vars.items():
        if "metric" not in array.dims:
            continue
        array = array.reset_coords(drop=True)
        part = array.to_series().rename("value").dropna().reset_index()
        part["variable"] = str(name)
        part["units"] = str(array.attrs.get("units", ""))
        if "level" not in part:
            part["level"] = np.nan
        parts.append(part)
    if not parts:
        return pd.DataFrame(columns=list(COLUMNS))
    frame = pd.concat(parts, ignore_index=True)
    frame["lead_hours"] = frame["lead_time"] / pd.Timedelta(hours=1)
    return frame[list(COLUMNS)]


def by_init_frame(results: xr.Dataset, source: str, metric: str, region: str) -> pd.DataFrame:
    """Return the statistics of single initial times as a tidy frame with `BY_INIT_COLUMNS`.

    Raises UserError if there are none of this source, metric and region.
    """
    every = map(str, results["statistic"].values) if "statistic" in results.coords else ()
    statistics = [text for text in every if text.partition(".")[0] == metric]
    there = source in results["source"].values and region in results["region"].values
    if not (statistics and there):
        raise UserError(
            f"expected {metric} of {source} in {region} by initial time, got scores without; run `credit-like evaluate` "
            f"again, with {metric} in evaluation.metrics"
        )
    parts = []
    for name in [str(name) for name in results.data_vars if str(name).endswith(BY_INIT)]:
        array = results[name].sel(source=source, region=region, statistic=statistics)
        part = array.reset_coords(drop=True).to_series().rename("value")
        variable = name.removesuffix(BY_INIT)
        units = str(results[variable].attrs.get("units", ""))
        parts.append(part.dropna().reset_index().assign(variable=variable, units=units))
    frame = pd.concat(parts, ignore_index=True).assign(source=source, metric=metric, region=region)
    frame["statistic"] = frame["statistic"].str.partition(".")[2]
    frame["lead_hours"] = frame["lead_time"] / pd.Timedelta(hours=1)
    return frame.reindex(columns=list(BY_INIT_COLUMNS))


def save_scores(results: xr.Dataset, folder: Path) -> Path:
    """Write the frame of the scores to `scores.csv`."""
    path = folder / "scores.csv"
    with replacing(path) as draft:
        scores_frame(results).to_csv(draft, index=False)
    return path


def log_frame(folder: Path) -> pd.DataFrame:
    """Return the log of a run, sorted by step; a last line that is still being written is left out.

    Raises UserError if there is no log or a line of it is damaged.
    """
    path = folder / "log.jsonl"
    if not path.is_file():
        raise UserError(f"expected the folder of a run, got {folder}, which has no log.jsonl; change it")
    with reading("the log of a run", path, "remove it"):
        lines = read_small(path, LOG_BYTES).splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(dict(leaves(row, separator="/")))
        elif number < len(lines):
            raise UserError(f"expected JSON in line {number} of {path}, got {line[:60]!r}; remove the line")
    return pd.DataFrame(rows)
