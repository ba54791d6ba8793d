"""File operations that take effect completely or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from credit_like.outputs import replacing, sync

_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False)
_BLOCK = 1 << 22


def write_bytes(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: a reader, or a crash, finds either the old or the new content."""
    with replacing(path) as draft:
        write_bytes(draft, content)
    sync(path.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def to_json(value: Any) -> bytes:
    """Serialise a value to canonical JSON: sorted keys, no NaN, one line per key of the two outer levels."""
    return _lines(value, 2).encode() + b"\n"


def _lines(value: Any, levels: int, indent: str = "") -> str:
    # The json module indents in Python, which is ten times slower: many seconds for a manifest of hundreds of ranks.
    if not levels or not isinstance(value, dict) or not value:
        return _ENCODER.encode(value)
    rows = (
        f"\n{indent} {_ENCODER.encode(key)}: {_lines(value[key], levels - 1, indent + ' ')}" for key in sorted(value)
    )
    return "{" + ",".join(rows) + f"\n{indent}}}"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal, as `sha256sum` prints it."""
    sha = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()
