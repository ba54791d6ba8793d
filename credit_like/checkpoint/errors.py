"""Errors of checkpoints. Every message states what to do."""

from __future__ import annotations

from credit_like.errors import UserError


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class SaveFailed(Exception):
    """A checkpoint could not be written; earlier checkpoints are unaffected."""


class Locked(UserError):
    """Another process uses this run folder."""
