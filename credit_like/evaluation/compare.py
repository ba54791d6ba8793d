"""Print the runs below a folder, and compare two of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from rich.console import Console
from rich.table import Table
from rich.text import Text

from credit_like.errors import UserError
from credit_like.evaluation.results import load_results
from credit_like.evaluation.scorecard import channels, some_leads
from credit_like.naming import channel_text, hours_text, level_units_of
from credit_like.runs import Run, differing_keys, find_runs, read_run
from credit_like.terminal import fitted


def print_runs(folder: Path, console: Console | None = None) -> None:
    """Print a table of all runs below a folder. Raises UserError if there is none."""
    console = console or Console()
    runs = find_runs(folder)
    keys = differing_keys(runs)
    table = Table(box=None, pad_edge=False)
    for header in ("run", "state", "step", "loss", "best valid.", "samples/s", *(_short(key, keys) for key in keys)):
        table.add_column(header, justify="left" if header in ("run", "state") else "right")
    for run in runs:
        cells = [str(run.folder.relative_to(folder)), run.state, _cell(run.step), _cell(run.loss), _cell(run.best)]
        cells += [_cell(run.samples_per_second), *(_cell(run.keys.get(key)) for key in keys)]
        table.add_row(*map(Text, cells))
    headers = [str(column.header) for column in table.columns]
    left_out = fitted(console, table, headers[5:])
    console.print(table)
    if left_out:
        console.print(f"not shown in {console.width} columns: {', '.join(left_out)}", markup=False, highlight=False)


def print_comparison(first: Path, second: Path, console: Console | None = None) -> None:
    """Print in what two runs differ: their experiments, their losses, and the RMSE of the second over that of the first.

    Raises UserError if one of the folders holds no run.
    """
    console = console or Console()
    runs = compared_runs(first, second)
    table = Table("", *names_of(first, second), box=None, pad_edge=False)
    for label, values in facts(runs):
        table.add_row(*map(Text, (label, *values)))
    fitted(console, table, [])
    console.print(table)
    scores = [scores_of(folder) for folder in (first, second)]
    if scores[0] is None or scores[1] is None:
        lacking = [str(folder) for folder, found in zip((first, second), scores, strict=True) if found is None]
        console.print(f"no scores in {', '.join(lacking)}; run `credit-like evaluate`", markup=False, highlight=False)
        return
    _print_ratios(scores[0], scores[1], console)


def compared_runs(first: Path, second: Path) -> list[Run]:
    """Return two runs. Raises UserError if one of the folders holds none."""
    for folder in (first, second):
        if not any((folder / name).is_file() for name in ("status.json", "log.jsonl")):
            raise UserError(f"--compare: expected the folder of a run, got {folder}; change it")
    return [read_run(folder) for folder in (first, second)]


def names_of(first: Path, second: Path) -> tuple[str, str]:
    """Return the paths without the folders that both are in, so that the columns of a table are narrow."""
    whole = first.resolve(), second.resolve()
    common = Path(os.path.commonpath([path.parent for path in whole]))
    return str(whole[0].relative_to(common)), str(whole[1].relative_to(common))


def facts(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the progress of runs, and the values of the keys in which their experiments differ, as text."""
    rows = [
        ("state", [run.state for run in runs]),
        ("step", [_cell(run.step) for run in runs]),
        ("loss", [_cell(run.loss) for run in runs]),
        ("best validation loss", [_cell(run.best) for run in runs]),
        ("samples/s", [_cell(run.samples_per_second) for run in runs]),
    ]
    return [*rows, *((key, [_cell(run.keys.get(key)) for run in runs]) for key in differing_keys(runs))]


def scores_of(folder: Path) -> xr.Dataset | None:
    """Return the scores of a run, or None if it has none."""
    return load_results(folder / "evaluation") if (folder / "evaluation" / "model.nc").is_file() else None


@dataclass(frozen=True)
class Ratio:
    """An RMSE over another; NaN where one is not known."""

    value: float
    is_apart: bool
    """Whether the bounds of the two do not overlap."""


def ratios(
    first: xr.Dataset, second: xr.Dataset, every: bool = False
) -> tuple[list[np.timedelta64], list[tuple[str, list[Ratio]]], bool]:
    """Return leads, the RMSE of the second over that of the first at them by channel, and whether both have bounds.

    The leads are some, or every one, of those that both have.
    """
    common = np.intersect1d(first["lead_time"].values, second["lead_time"].values)
    leads = list(common) if every else some_leads(common)
    theirs = dict(channels(second))
    bounded = all("rmse_low" in results["metric"].values for results in (first, second))
    rows = []
    for name, ours in channels(first):
        if name in theirs:
            pairs = [[one.sel(source="model", lead_time=lead) for one in (ours, theirs[name])] for lead in leads]
            rows.append((name, [_ratio(a, b, bounded) for a, b in pairs]))
    return leads, rows, bounded


def _ratio(first: xr.DataArray, second: xr.DataArray, bounded: bool) -> Ratio:
    def of(scores: xr.DataArray, metric: str) -> float:
        return float(scores.sel(metric=metric))

    a, b = of(first, "rmse"), of(second, "rmse")
    apart = bounded and (
        of(first, "rmse_high") < of(second, "rmse_low") or of(second, "rmse_high") < of(first, "rmse_low")
    )
    return Ratio(b / a if a > 0 else np.nan, bool(apart))


def _print_ratios(first: xr.Dataset, second: xr.Dataset, console: Console) -> None:
    """Print RMSE ratios at the leads that both have; `*` where the bounds of the two do not overlap."""
    leads, rows, bounded = ratios(first, second)
    if not leads:
        console.print("the scores have no lead in common")
        return
    table = Table(
        title="RMSE of the second over that of the first; below 1 the second is better", box=None, pad_edge=False
    )
    table.add_column("variable")
    for lead in leads:
        table.add_column(hours_text(lead), justify="right")
    for name, found in rows:
        cells = [
            Text(
                f"{one.value:.2f}{'*' if one.is_apart else ''}" if np.isfinite(one.value) else "–",
                style="green" if one.value < 1 else "red",
            )
            for one in found
        ]
        table.add_row(channel_text(name, level_units_of(first)), *cells)
    fitted(console, table, [hours_text(lead) for lead in leads[1:]])
    console.print(table)
    if bounded:
        console.print("* the 95 % intervals do not overlap", highlight=False)
    else:
        console.print("set evaluation.bootstrap in both for intervals", highlight=False)


def _short(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a dotted key that no other key has."""
    parts = key.split(".")
    for number in range(1, len(parts)):
        end = ".".join(parts[-number:])
        if sum(other == end or other.endswith("." + end) for other in keys) == 1:
            return end
    return key


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
