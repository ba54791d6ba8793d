"""The command `credit-like plan`: plan layouts and print a table or JSON, or draw a figure."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.plan.machine import machine_of
from credit_like.plan.memory_plot import check_plot, plot_memory
from credit_like.schema.checks import section_findings
from credit_like.schema.errors import ExperimentError
from credit_like.schema.experiment import Experiment
from credit_like.schema.load import load_located


def run(
    file: Path,
    gpus: str,
    gpu: str,
    figures: Mapping[str, float | int | None],
    *,
    overrides: Sequence[str] = (),
    grid: str | None = None,
    processes: int | None = None,
    json: bool = False,
    plot: Path | None = None,
) -> int:
    """Plan for each number of GPUs in `gpus` (64, or 4,16,64); return 1 if for some of them no layout fits, else 0.

    Raises UserError for anything that the user has to correct, before anything is simulated.
    """
    worlds = _worlds(gpus)
    machine = machine_of(gpu, figures)
    if plot is not None:
        check_plot(plot)
    experiment, found = _experiment(file, overrides, grid)
    from credit_like.plan.run import plan
    from credit_like.plan.show import print_report

    reports = [plan(experiment, world, machine, found, processes, _progress(world)) for world in worlds]
    if json:
        documents = [report.to_dict() for report in reports]
        text = json_module.dumps(documents if len(documents) > 1 else documents[0], indent=2)
        sys.stdout.write(text + "\n")
    else:
        for report in reports:
            print_report(report)
    if plot is not None:
        plot_memory(reports, plot)
    return int(any(report.recommended is None for report in reports))


def checked_line(file: Path, overrides: Sequence[str], world: int, gpu: str, force: bool) -> str:
    """Return the plan of the experiment's own layout in one line.

    Raises UserError where it cannot fit, unless `force`.
    """
    machine = machine_of(gpu, {})
    experiment, grid = _experiment(file, overrides, None)
    from credit_like.plan.layouts import Candidate
    from credit_like.plan.run import plan_one
    from credit_like.plan.show import line

    chosen = experiment.trainer.parallelism
    at = chosen.degrees
    dp = world // at.sample_ranks
    layout = Candidate(dp, at.tensor, at.domain, at.replicate, at.data, at.ensemble, at.columns)
    row = plan_one(experiment, layout, machine, grid)
    if not (row.fits or force):
        raise UserError(
            f"expected a layout that fits, got {line(row)}; change trainer.parallelism as "
            f"`credit-like plan {file} --gpus {world} --gpu {gpu}` recommends, or add --force"
        )
    return line(row)


def _worlds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        raise UserError(f"expected --gpus N or N,N,… of at least 1, got {text!r}")
    return [int(part) for part in parts]


def _experiment(file: Path, overrides: Sequence[str], grid: str | None) -> tuple[Experiment, Any]:
    """Return the experiment and its grid, which is read from the data unless the user gives one.

    Raises ExperimentError with every problem. The layout in the file is not checked, because all layouts are planned.
    """
    from credit_like.plan.run import grid_of

    experiment, locations = load_located(file, overrides)
    if findings := [found for found in section_findings(experiment, 1) if found[0][:1] != ("trainer",)]:
        raise ExperimentError([locations.problem(*finding) for finding in findings])
    if grid is not None:
        return experiment, _fitting(experiment, grid_of(grid))
    from credit_like.data.store import StoreError, open_store
    from credit_like.variables import Variables

    try:
        return experiment, _fitting(experiment, open_store(experiment.data, Variables(experiment.data)).grid)
    except (StoreError, OSError) as error:
        raise UserError(
            f"expected data to take the grid from, got: {error}; add --grid ROWSxCOLUMNS to plan without data"
        ) from error


def _fitting(experiment: Experiment, grid: Any) -> Any:
    """Return the grid; raise UserError if the model cannot work on it in any layout."""
    check: Any = getattr(experiment.model, "check", None)
    problems = check(grid.height, grid.width) if check else []
    if problems:
        raise UserError(f"expected a grid that suits the model, got {grid.height}x{grid.width}: " + "; ".join(problems))
    return grid


def _progress(world: int) -> Any:
    def say(done: int, total: int, line: str) -> None:
        sys.stderr.write(f"{world} ranks, layout {done} of {total}: {line}\n")
        sys.stderr.flush()

    return say
