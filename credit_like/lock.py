"""Locks that admit one process at a time to a run folder, or to a part of a file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from credit_like.errors import UserError

log = logging.getLogger(__name__)

_held: set[Path] = set()
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


class Locked(UserError):
    """Another process uses a folder or a file."""


class FileLock:
    """Exclusive lock on a file, or on the bytes `places` of it, released by the kernel when its owner ends for any reason.

    This is a POSIX record lock. It is not inherited by the loader's worker processes, which may outlive a killed
    trainer by seconds, and it works across nodes on NFS and Lustre. Such locks do not exclude the process that holds
    them, hence `_held`. Processes that lock different places of one file do not exclude each other.

    `patience` (seconds) bounds the wait for an owner that is about to end. A `temporary` file is removed at the end. Raises
    Locked, which names `what` is locked, the owner (`unknown` if it has not signed), or the first of the `names` of places that
    another one has, and the `advice`. On a file system without locks, such as Lustre that is mounted without `flock` or NFS without
    `lockd`, it warns and excludes nobody.
    """

    def __init__(
        self,
        path: Path,
        what: Path,
        advice: str,
        patience: float = 0.0,
        *,
        temporary: bool = False,
        places: Sequence[int] | None = None,
        names: Sequence[str] = (),
        unknown: str = "an unknown process",
    ) -> None:
        self.path = path.parent.resolve() / path.name
        self.what = what
        self.advice = advice
        self.patience = patience
        self.temporary = temporary
        self.places = places
        self.names = names
        self.unknown = unknown
        self._file: IO[str] | None = None

    def __enter__(self) -> FileLock:
        if self.path in _held:
            raise Locked(f"{self.what} is in use by this very process")
        deadline = time.monotonic() + self.patience
        waiting = False
        while True:
            file = self.path.open("a+")
            try:
                owner = self._lock(file)
                if owner is None and self._is_there(file):
                    break
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    file.close()
                    raise
                log.warning(
                    "%s: its file system has no locks (%s), so a second job could write to it at the same time; "
                    "make sure that only one runs there",
                    self.what, error.strerror,
                )  # fmt: skip
                break
            file.close()
            if owner is None:  # its owner has removed the file
                continue
            if time.monotonic() >= deadline:
                raise Locked(f"{self.what} is in use by {owner}; wait for it to end or {self.advice}")
            if not waiting:
                log.info("%s is in use; waiting up to %.0f s for that process to end", self.what, self.patience)
            waiting = True
            time.sleep(0.1)
        _held.add(self.path)
        self._file = file
        if self.places is None:
            self._sign(file)
        return self

    def _lock(self, file: IO[str]) -> str | None:
        """Lock the file or its places, in ascending order; return the owner of what another process has."""
        if self.places is None:
            if not _lock(file):
                file.seek(0)
                return file.read().strip() or self.unknown
            return None
        begin = 0
        for end in range(1, len(self.places) + 1):  # adjacent places in one call, which may ask a server
            if end == len(self.places) or self.places[end] != self.places[end - 1] + 1:
                if not _lock(file, end - begin, self.places[begin]):
                    return f"another process ({self.names[begin]} or after)"
                begin = end
        return None

    def _is_there(self, file: IO[str]) -> bool:
        """Return whether the file that was opened is still the one at the path."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        return False

    def _sign(self, file: IO[str]) -> None:
        note: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid()}
        note |= {key: os.environ[key] for key in ("PBS_JOBID", "SLURM_JOB_ID") if key in os.environ}
        # The note only serves the error message of other processes; a full disk must not stop the run here.
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(json.dumps(note))
            file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        if self.temporary:
            self.path.unlink(missing_ok=True)
        self._file.close()
        self._file = None
        _held.discard(self.path)


def _lock(file: IO[str], *place: int) -> bool:
    """Lock a file, or the place (length, start) in it, and return whether no other process has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, *place)
    except (BlockingIOError, PermissionError):
        return False
    return True


class RunLock(FileLock):
    """Exclusive lock on `folder/.lock` of a run."""

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        super().__init__(folder.resolve() / ".lock", folder.resolve(), "change save_loc", patience)
