"""The errors that are messages for the user; every other exception is a fault of the program and keeps its traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something that the user has to change: the message says what was expected, what was found and what to change.

    The command line prints it without a traceback and exits with status 2. Rooms derive their own kinds from it
    (`ExperimentError`, `StoreError`, `PluginError`, `DamagedCheckpoint`, `Locked`).
    """


class RunError(RuntimeError):
    """Something outside the program ended a run, such as data that cannot be read: one message, exit status 1."""
