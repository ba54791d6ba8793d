"""Errors of checkpoints. Every message states what to do."""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager

from credit_like.errors import RunError, UserError, reading, reason

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""What the system says where there is no such file, however often it is asked."""


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, truncated or altered; the message names it."""


class SaveFailed(Exception):
    """A checkpoint could not be written; earlier checkpoints are unaffected."""


def unreadable(path: object, error: Exception) -> DamagedCheckpoint | RunError:
    """Return the error to raise for a file of a checkpoint that cannot be read: damage, or a RunError for what may pass.

    A limit of open files, a server that does not answer or a missing permission say nothing about the content. A checkpoint
    must not count as damaged for them, because damaged ones are passed over, and removed in time.
    """
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _ABSENT:
        return RunError(
            f"expected to read {path}, got: {reason(error)}; the checkpoint is left as it is, because it may be intact: start "
            "again once the file can be read, or move the checkpoint elsewhere to go on without it"
        )
    return DamagedCheckpoint(f"{path} is not readable: {reason(error, path)}")


def reading_metadata(path: object) -> AbstractContextManager[None]:
    """Convert errors of reading metadata that are intact but not in the form of this release to UserError."""
    return reading("the metadata of a checkpoint of this release", path, "read it with the release that wrote it")
