"""The errors that are messages for the user; every other exception is a fault of the program and keeps its traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError)
"""What the libraries that read files raise for one that is not whole or not what it should be."""


class UserError(ValueError):
    """Something that the user has to change: the message says what was expected, what was found and what to change.

    The command line prints it without a traceback and exits with status 2. Rooms derive their own kinds from it
    (`ExperimentError`, `StoreError`, `PluginError`, `DamagedCheckpoint`, `Locked`).
    """


class RunError(RuntimeError):
    """Something outside the program ended a run, such as data that cannot be read: one message, exit status 1."""


@contextmanager
def reading(what: str, path: object, advice: str) -> Iterator[None]:
    """Make every error of a library that reads `path` a UserError; for calls into such libraries, and nothing else."""
    try:
        yield
    except UserError:
        raise
    except UNREADABLE as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"expected {what}, got {path}, which cannot be read: {reason}; {advice}") from error
