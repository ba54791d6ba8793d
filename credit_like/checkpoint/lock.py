"""A lock that admits one process at a time to a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from credit_like.checkpoint.errors import Locked

log = logging.getLogger(__name__)

_held: set[Path] = set()
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP}


class RunLock:
    """Exclusive lock on `folder/.lock`, released by the kernel when its owner ends, for whatever reason.

    This is a POSIX record lock. It is not inherited by the loader's worker processes, which may outlive a killed
    trainer by seconds, and it works across nodes on NFS and Lustre. Such locks do not exclude the process that holds
    them, hence `_held`.

    `patience` (seconds) bounds the wait for an owner that is about to end. Raises Locked, which names the owner. On a
    file system without locks, such as Lustre that is mounted without `flock`, it warns and excludes nobody.
    """

    def __init__(self, folder: Path, patience: float = 0.0) -> None:
        self.path = folder.resolve() / ".lock"
        self.patience = patience
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        if self.path in _held:
            raise Locked(f"{self.path.parent} is in use by this very process")
        file = self.path.open("a+")
        deadline = time.monotonic() + self.patience
        waiting = False
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError) as error:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    owner = file.read().strip() or "an unknown process"
                    file.close()
                    raise Locked(
                        f"{self.path.parent} is in use by {owner}; wait for it to end or change save_loc"
                    ) from error
                if not waiting:
                    log.info(
                        "%s is in use; waiting up to %.0f s for that process to end", self.path.parent, self.patience
                    )
                waiting = True
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    file.close()
                    raise
                log.warning(
                    "%s: its file system has no locks (%s), so that nothing keeps a second job from writing to it; "
                    "take care that only one runs there",
                    self.path.parent, error.strerror,
                )  # fmt: skip
                break
        _held.add(self.path)
        self._file = file
        note: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid()}
        note |= {key: os.environ[key] for key in ("PBS_JOBID", "SLURM_JOB_ID") if key in os.environ}
        # The note only serves the error message of other processes; a full disk must not stop the run here.
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(json.dumps(note))
            file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        _held.discard(self.path)
