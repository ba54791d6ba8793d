"""The folder of reproducible files, and the copies of remote stores in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import model_validator

from credit_like.data.files.object_cache import ObjectCache
from credit_like.data.files.remote import RemoteStore
from credit_like.errors import UserError
from credit_like.schema.base import Section, Size, UserPath

SET_CACHE = "set CREDIT_LIKE_CACHE to a writable folder"


def cache_folder() -> Path:
    """Return the folder: `CREDIT_LIKE_CACHE`, or one in the user's home. Raises UserError where neither is known."""
    if named := os.environ.get("CREDIT_LIKE_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "credit_like"
    except RuntimeError:  # no HOME, and no entry in the list of users
        raise UserError(f"expected a home folder, got none; {SET_CACHE}") from None


class Cache(Section):
    """Local copies of objects that are read from a URL; in a file also just the size."""

    shorthands = ({"type": "string"}, {"type": "integer", "minimum": 1})

    size: Size
    """Largest total size of the copies, such as `100GB`; the least recently used are removed."""
    folder: UserPath | None = None
    """Folder of the copies, which several experiments and processes may share. Default: `stores` in `CREDIT_LIKE_CACHE`, or in
    `~/.cache/credit_like`.
    """

    @model_validator(mode="before")
    @classmethod
    def _from_size(cls, value: Any) -> Any:
        return {"size": value} if isinstance(value, str | int) and not isinstance(value, bool) else value


def copies(cache: Cache | None) -> ObjectCache | None:
    """Return the cache that a source specifies."""
    return None if cache is None else ObjectCache(cache.folder or cache_folder() / "stores", cache.size)


def remote(url: str, storage_options: dict[str, Any], cache: Cache | None) -> RemoteStore:
    """Return a store behind a URL, with the cache that a source specifies."""
    return RemoteStore.of(url, storage_options, copies(cache))
