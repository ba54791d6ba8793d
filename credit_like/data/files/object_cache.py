"""Objects of remote stores kept as files of a local folder, up to a size, for any number of processes.

    objects/ab/ab…    one file for each object: magic, length, CRC-32C and the object; its time of change is that of its last use
    drafts/           files that are being written, renamed into `objects` when they are complete
    locks/            empty files; a process that fetches an object locks one of them, and others that want the object wait
    usage             the bytes in `objects`; a process that changes them locks this file, and the kernel unlocks it when it dies

A process that is killed leaves at most a draft and a number in `usage` that is too large; the next eviction counts anew and
removes old drafts. A file that is cut off or damaged is removed and counts as absent. Where files cannot be written, as on a
full disk, the cache says so once and the process goes on without writing.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import struct
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import google_crc32c

_HEADER = struct.Struct("<8sQI")
_MAGIC = b"CL-cache"
_USAGE = struct.Struct("<Q")
_FULL = 0.9  # share of the limit that an eviction leaves, so that the next objects need none
_LOCK_WAIT = 10.0  # seconds to wait for a process that evicts, after which an object is not stored
_FETCH_WAIT = 60.0  # seconds to wait for a process that fetches the same object, after which it is fetched again
_DRAFT_AGE = 3600.0  # seconds after which a draft belongs to a process that was killed
_LOG = logging.getLogger(__name__)
_unwritable: dict[Path, OSError] = {}  # folders in which this process stores nothing any more, with the reason


class ObjectCache:
    """Objects by name, of at most `limit` bytes in total, not counting those that are being written."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit

    def get(self, name: str) -> bytes | None:
        """Return an object and mark it as used, or None if it is not there."""
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0) as file:
                stored = file.read()
        except OSError:  # absent, evicted meanwhile, or a disk that does not answer: the object is read from its store
            return None
        found = _checked(stored)
        with suppress(OSError):  # evicted meanwhile, or a folder that may only be read
            if found is None:
                _LOG.warning("%s is damaged and is read from its store again", path)
                path.unlink()
            else:
                os.utime(path)
        return found

    def put(self, name: str, data: bytes, replace: bool = False) -> None:
        """Store an object, if it fits below the limit and can be written; with `replace`, in place of another one of its name."""
        size = _HEADER.size + len(data)
        if self.folder in _unwritable or size > self.limit:
            return
        if replace and self.get(name) not in (None, data):
            with suppress(OSError):  # `usage` is then too large until it is counted anew at the next eviction
                self._path(name).unlink()
        draft = self.folder / "drafts" / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            with open(draft, "wb", buffering=0) as file:
                for part in (_HEADER.pack(_MAGIC, len(data), google_crc32c.value(data)), data):
                    _write(file.fileno(), part)
            self._commit(draft, self._path(name), size)
        except OSError as error:
            if _unwritable.setdefault(self.folder, error) is error:  # several threads may fail at once
                _LOG.warning(
                    "the cache in %s cannot be written (%s); the data are read without storing more", self.folder, error
                )
        finally:
            with suppress(OSError):
                draft.unlink()

    @contextmanager
    def alone(self, names: Iterable[str]) -> Iterator[None]:
        """Wait, for a limited time, until no other process or thread is in this context with one of the names.

        Where files cannot be locked, nobody waits, and several may fetch the same object.
        """
        with ExitStack() as stack:
            for lock in sorted({self._lock_of(name) for name in names}):
                with suppress(OSError):
                    _lock(stack.enter_context(_opened(lock)), _FETCH_WAIT)
            yield

    @asynccontextmanager
    async def alone_async(self, name: str) -> AsyncIterator[None]:
        """Wait in the same way, but without occupying a thread, which the process that fetches may need."""
        with ExitStack() as stack:
            with suppress(OSError):
                file, end = stack.enter_context(_opened(self._lock_of(name))), time.monotonic() + _FETCH_WAIT
                while not _lock(file, 0) and time.monotonic() < end:
                    await asyncio.sleep(0.01)
            yield

    def _lock_of(self, name: str) -> Path:
        return self.folder / "locks" / self._path(name).name[:3]

    def _path(self, name: str) -> Path:
        key = hashlib.sha256(name.encode()).hexdigest()
        return self.folder / "objects" / key[:2] / key

    def _commit(self, draft: Path, path: Path, size: int) -> None:
        """Move a draft to its place, after making room for it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as usage:
            if usage is None or path.exists():
                return
            stored = os.pread(usage, _USAGE.size, 0)
            used = _USAGE.unpack(stored)[0] if len(stored) == _USAGE.size else self._evict(self.limit - size)
            if used + size > self.limit:
                used = self._evict(max(0, int(_FULL * self.limit) - size))
            os.pwrite(usage, _USAGE.pack(used + size), 0)  # before the rename: a process killed between leaves too much
            with suppress(FileNotFoundError):  # a draft that took so long that another process removed it
                os.replace(draft, path)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Hold the lock and give the open file of `usage`, or None if another process keeps the lock for long."""
        with _opened(self.folder / "usage") as usage:
            yield usage if _lock(usage, _LOCK_WAIT) else None

    def _evict(self, target: int) -> int:
        """Remove the least recently used objects until `target` bytes remain; return the bytes that do."""
        found = sorted(_files(self.folder / "objects"))
        used = sum(size for _, size, _ in found)
        for _, size, path in found:
            if used <= target:
                break
            with suppress(FileNotFoundError):  # whoever found it damaged has removed it
                os.unlink(path)
            used -= size
        for changed, _, path in _files(self.folder / "drafts"):
            if changed < (time.time() - _DRAFT_AGE) * 1e9:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        return used


def _checked(stored: bytes) -> bytes | None:
    """Return the object in a file, or None if the file is cut off or damaged."""
    if len(stored) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(stored)
    data = stored[_HEADER.size :]
    return data if magic == _MAGIC and len(data) == length and google_crc32c.value(data) == checksum else None


def _write(file: int, data: bytes) -> None:
    """Write all of the data; one call may write less, for example on a disk that becomes full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file to lock it; a child that was forked meanwhile has the file too, and must not keep the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield file
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _lock(file: int, wait: float) -> bool:
    """Lock a file; return False if another process keeps it locked for long, for example because it is stopped."""
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        else:
            return True


def _files(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Yield (time of change in ns, bytes, path) of every file below a folder."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                with suppress(FileNotFoundError):
                    found = entry.stat()
                    yield found.st_mtime_ns, found.st_size, entry.path
