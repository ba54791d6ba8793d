"""Checks that a path named by the user may be written: a command replaces nothing but what it has made before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from credit_like.errors import UserError

_BEGINNING = 1 << 20


def check_new(option: str, path: Path) -> None:
    """Raise UserError if anything is at `path`: for results that a user changes, or that take long to make."""
    if os.path.lexists(path):
        raise UserError(f"{option}: expected a path where nothing is, got {path}; remove it or name another one")


def check_own(option: str, path: Path, what: str, is_own: Callable[[Path], bool]) -> None:
    """Raise UserError if there is something at `path` that is not `what`, as `is_own` tells of a file or folder."""
    # Pipes and devices are not opened.
    if os.path.lexists(path) and not ((path.is_file() or path.is_dir()) and is_own(path)):
        raise UserError(
            f"{option}: expected {what} or a path where nothing is, got something else at {path}; remove it or name "
            "another path"
        )


def begins_with(mark: str) -> Callable[[Path], bool]:
    """Return a function that tells whether the first MiB of a file holds `mark`."""

    def holds(path: Path) -> bool:
        try:
            with path.open("rb") as file:
                return mark.encode() in file.read(_BEGINNING)
        except OSError:  # a folder, or a file that cannot be read
            return False

    return holds
