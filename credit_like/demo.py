"""The demonstration: train, forecast and score on a built-in data set, printing the command of every stage."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import xarray as xr
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from credit_like import build
from credit_like.check import checked_experiment
from credit_like.evaluation.results import evaluation_folder, load_results
from credit_like.evaluation.scorecard import channels
from credit_like.naming import channel_text, hours_text, level_units_of
from credit_like.outputs import begins_with, check_own
from credit_like.schema.experiment import Experiment
from credit_like.terminal import fitted, plain_console

REPORT = "report.md"
_SUMMARY = "Trained, forecast and scored in"
DETERMINISTIC = """# The deterministic model from which the members of ensemble.yml start: a short training.
include: [demo.yml]
name: demo-deterministic
trainer: {epochs: 2}
inference: {init: [2000-09-27, 2000-10-31, 48h], lead: 3d}
"""


def run(save_loc: Path, ensemble: bool = False) -> int:
    """Make data, fit statistics, train, roll out, score and plot; return the exit status.

    `ensemble`: then give the trained model noise, train it on the score of its members, and score their forecasts. An
    interrupted demonstration continues where it stopped, like any run.
    """
    console = plain_console()
    began = time.monotonic()

    def say(what: str, command: str, file: Path) -> None:
        console.rule(Text(what, "bold"))
        console.print(
            f"{time.monotonic() - began:5.0f} s   to run only this stage: credit-like {command} {file}", style="dim"
        )

    def perform(
        stages: Sequence[tuple[str, str, Callable[[Experiment], int]]], experiment: Experiment, of: Path
    ) -> int:
        for announced, command, stage in stages:
            say(announced, command, of)
            if status := stage(experiment):
                return status
        return 0

    file, *others = experiment_files(save_loc, ensemble)
    say("Data: integrate two-layer shallow-water weather on the sphere (once), and check the experiment", "check", file)
    experiment: Experiment = checked_experiment(file)[0]
    beginning = [
        ("Statistics of the training period", "preprocess", build.preprocess),
        ("Training a small WXFormer", "train", _train),
        ("Forecasts of the test period", "rollout", build.rollout),
    ]
    end = [
        ("Scores beside persistence and climatology", "evaluate", build.evaluate),
        ("Curves and maps", "plot", _plot),
    ]
    if status := perform(beginning if others else beginning + end, experiment, file):
        return status
    for file in others:
        experiment = checked_experiment(file)[0]
        stages = [
            ("Statistics of the training period", "preprocess", build.preprocess),
            ("Training the model with noise on the CRPS of its members", "train", _train),
            ("Forecasts of all members", "rollout", build.rollout),
            *end,
        ]
        if status := perform(stages, experiment, file):
            return status
    report = write_report(experiment, time.monotonic() - began)
    console.rule(Text("Report", "bold"))
    print_tables(load_results(evaluation_folder(experiment)), console)
    console.print(f"All results are in {save_loc}. Open {report} to view the scores and maps.", soft_wrap=True)
    return 0


def _train(experiment: Experiment) -> int:
    """Train; return 143, as after SIGTERM, if the training was stopped: its model must not be used for forecasts."""
    status = build.train(experiment)
    state = json.loads((Path(experiment.save_loc) / "status.json").read_text())["state"]
    return status or (143 if state == "continue" else 0)


def experiment_files(save_loc: Path, ensemble: bool = False) -> list[Path]:
    """Write the demonstration's experiments to `save_loc`, for the user to read and change; return them in order.

    There is one, or for an ensemble two: that of the deterministic model, and that of the ensemble, which starts from it.

    Raises UserError, and writes nothing, if there are other files with the names of those or of the report.
    """
    shipped = resources.files("credit_like")
    first = save_loc / "deterministic" if ensemble else save_loc
    texts = {"demo.yml": shipped.joinpath("demo.yml").read_text().replace("save_loc: runs/demo", f"save_loc: {first}")}
    if ensemble:
        members = shipped.joinpath("demo-ensemble.yml").read_text().replace("runs/demo-ensemble", str(save_loc))
        texts |= {"deterministic.yml": DETERMINISTIC, "ensemble.yml": members}
    check_own("--save-loc", save_loc / REPORT, "the report of a demonstration", begins_with(_SUMMARY))
    for name, text in texts.items():
        check_own("--save-loc", save_loc / name, "the experiment of this demonstration", _holds(text))
    save_loc.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (save_loc / name).write_text(text)
    return [save_loc / name for name in texts if not ensemble or name != "demo.yml"]


def _holds(text: str) -> Callable[[Path], bool]:
    def is_same(path: Path) -> bool:
        return path.is_file() and path.read_bytes() == text.encode()

    return is_same


def _plot(experiment: Experiment) -> int:
    from credit_like import figures  # matplotlib, for which the training does not wait

    return figures.plot(experiment)


def write_report(experiment: Experiment, seconds: float) -> Path:
    """Write a Markdown page with the run, its scores and the paths of the figures; return the path of the page."""
    save_loc = Path(experiment.save_loc)
    results = load_results(evaluation_folder(experiment))
    lines = [
        f"# {experiment.name}",
        "",
        f"{_SUMMARY} {seconds / 60:.1f} minutes; everything is in `{save_loc}`.",
        "RMSE of the model as a fraction of persistence's and climatology's; below 1 it is the better forecast.",
        "",
        *_markdown(*_ratios(results)),
        "",
        *(_reliability_text(results) if _is_ensemble(results) else ()),
        "- `evaluation/report.html`: all scores, and maps to browse; opens in any browser",
        *(f"- `{figure.relative_to(save_loc)}`" for figure in sorted(save_loc.rglob("*.png"))),
    ]
    path = save_loc / REPORT
    path.write_text("\n".join(lines) + "\n")
    return path


def print_tables(results: xr.Dataset, console: Console) -> None:
    """Print the ratios of RMSE, and for an ensemble the scores of its reliability.

    Columns that do not fit are left out and named: the second half first, and of it the middle lead.
    """
    header, rows = _ratios(results)
    shown = [f"/ {name[:4]}.\n{name.partition(' ')[2]}" for name in header]
    _print_table(console, "RMSE over that of persistence and climatology; below 1 is better", header, shown, rows)
    if _is_ensemble(results):
        header, rows = _reliability(results)
        shown = ["{}\n/ {}\n{} {}".format(*name.replace(" / ", " ").split()) for name in header]
        title = "spread over error, 1 is reliable; fair CRPS over the deterministic MAE"
        _print_table(console, title, header, shown, rows)


def _print_table(
    console: Console, title: str, header: Sequence[str], shown: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, box=SIMPLE, title_justify="left")
    for number, name in enumerate(["variable", *shown]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    ranked = [name for names in (shown[:3], shown[3:]) for name in (names[0], names[2], names[1])]
    left_out = fitted(console, table, ranked, folded=["variable"])
    console.print(table)
    if left_out:
        names = ", ".join(header[shown.index(name)] for name in left_out)
        console.print(f"not shown in {console.width} columns: {names}; report.md has all")


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = ["| variable | " + " | ".join(header) + " |", "|" + "---|" * (len(header) + 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def _ratios(results: xr.Dataset) -> tuple[list[str], list[list[str]]]:
    """Return RMSE ratios, one row per channel, at the leads of `_chosen`, and the names of the columns."""
    chosen = _chosen(results)
    header = [f"{against} {hours_text(lead)}" for against in ("persistence", "climatology") for lead in chosen]
    rows = []
    for name, scores in channels(results):
        rmse = scores.sel(metric="rmse")
        cells = [
            _ratio(float(rmse.sel(source="model", lead_time=lead) / rmse.sel(source=against, lead_time=lead)))
            for against in ("persistence", "climatology")
            for lead in chosen
        ]
        rows.append([channel_text(name, level_units_of(results)), *cells])
    return header, rows


def _chosen(results: xr.Dataset) -> list[np.timedelta64]:
    """Return the leads of 24, 72 and 120 h, or where there are not all of them the first, a middle and the last one."""
    leads = results["lead_time"].values
    whole = [lead for lead in leads if lead / np.timedelta64(1, "h") in (24, 72, 120)]
    return whole if len(whole) == 3 else [leads[0], leads[len(leads) // 2], leads[-1]]


def _is_ensemble(results: xr.Dataset) -> bool:
    return "spread-error" in results["metric"]


def _reliability_text(results: xr.Dataset) -> list[str]:
    """Return the results of an ensemble in Markdown."""
    return [
        "Spread over the error of the ensemble mean, 1 for a reliable ensemble; fair CRPS as a fraction of the deterministic",
        "model's mean absolute error.",
        "",
        *_markdown(*_reliability(results)),
        "",
    ]


def _reliability(results: xr.Dataset) -> tuple[list[str], list[list[str]]]:
    """Return spread over error, and CRPS over MAE, one row per channel, at the same leads as `_ratios`."""
    chosen = _chosen(results)
    header = [f"{what} {hours_text(lead)}" for what in ("spread / error", "CRPS / MAE") for lead in chosen]
    rows = []
    for name, scores in channels(results):
        at = [scores.sel(source="model", metric="spread-error", lead_time=lead) for lead in chosen]
        crps = scores.sel(metric="fair-crps")
        if not all(np.isfinite(at)):
            continue  # a wind vector has errors, but no spread
        at += [crps.sel(source="model", lead_time=x) / crps.sel(source="deterministic", lead_time=x) for x in chosen]
        rows.append([channel_text(name, level_units_of(results)), *(_ratio(float(x)) for x in at)])
    return header, rows


def _ratio(value: float) -> str:
    """Format with two significant digits at least, and no exponent."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.{2 if value >= 0.095 or value == 0 else 1 - math.floor(math.log10(value))}f}"
