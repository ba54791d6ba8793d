"""Print plans and run statuses, formatted for the terminal or as plain lines."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from credit_like.launch.cancel import cancel
from credit_like.launch.plan import Plan
from credit_like.launch.status import status
from credit_like.terminal import plain_console

_WIDE = 1000  # columns


def print_plan(plan: Plan, script: bool = True) -> None:
    """Print the plan as a table, followed by the job script."""
    console = plain_console(soft_wrap=True)
    console.print(_facts(plan.describe()))
    for name, text in plan.scripts.items() if script else ():
        console.rule(name)
        console.print(Syntax(text, "bash", word_wrap=True) if console.is_terminal else text)


def print_status(save_loc: Path) -> int:
    """Print the state of a run and its jobs; return 1 if the run failed, else 0.

    Raises UserError where there is no run.
    """
    run = status(save_loc)
    console = _console()
    console.print(_facts(run.rows()))
    if run.jobs:
        table = Table("job", "mode", "state", "began", "ended", "step", box=None, pad_edge=False)
        for job in run.jobs:
            cells = (job.job, job.mode, job.state, job.began, job.ended, "" if job.step is None else str(job.step))
            table.add_row(*cells)
        console.print(table)
    return 1 if run.state == "failed" else 0


def print_cancelled(save_loc: Path, job: str | None = None) -> int:
    """Cancel the jobs of a run, or one of them, and print the outcomes; return 1 if the scheduler refused one, else 0.

    Raises UserError where there is nothing to cancel.
    """
    outcomes = cancel(save_loc, job)
    table = Table("job", "mode", "was", "now", box=None, pad_edge=False)
    for each in outcomes:
        table.add_row(each.job, each.mode, each.was, each.now)
    _console().print(table)
    return 1 if any(each.refused for each in outcomes) else 0


def _console() -> Console:
    """Return a console that cuts nothing in a file or a pipe."""
    console = plain_console(soft_wrap=True)
    return console if console.is_terminal else plain_console(soft_wrap=True, width=_WIDE)


def _facts(rows: list[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
