"""What may go wrong with checkpoints, as errors that say what to do."""

from __future__ import annotations

from credit_like.errors import UserError


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, cut short or altered; the message names it."""


class SaveFailed(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class Locked(UserError):
    """Another process works in this run folder."""
