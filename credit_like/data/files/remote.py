"""Zarr stores behind a URL: failed reads are repeated, and objects may be kept in a local cache.

Metadata and coordinates are read while a dataset is opened, and always from the server if it answers, so that a store
that has grown is seen. Other objects are taken from the cache if they are there, and are assumed not to change; of several
processes that want an object that is not, one fetches it while the others wait for its copy. If the server does not
answer, whatever the cache holds is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.buffer.core import default_buffer_prototype
from zarr.storage import FsspecStore, WrapperStore

from credit_like.data.files.object_cache import ObjectCache

TRIES = 4
PAUSE = 0.5
"""Attempts to read an object, and seconds to wait after the first failure; each later pause is twice as long."""
ANSWER = 20.0
"""Seconds in which a server has to send an object of a store's metadata. Packages for URLs wait minutes without a network."""
_GONE = 60.0  # seconds for which a server that failed is asked only once, and one that had the metadata is taken to have them
_ROOT = (".zmetadata", "zarr.json", ".zgroup")
_LOG = logging.getLogger(__name__)


class RemoteError(OSError):
    """An object cannot be read, although the attempt was repeated; the message names its URL."""


def failures(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the classes of errors by which packages for URLs report that a server failed, and `others`."""
    kinds: list[type[Exception]] = [*others, OSError, TimeoutError]
    classes = {
        "aiohttp": ("ClientError",),
        "botocore.exceptions": ("BotoCoreError", "ClientError"),
        "gcsfs.retry": ("HttpError",),
    }
    for module, names in classes.items():  # a package that is not loaded raises none, and its import would take time
        if loaded := sys.modules.get(module):
            kinds += [getattr(loaded, name) for name in names]
    return tuple(kinds)


class RemoteStore(WrapperStore[FsspecStore]):
    """A store behind a URL, for reading; see the module."""

    def __init__(self, store: FsspecStore, url: str = "", options: str = "", cache: ObjectCache | None = None) -> None:
        super().__init__(store)
        self.url, self.options, self.cache = url.rstrip("/"), options, cache
        self._opening = self._told = False
        self._failed = self._seen = float("-inf")

    @classmethod
    def of(cls, url: str, storage_options: dict[str, Any], cache: ObjectCache | None = None) -> RemoteStore:
        """Return the store of a URL. Raises ImportError if a package for its protocol is missing."""
        store = FsspecStore.from_url(url, dict(storage_options), read_only=True)
        return cls(store, url, json.dumps(storage_options, sort_keys=True, default=str), cache)

    def _with_store(self, store: FsspecStore) -> Self:
        return type(self)(store, self.url, self.options, self.cache)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Ask the server first for all reads in this context, even if the cache contains the object."""
        self._opening = True
        try:
            yield
        finally:
            self._opening = False

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        name = "\0".join((self.url, self.options, key, str(byte_range)))
        if self.cache is None or self._opening:
            return await self._read(name, key, prototype, byte_range)
        held = await self._held(name)
        if held is not None:
            return prototype.buffer.from_bytes(held)
        async with self.cache.alone_async(name):
            return await self._read(name, key, prototype, byte_range)

    async def _read(
        self, name: str, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None
    ) -> Buffer | None:
        """Read from the server, unless the cache has a copy by now and nothing is being opened; keep a copy."""
        held = await self._held(name)
        if held is not None and not self._opening:
            return prototype.buffer.from_bytes(held)
        known = held is not None or await self._held(f"{name}\0absent") is not None
        try:
            found = await self._fetched(key, prototype, byte_range, known)
            if found is None and not self._opening:
                await self._check_presence()
        except RemoteError as error:
            if not known:
                raise
            self._tell(error)
            return None if held is None else prototype.buffer.from_bytes(held)
        if self.cache is not None:
            kept = (f"{name}\0absent", b"") if found is None else (name, found.to_bytes())
            await asyncio.to_thread(self.cache.put, *kept, replace=self._opening)
        return found

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        async for found in Store._get_many(self, requests):
            yield found

    async def _held(self, name: str) -> bytes | None:
        return None if self.cache is None else await asyncio.to_thread(self.cache.get, name)

    async def _fetched(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None, known: bool = False
    ) -> Buffer | None:
        """Read from the server; wait and repeat if it fails, unless a copy is `known` and the server failed just before."""
        tries = 1 if known and time.monotonic() - self._failed < _GONE else TRIES
        for attempt in range(1, tries + 1):
            try:
                async with asyncio.timeout(ANSWER if self._opening else None):
                    return await self._store.get(key, prototype, byte_range)
            except failures() as error:
                silent = self._opening and isinstance(error, TimeoutError)
                if attempt == tries or silent or isinstance(error, PermissionError | ImportError):
                    self._failed = time.monotonic()
                    reason = f"no answer within {ANSWER:g} s" if silent else f"{type(error).__name__}: {error}"
                    raise RemoteError(f"{self.url}/{key} cannot be read ({attempt} attempts): {reason}") from error
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _check_presence(self) -> None:
        """Raise RemoteError if the metadata are gone: an absent chunk means missing values only in a store that is there."""
        if time.monotonic() - self._seen < _GONE:
            return
        prototype = default_buffer_prototype()
        for key in _ROOT:
            if await self._fetched(key, prototype) is not None:
                self._seen = time.monotonic()
                return
        raise RemoteError(f"{self.url} is gone: it has none of {', '.join(_ROOT)} any more")

    def _tell(self, error: RemoteError) -> None:
        """Log that copies are read, once for each store that a process opens."""
        if self.cache is not None and not self._told:
            self._told = True
            _LOG.warning("%s; its copies in %s are read instead", error, self.cache.folder)
