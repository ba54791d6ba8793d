"""Which local files are read, and in which state: what is made of them is of no use once they have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from credit_like.data.sources._files import find_files, is_url
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.variables import Variables

Stamp = tuple[str, int, int]
"""Path, size and time of modification in ns."""


def stamps(store: FieldStore, variables: Variables) -> list[Stamp]:
    """Return the state of every local file from which the variables are read, sorted; of stores all files in them.

    Besides fields these are grids and weights of `regrid`, and tables of irradiance.
    """
    configs = {id(found[0]): found[0] for variable in variables if (found := store.source_of(variable)) is not None}
    paths: set[str] = {variable.spec.irradiance for variable in variables if variable.spec.irradiance}
    for config in configs.values():
        given = getattr(config, "path", "")
        for path in [given] if isinstance(given, str) else given:
            if path and not is_url(path):
                with suppress(UserError):  # the path of a plug-in may mean something else
                    paths.update(find_files(path, {}))
        regrid = getattr(config, "regrid", None)
        paths.update(path for name in ("like", "weights") if (path := getattr(regrid, name, None)))
    return sorted({stamp for path in paths for stamp in _below(path)})


def _below(path: str) -> Iterator[Stamp]:
    """Yield the state of a file, or of all files in a folder."""
    files = [path]
    if os.path.isdir(path):
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    for file in files:
        with suppress(FileNotFoundError):
            found = os.stat(file)
            yield os.path.abspath(file), found.st_size, found.st_mtime_ns
