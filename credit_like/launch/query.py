"""Queries of a batch system's commands."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def ask(command: Sequence[str]) -> str:
    """Return the output of a query command; empty if it is missing, fails to start or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
