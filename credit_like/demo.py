"""The demonstration: train, forecast and score on a built-in data set, printing the command of every stage."""

from __future__ import annotations

import math
import time
from importlib import resources
from pathlib import Path

import xarray as xr
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from credit_like import build, figures
from credit_like.check import checked_experiment
from credit_like.evaluation.results import load_results
from credit_like.evaluation.scorecard import channels, lead_text
from credit_like.schema.experiment import Experiment
from credit_like.terminal import fitted


def run(save_loc: Path) -> int:
    """Make data, fit statistics, train, roll out, score and plot; return the exit status.

    An interrupted demonstration continues where it stopped, like any run.
    """
    console = Console()
    file = experiment_file(save_loc)
    began = time.monotonic()

    def say(what: str, command: str) -> None:
        console.rule(f"[bold]{what}")
        console.print(
            f"[dim]{time.monotonic() - began:5.0f} s   alone: credit-like {command} {file}[/dim]", highlight=False
        )

    say("Data: integrate two-layer shallow-water weather on the sphere (once), and check the experiment", "check")
    experiment: Experiment = checked_experiment(file)[0]
    say("Statistics of the training period", "preprocess")
    stages = [
        (None, build.preprocess),
        (("Training a small WXFormer", "train"), build.train),
        (("Forecasts of the test period", "rollout"), build.rollout),
        (("Scores beside persistence and climatology", "evaluate"), build.evaluate),
        (("Curves and maps", "plot"), figures.plot),
    ]
    for announced, stage in stages:
        if announced:
            say(*announced)
        if status := stage(experiment):
            return status
    report = write_report(experiment, time.monotonic() - began)
    console.rule("[bold]Report")
    print_ratios(load_results(figures.evaluation_folder(experiment)), console)
    console.print(
        f"Everything is in {save_loc}; the scores and maps to browse: {report}", highlight=False, soft_wrap=True
    )
    return 0


def experiment_file(save_loc: Path) -> Path:
    """Write the demonstration's experiment file to `save_loc`, for the user to read and change, and return its path."""
    text = resources.files("credit_like").joinpath("demo.yml").read_text()
    file = save_loc / "demo.yml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.replace("save_loc: runs/demo", f"save_loc: {save_loc}"))
    return file


def write_report(experiment: Experiment, seconds: float) -> Path:
    """Write a Markdown page with what was run, how it scored and where the figures are; return its path."""
    save_loc = Path(experiment.save_loc)
    header, rows = _ratios(load_results(figures.evaluation_folder(experiment)))
    lines = [
        f"# {experiment.name}",
        "",
        f"Trained, forecast and scored in {seconds / 60:.1f} minutes; everything is in `{save_loc}`.",
        "RMSE of the model as a fraction of persistence's and climatology's; below 1 it is the better forecast.",
        "",
        "| variable | " + " | ".join(header) + " |",
        "|" + "---|" * (len(header) + 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "- `evaluation/report.html`: all scores, and maps to browse; opens in any browser",
        *(f"- `{figure.relative_to(save_loc)}`" for figure in sorted(save_loc.rglob("*.png"))),
    ]
    path = save_loc / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def print_ratios(results: xr.Dataset, console: Console) -> None:
    """Print the ratios of RMSE; columns that do not fit are left out, those of climatology and of middle leads first."""
    header, rows = _ratios(results)
    title = "RMSE over that of persistence and climatology; below 1 is better"
    table = Table(title=title, box=SIMPLE, title_justify="left")
    shown = [f"/ {name[:4]}.\n{name.partition(' ')[2]}" for name in header]
    for number, name in enumerate(["variable", *shown]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    ranked = [name for names in (shown[:3], shown[3:]) for name in (names[0], names[2], names[1])]
    left_out = fitted(console, table, ranked)
    console.print(table)
    if left_out:
        names = ", ".join(name.replace("\n", " ") for name in left_out)
        console.print(f"not shown in {console.width} columns: {names}; report.md has all", highlight=False)


def _ratios(results: xr.Dataset) -> tuple[list[str], list[list[str]]]:
    """Return RMSE ratios, one row per channel, at the first, a middle and the last lead, and the names of the columns."""
    leads = results["lead_time"].values
    chosen = [leads[0], leads[len(leads) // 2], leads[-1]]
    header = [f"{against} {lead_text(lead)}" for against in ("persistence", "climatology") for lead in chosen]
    rows = []
    for name, scores in channels(results):
        rmse = scores.sel(metric="rmse")
        cells = [
            _ratio(float(rmse.sel(source="model", lead_time=lead) / rmse.sel(source=against, lead_time=lead)))
            for against in ("persistence", "climatology")
            for lead in chosen
        ]
        rows.append([name, *cells])
    return header, rows


def _ratio(value: float) -> str:
    """Format with two significant digits at least, and no exponent."""
    if not math.isfinite(value):
        return "–"
    return f"{value:.{2 if value >= 0.095 or value == 0 else 1 - math.floor(math.log10(value))}f}"
