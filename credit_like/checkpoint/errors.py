"""Errors of checkpoints. Every message states what to do."""

from __future__ import annotations

from contextlib import AbstractContextManager

from credit_like.errors import UserError, reading


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class SaveFailed(Exception):
    """A checkpoint could not be written; earlier checkpoints are unaffected."""


class Locked(UserError):
    """Another process uses this run folder."""


def reading_metadata(path: object) -> AbstractContextManager[None]:
    """Convert errors of reading metadata that are intact but not in the form of this release to UserError."""
    return reading("the metadata of a checkpoint of this release", path, "read it with the release that wrote it")
