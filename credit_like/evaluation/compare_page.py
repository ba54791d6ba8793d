"""Two runs side by side as one self-contained HTML page: what differs, their losses, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import credit_like
from credit_like.evaluation.compare import compared_runs, facts, names_of, ratios, scores_of, significance_text
from credit_like.evaluation.frames import log_frame
from credit_like.evaluation.html_page import render, save_page
from credit_like.evaluation.scorecard import channels
from credit_like.naming import channel_text, level_text, level_units_of, units_text
from credit_like.outputs import begins_with, check_own
from credit_like.runs import Run

_POINTS = 400
"""Most points of a curve."""
_CURVES = {"loss": "training loss", "valid_loss": "validation loss"}


def write_comparison(path: Path, first: Path, second: Path) -> Path:
    """Write the page. Raises UserError if one of the folders holds no run, or `path` is something other than such a page."""
    check_own("--html", path, "such a page", begins_with('name="generator" content="credit-like'))
    runs, names = compared_runs(first, second), names_of(first, second)
    scores = [scores_of(folder) for folder in (first, second)]
    data = {
        "names": names,
        "made": f"credit-like {credit_like.__version__}",
        "facts": [[label, *values] for label, values in facts(runs)],
        "curves": [{"title": title, "runs": [_curve(run, key) for run in runs]} for key, title in _CURVES.items()],
        "scores": _scores(scores) if all(one is not None for one in scores) else None,
        "lacking": [name for name, one in zip(names, scores, strict=True) if one is None],
    }
    return save_page(render("compare.html", data, f"{names[0]} and {names[1]}"), path)


def _curve(run: Run, key: str) -> dict[str, list[float | None]]:
    """Return a value of the log against the step, averaged over neighbours where there are many."""
    if not (run.folder / "log.jsonl").is_file():
        return {"x": [], "y": []}
    frame = log_frame(run.folder)
    if key not in frame or "step" not in frame:
        return {"x": [], "y": []}
    there = frame[["step", key]].dropna().to_numpy(np.float64)
    parts = np.array_split(there, min(len(there), _POINTS)) if len(there) else []
    means = np.array([part.mean(0) for part in parts]).reshape(-1, 2)
    return {"x": numbers(means[:, 0]), "y": numbers(means[:, 1])}


def _scores(pair: Sequence[xr.Dataset | None]) -> dict[str, Any]:
    """Return the RMSE of both at the leads that both have, their ratio, and their difference with its interval."""
    first, second = (one for one in pair if one is not None)
    leads, rows, times = ratios(first, second, every=True)
    ours, theirs = dict(channels(first)), dict(channels(second))
    entries = []
    for name, cells in rows:
        variable, _, level = name.partition("@")
        unit = units_text(str(first[variable].attrs.get("units", "")))
        entry: dict[str, Any] = {"variable": variable, "title": channel_text(name, level_units_of(first)), "unit": unit}
        entry["level"] = float(level) if level else None
        entry["level_text"] = level_text(float(level), level_units_of(first)) if level else None
        entry["ratios"] = [[*numbers(np.array([c.value, c.half])), c.is_significant, c.digits] for c in cells]
        ends = {"y": "difference", "low": "low", "high": "high"}
        entry["difference"] = {key: numbers(np.array([getattr(c, of) for c in cells])) for key, of in ends.items()}
        entry["runs"] = [_bounds(scores, leads) for scores in (ours[name], theirs[name])]
        entries.append(entry)
    hours = [float(lead / np.timedelta64(1, "h")) for lead in leads]
    return {"leads": hours, "times": times, "note": significance_text(times), "channels": entries}


def _bounds(scores: xr.DataArray, leads: Sequence[np.timedelta64]) -> dict[str, list[float | None]]:
    """Return the RMSE and the ends of its interval, where it has one."""
    there = set(scores["metric"].values)
    wanted = {key: name for key, name in (("y", "rmse"), ("low", "rmse_low"), ("high", "rmse_high")) if name in there}
    at = scores.sel(source="model", lead_time=list(leads))
    return {key: numbers(at.sel(metric=name).values) for key, name in wanted.items()}


def numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return numbers that JSON can hold: None where one is not finite."""
    return [float(value) if np.isfinite(value) else None for value in values]
