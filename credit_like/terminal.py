"""Tables and progress bars that fit the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text


def plain_console(**options: Any) -> Console:
    """Return a console that prints text literally: brackets and colons may be part of a name or a path, not markup."""
    return Console(markup=False, highlight=False, emoji=False, **options)


def folding_table(*headers: str, **options: Any) -> Table:
    """Return a table with these columns, whose text continues on further lines where it does not fit; it is not cut."""
    table = Table(**options)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def fitted(console: Console, table: Table, droppable: Sequence[str], folded: Sequence[str] = ()) -> list[str]:
    """Remove columns from the table until it fits, the last of `droppable` first; return the headers that are left out.

    Columns that are not `droppable` stay. If they are too wide, the text of those in `folded` continues on further lines.
    No other cell is folded, and no cell is cut if these columns fit. A file or pipe has no width: the console then becomes
    as wide as the table.
    """
    for column in table.columns:
        column.no_wrap = True
    left_out: list[str] = []
    wide = console.options.update(width=10_000)
    if not console.is_terminal:
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    for header in reversed(droppable):
        if Measurement.get(console, wide, table).maximum <= console.width:
            break
        found = [column for column in table.columns if column.header == header]
        for column in found:
            table.columns.remove(column)
            left_out.insert(0, header)
    if Measurement.get(console, wide, table).maximum > console.width:
        for column in table.columns:
            if column.header in folded:
                column.no_wrap, column.overflow = False, "fold"
    return left_out


class _Steps(ProgressColumn):
    """`12/261`."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f}", style="progress.download")


class _TimeLeft(ProgressColumn):
    """Time left as `0:23:16`, or `2 d 3 h` for long runs."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text("-:--:--" if left is None else duration(left), style="progress.remaining")


def duration(seconds: float) -> str:
    """Format a duration as `0:23:16`, or `2 d 3 h` from two days on."""
    whole = int(seconds)
    if whole >= 2 * 86400:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def progress_bar(console: Console, title: str) -> Progress:
    """Return a progress bar with the steps and the time left first, then `text`, which is cut where it does not fit."""
    return Progress(
        TextColumn(title, style="bold", markup=False),
        BarColumn(bar_width=12 if console.width < 100 else 24),
        _Steps(),
        _TimeLeft(),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
    )


def shortened(parts: Sequence[str], width: int) -> str:
    """Return as many of the parts, the most important first, as fit into `width` characters."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


@contextmanager
def logging_above(progress: Progress) -> Iterator[None]:
    """Show the progress bar, and print the lines of log handlers on stderr above it instead of into it."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__)
    ]
    before = [handler.stream for handler in handlers]
    progress.start()  # replaces sys.stderr
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        progress.stop()
        for handler, stream in zip(handlers, before, strict=True):
            handler.setStream(stream)
