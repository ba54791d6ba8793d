"""Errors that are reported to the user as one message. Every other exception is a bug and keeps its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError)
"""Exceptions that the file libraries raise for incomplete or invalid files."""


class UserError(ValueError):
    """An error that the user has to correct; the message states what was expected, what was found and what to change.

    The command line prints it without a traceback and exits with status 2. Packages derive their own kinds from it
    (`ExperimentError`, `StoreError`, `PluginError`, `DamagedCheckpoint`, `Locked`).
    """


class RunError(RuntimeError):
    """A cause outside the program ended a run, such as unreadable data: one message, exit status 1."""


@contextmanager
def reading(what: str, path: object, advice: str) -> Iterator[None]:
    """Convert errors of a library that reads `path` to UserError; use it around calls into such libraries only."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"expected {what}, got {path}, which cannot be read: {reason}; {advice}") from error


def replace(draft: Path, path: Path) -> None:
    """Rename a finished draft to its final name. Raises UserError where a folder has that name."""
    if path.is_dir():
        raise UserError(f"expected a file or nothing at {path}, got a folder; remove it")
    draft.replace(path)
