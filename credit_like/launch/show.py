"""Print plans and run statuses, formatted for the terminal or as plain lines."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from credit_like.launch.plan import Plan
from credit_like.launch.status import status

_WIDE = 1000  # columns


def print_plan(plan: Plan, script: bool = True) -> None:
    """Print the plan as a table, followed by the job script."""
    console = Console(soft_wrap=True)
    console.print(_facts("", plan.describe()))
    for name, text in plan.scripts.items() if script else ():
        console.rule(name)
        console.print(
            Syntax(text, "bash", word_wrap=True) if console.is_terminal else text, markup=False, highlight=False
        )


def print_status(save_loc: Path) -> int:
    """Print the state of a run and its jobs; return 1 if the run failed, else 0.

    Raises UserError where there is no run.
    """
    run = status(save_loc)
    console = Console(soft_wrap=True)
    if not console.is_terminal:  # in a file or a pipe nothing is cut
        console = Console(soft_wrap=True, width=_WIDE)
    console.print(_facts("", run.rows()))
    if run.jobs:
        table = Table("job", "mode", "state", "began", "ended", "step", box=None, pad_edge=False)
        for job in run.jobs:
            cells = (job.job, job.mode, job.state, job.began, job.ended, "" if job.step is None else str(job.step))
            table.add_row(*map(Text, cells))
        console.print(table)
    return 1 if run.state == "failed" else 0


def _facts(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title or None, show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: brackets in a reason are no markup
    return table
