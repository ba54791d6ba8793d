"""Finding the files of a path, template, glob or list, and which source reads them."""

from __future__ import annotations

import difflib
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec

from credit_like.data.files.remote import failures
from credit_like.errors import UserError, reason

_DATE_CODES = {
    "%Y": "[0-9]" * 4,
    "%m": "[0-9]" * 2,
    "%d": "[0-9]" * 2,
    "%H": "[0-9]" * 2,
    "%j": "[0-9]" * 3,
    "%y": "[0-9]" * 2,
    "%M": "[0-9]" * 2,
    "%S": "[0-9]" * 2,
}
_MAGIC = {b"GRIB": "grib", b"CDF": "netcdf", b"\x89HDF": "netcdf"}
"""First bytes of a file → the type of the source that reads it."""


def is_url(path: str) -> bool:
    """Return whether fsspec has to open the path."""
    return "://" in path or "::" in path


def source_type(path: str) -> str:
    """Return the type of the source that reads a file, a store or the first file of a template.

    A folder and `.zarr` in the path are zarr, or on disk an Anemoi dataset by its attributes; other URLs are netCDF. A file is
    known from its first bytes.

    Raises UserError if there is no file or it begins like no format that can be read.
    """
    if ".zarr" in path or (not is_url(path) and Path(path).is_dir()):
        return "anemoi" if not is_url(path) and _is_anemoi(Path(path)) else "zarr"
    if is_url(path):
        return "netcdf"
    first = Path(find_files(path, {})[0])
    try:
        with first.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise UserError(f"expected a file or a store, got {path}: {reason(error)}; change it") from error
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            return kind
    raise UserError(f"expected netCDF, GRIB or zarr, got {path}, which begins with {start!r}; change it")


def _is_anemoi(folder: Path) -> bool:
    """Return whether a store has the states and the list of variables of an Anemoi dataset."""
    for name in ("zarr.json", ".zattrs"):
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            attrs = found.get("attributes", {}) if name == "zarr.json" else found
            return all((folder / array).is_dir() for array in ("data", "dates")) and "variables_metadata" in attrs
    return False


def find_files(paths: str | Sequence[str], storage_options: dict[str, Any]) -> list[str]:
    """Return the files that a path, glob, template or list matches, sorted.

    A path that exists is itself, whatever characters it has. Raises UserError, which lists similar names, if there is none, and
    for anything that is neither a file nor a folder.
    """
    found: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        if not is_url(path) and is_there(path):
            found.append(path)
            continue
        pattern = path
        for code, digits in _DATE_CODES.items():
            pattern = pattern.replace(code, digits)
        if any(character in pattern for character in "*?["):
            matches = _matches(path, pattern, storage_options)
            if not matches:
                raise UserError(f"expected files that match {path}, got none{_near(path)}")
            if gone := [match for match in matches if not (is_url(path) or is_there(match))]:
                raise UserError(
                    f"expected files that match {path}, got {gone[0]}, a link to a file that is not there; remove or correct it"
                )
            found += matches
        elif is_url(path):
            found.append(path)
        else:
            raise UserError(f"expected an existing file or folder, got {path!r}{_near(path)}")
    if not found:
        raise UserError("expected a path or a list of paths, got an empty list; change data.source.path")
    return found


def _matches(path: str, pattern: str, storage_options: dict[str, Any]) -> list[str]:
    """Return what a glob matches, sorted. Raises UserError if a server does not list it."""
    try:
        fs, inside = fsspec.core.url_to_fs(pattern, **storage_options)
        found = fs.glob(inside)
    except ImportError as error:
        raise UserError(lacking("files that match", path, error)) from error
    except failures(ValueError, TypeError) as error:
        raise UserError(
            f"expected files that match {path}, got none that can be listed: {reason(error)}; "
            "change data.source.path or storage_options"
        ) from error
    return sorted(fs.unstrip_protocol(match) if is_url(path) else match for match in found)


def is_there(path: str) -> bool:
    """Return whether there is a file or folder. Raises UserError for anything else: opening a pipe would block forever."""
    try:
        mode = os.stat(path).st_mode if path else 0
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(
            f"expected a file or folder, got {path[:200]!r}: {reason(error)}; change data.source.path"
        ) from error
    if path and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"expected a file or folder, got {path!r}, a pipe, socket or device; change data.source.path")
    return bool(path)


def _near(path: str) -> str:
    if is_url(path) or not path:
        return "; change data.source.path"
    parent = Path(path).parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:  # an error while looking for a hint must not hide the original one
        return "; change data.source.path"
    close = difflib.get_close_matches(Path(path).name, names, n=3, cutoff=0.4) or names[:5]
    return f"; {parent} has {', '.join(close)}" if close else f"; {parent} is empty"


def lacking(expected: str, path: str, error: ImportError) -> str:
    """Return the message about a package that fsspec or xarray needs for a URL and that is not installed."""
    return f"expected {expected}, got {path}: {error}; pip install 'credit-like[cloud]', or change data.source.path"
