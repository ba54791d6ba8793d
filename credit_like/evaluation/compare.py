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

from credit_like.errors import UserError, cut
from credit_like.evaluation.frames import by_init_frame
from credit_like.evaluation.results import load_results
from credit_like.evaluation.scorecard import channels, some_leads
from credit_like.evaluation.significance import refuse_other_units, score_differences
from credit_like.naming import channel_text, hours_text, level_units_of
from credit_like.runs import Run, differing_keys, find_runs, read_run
from credit_like.terminal import fitted, plain_console

_VAGUE = ("start", "end", "interval", "times", "type", "path", "valid", "test", "train")
"""Ends of keys that mean little by themselves."""
_WIDEST = 40
"""Characters of an experiment's value in the table of all runs; a comparison shows it whole."""


def print_runs(folder: Path, console: Console | None = None) -> None:
    """Print a table of all runs below a folder. Raises UserError if there is none."""
    console = console or plain_console()
    runs = find_runs(folder)
    keys = differing_keys(runs)
    table = Table(box=None, pad_edge=False)
    phases = any(run.phase is not None for run in runs)
    first = ("run", "state", *(["phase"] if phases else []), "step", "loss", "best valid.")
    for header in (*first, "samples/s", *(_short(key, keys) for key in keys)):
        table.add_column(header, justify="left" if header in ("run", "state") else "right")
    for run in runs:
        cells = [str(run.folder.relative_to(folder)), run.state, *([_cell(run.phase)] if phases else [])]
        cells += [_cell(run.step), _cell(run.loss), _cell(run.best), _cell(run.samples_per_second)]
        cells += [*(cut(_cell(run.keys.get(key)), _WIDEST) for key in keys)]
        table.add_row(*cells)
    headers = [str(column.header) for column in table.columns]
    left_out = fitted(console, table, headers[len(first) :], folded=["run"])
    console.print(table)
    if left_out:
        console.print(f"not shown in {console.width} columns: {', '.join(left_out)}")


def print_comparison(first: Path, second: Path, console: Console | None = None) -> None:
    """Print how two runs differ: their experiments, their losses, and the RMSE of the second over that of the first.

    Raises UserError if one of the folders holds no run.
    """
    console = console or plain_console()
    runs = compared_runs(first, second)
    table = Table("", *names_of(first, second), box=None, pad_edge=False)
    for label, values in facts(runs):
        table.add_row(label, *values)
    fitted(console, table, [], folded=names_of(first, second))
    console.print(table)
    scores = [scores_of(folder) for folder in (first, second)]
    if scores[0] is None or scores[1] is None:
        lacking = [str(folder) for folder, found in zip((first, second), scores, strict=True) if found is None]
        console.print(f"no scores in {', '.join(lacking)}; run `credit-like evaluate`")
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
        *([("phase", [_cell(run.phase) for run in runs])] if any(run.phase is not None for run in runs) else []),
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
    """The RMSE of the second run over that of the first, and their difference; NaN where one is not known."""

    value: float
    difference: float = np.nan
    low: float = np.nan
    high: float = np.nan
    """Ends of the 95 % interval of the difference, in its units."""
    half: float = np.nan
    """Half the width of that interval, as a fraction of the RMSE of the first run."""

    @property
    def is_significant(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def digits(self) -> int:
        """Decimal places to show: two, or up to four so that the interval is not 0."""
        return int(np.clip(-np.floor(np.log10(self.half)), 2, 4)) if self.half > 0 else 2


def ratios(
    first: xr.Dataset, second: xr.Dataset, every: bool = False
) -> tuple[list[np.timedelta64], list[tuple[str, list[Ratio]]], int]:
    """Return leads, the RMSE of the second over that of the first at them by channel, and how many times are paired.

    The leads are some, or every one, of those that both have. Both RMSE are over the initial times that both have. Their
    number is 0 where there are none or the scores do not hold them: the RMSE are then those of each run, without intervals.
    Raises UserError for a variable that is in different units.
    """
    common = np.intersect1d(first["lead_time"].values, second["lead_time"].values)
    leads = list(common) if every else some_leads(common)
    theirs = dict(channels(second))
    for name, array in first.data_vars.items():
        if "metric" in array.dims and name in second:
            refuse_other_units(str(name), *(str(one.attrs.get("units", "")) for one in (array, second[name])))
    differences, times = _differences(first, second)
    rows = []
    for name, ours in channels(first):
        if name not in theirs:
            continue
        rmse = [one.sel(source="model", metric="rmse", lead_time=leads).values for one in (ours, theirs[name])]
        paired = [differences.get((name, lead / np.timedelta64(1, "h"))) for lead in leads]
        rows.append((name, [_ratio(*(known or each)) for known, *each in zip(paired, *rmse, strict=True)]))
    return leads, rows, times


def _differences(first: xr.Dataset, second: xr.Dataset) -> tuple[dict[tuple[str, float], tuple[float, ...]], int]:
    """Return (first, second, low, high) over the initial times that both have by channel and lead in hours, and their number."""
    if not all("statistic" in one.coords for one in (first, second)):
        return {}, 0
    frame = score_differences(*(by_init_frame(one, "model", "rmse", "global") for one in (first, second)))
    names = frame["variable"].where(frame["level"].isna(), frame["variable"] + frame["level"].map("@{:g}".format))
    paired = frame[["first", "second", "low", "high"]].itertuples(index=False, name=None)
    known = dict(zip(zip(names, frame["lead_hours"], strict=True), paired, strict=True))
    return known, int(frame["times"].max()) if len(frame) else 0


def _ratio(first: float, second: float, low: float = np.nan, high: float = np.nan) -> Ratio:
    if not first > 0:
        return Ratio(np.nan)
    return Ratio(float(second / first), float(second - first), low, high, float((high - low) / 2 / first))


def _print_ratios(first: xr.Dataset, second: xr.Dataset, console: Console) -> None:
    """Print RMSE ratios at the leads that both have, with half their intervals and a star where the difference is significant."""
    leads, rows, times = ratios(first, second)
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
        table.add_row(channel_text(name, level_units_of(first)), *map(_ratio_text, found))
    fitted(console, table, [hours_text(lead) for lead in leads[1:]], folded=["variable"])
    console.print(table)
    console.print(significance_text(times))


def significance_text(times: int) -> str:
    """Return a sentence on the intervals, or on why there are none."""
    if times:
        return (
            f"± half of the 95 % interval of the difference, paired over {times} common initial times with the "
            "correlation of successive ones; * the interval excludes 0"
        )
    return "no intervals: run `credit-like evaluate` of both again, with initial times that both have"


def _ratio_text(ratio: Ratio) -> Text:
    if not np.isfinite(ratio.value):
        return Text("–")
    digits = ratio.digits
    half = f" ±{ratio.half:.{digits}f}" if np.isfinite(ratio.half) else ""
    star = "*" if ratio.is_significant else " " if half else ""
    colour = "green" if ratio.value < 1 else "red"
    return Text(f"{ratio.value:.{digits}f}{half}{star}", style=colour if star != " " else "")


def _short(key: str, keys: Sequence[str]) -> str:
    """Return the shortest end of a dotted key that is unique and understandable."""
    parts = key.split(".")
    for number in range(2 if parts[-1] in _VAGUE else 1, len(parts)):
        end = ".".join(parts[-number:])
        if sum(other == end or other.endswith("." + end) for other in keys) == 1:
            return end
    return key


def _cell(value: object) -> str:
    """Return a value of an experiment as short text without quotes.

    A period is two times, and a variable that has a name alone is that. Other mappings have braces, without keys that have
    no value.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    if isinstance(value, dict):
        if value.keys() == {"start", "end"}:
            return f"{_cell(value['start'])} to {_cell(value['end'])}"
        texts = {
            key: f"[{text}]" if isinstance(one, list) else text for key, one in value.items() if (text := _cell(one))
        }
        if texts.keys() <= {"name"}:
            return texts.get("name", "")
        return f"{{{', '.join(': '.join(pair) for pair in texts.items())}}}"
    return str(value).removesuffix("T00:00:00")
