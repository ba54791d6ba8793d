"""Files behind a URL: blocks are read from the server when they are needed, and may be kept in a local cache.

Size and version of a file are asked for when it is opened, so that copies of a file that was replaced are not used. A block
that the cache holds is not asked for. Of several processes that want the same blocks one fetches them while the others wait.
If the server does not answer, whatever the cache holds is used.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError

from credit_like.data.files import remote
from credit_like.data.files.object_cache import ObjectCache
from credit_like.data.files.remote import RemoteError, failures

BLOCK = 2**20
"""Bytes of a block. Adjacent blocks that are absent are fetched by one request."""
_RECENT = 4  # blocks that a file keeps in memory: HDF5 reads metadata in small pieces
_GONE = 60.0  # seconds after a failure in which a read is tried only once if the cache has a copy
_VERSION = ("etag", "last-modified", "lastmodified", "content-md5", "md5hash", "generation", "mtime", "updated")
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_failed: dict[str, float] = {}  # time of the last failure by server


class RemoteFile(io.RawIOBase):
    """A file behind a URL, for reading; may be used in a forked process.

    Raises RemoteError, which names the URL, if the server fails although the attempt was repeated and the cache has no
    copy, and ImportError if a package for the protocol is missing.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], cache: ObjectCache | None = None) -> None:
        super().__init__()
        self.url, self._options, self._cache = url, storage_options, cache
        options = json.dumps(storage_options, sort_keys=True, default=str)
        self._name = "\0".join((url, options))
        self._server = "{0.scheme}://{0.netloc}".format(urlsplit(url))
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._at = 0
        self._size, self._version = self._described()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the current position, up to the end of the file; return the number of bytes."""
        out = memoryview(buffer).cast("B")
        stop = min(self._at + len(out), self._size)
        if stop <= self._at:
            return 0
        numbers = range(self._at // BLOCK, (stop - 1) // BLOCK + 1)
        content = b"".join(self._blocks(numbers).values())
        start = self._at - numbers[0] * BLOCK
        count = stop - self._at
        out[:count] = content[start : start + count]
        self._at = stop
        return count

    def _blocks(self, numbers: range) -> dict[int, bytes]:
        """Return blocks by number, in order."""
        found = {number: self._held(number) for number in numbers}
        if None in found.values():
            found |= self._fetched([number for number, block in found.items() if block is None])
        blocks = {number: block for number, block in found.items() if block is not None}
        for number in numbers[-_RECENT:]:
            self._recent[number] = blocks[number]
            self._recent.move_to_end(number)
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return blocks

    def _held(self, number: int) -> bytes | None:
        if number in self._recent or self._cache is None:
            return self._recent.get(number)
        block = self._cache.get(self._block_name(number))
        return block if block is not None and len(block) == min(BLOCK, self._size - number * BLOCK) else None

    def _block_name(self, number: int) -> str:
        return "\0".join((self._name, self._version, str(BLOCK), str(number)))

    def _fetched(self, absent: list[int]) -> dict[int, bytes]:
        """Fetch blocks and store them, or take those that another process has stored meanwhile."""
        if self._cache is None:
            return self._requested(absent)
        with self._cache.alone(map(self._block_name, absent)):
            stored = {number: self._held(number) for number in absent}
            found = self._requested([number for number, block in stored.items() if block is None])
            for number, block in found.items():
                self._cache.put(self._block_name(number), block)
        return found | {number: block for number, block in stored.items() if block is not None}

    def _requested(self, absent: list[int]) -> dict[int, bytes]:
        """Request blocks from the server, adjacent ones together."""
        found: dict[int, bytes] = {}
        for _, run in groupby(enumerate(absent), lambda pair: pair[1] - pair[0]):
            numbers = [number for _, number in run]
            start, stop = numbers[0] * BLOCK, min((numbers[-1] + 1) * BLOCK, self._size)
            data = self._repeated(partial(_range, start=start, stop=stop), remote.TRIES)
            found |= {number: data[number * BLOCK - start :][:BLOCK] for number in numbers}
        return found

    def _described(self) -> tuple[int, str]:
        """Return size and version of the file, from the server if it answers, else from the cache."""
        name = f"{self._name}\0size and version"
        held = None if self._cache is None else self._cache.get(name)
        failing = time.monotonic() - _failed.get(self._server, float("-inf")) < _GONE
        try:
            size, version = self._repeated(_description, 1 if held is not None and failing else remote.TRIES)
        except RemoteError as error:
            if held is None or self._cache is None:
                raise
            if not failing:
                _LOG.warning("%s; the copies in %s are read instead", error, self._cache.folder)
            _failed[self._server] = time.monotonic()
            size, version = json.loads(held)
            return size, version
        if self._cache is not None:
            self._cache.put(name, json.dumps([size, version]).encode(), replace=True)
        return size, version

    def _repeated(self, call: Callable[[Any, str], _T], tries: int) -> _T:
        """Call with file system and path; wait and repeat if the server fails. Raises RemoteError."""
        for attempt in range(1, tries + 1):
            try:
                return call(*fsspec.core.url_to_fs(self.url, **self._options))
            except failures() as error:
                if attempt == tries or isinstance(error, PermissionError | ImportError | FSTimeoutError):
                    raise RemoteError(_story(self.url, attempt, error)) from error
            time.sleep(remote.PAUSE * 2 ** (attempt - 1))
        raise AssertionError("unreachable")


def _story(url: str, attempts: int, error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    reason = (
        f"no answer within {remote.ANSWER:g} s"
        if isinstance(cause, FSTimeoutError)
        else f"{type(cause).__name__}: {cause}"
    )
    return f"{url} cannot be read ({attempts} attempts): {reason}"


def _description(fs: Any, path: str) -> tuple[int, str]:
    """Return size and version of a file as the server tells them."""
    info = fs.info(path, **({"timeout": remote.ANSWER} if isinstance(fs, AsyncFileSystem) else {}))
    if info.get("size") is None:
        raise RemoteError("the server does not tell the size of the file; download it first")
    version = {key: str(value) for key, value in sorted(info.items()) if key.lower() in _VERSION}
    return int(info["size"]), json.dumps([info["size"], version])


def _range(fs: Any, path: str, start: int, stop: int) -> bytes:
    """Return the bytes of a range. Raises OSError if the server sends others."""
    data: bytes = fs.cat_file(path, start=start, end=stop)
    if len(data) != stop - start:
        raise OSError(f"expected {stop - start} bytes from byte {start} on, got {len(data)}")
    return data
