"""State of the local files that are read: results computed from them are invalid once they have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress

from credit_like.data.files.find import find_files, is_url
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.variables import Variables


def digest_of_files(store: FieldStore, variables: Variables) -> str:
    """Return a hash of the paths, sizes and times of every local file from which the variables are read.

    It is a hash of their contents too where nobody sets times back. Of stores all files count. Besides fields these are grids
    and weights of `regrid`, and tables of irradiance.
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
    digest = hashlib.sha256()
    for path in sorted(map(os.path.abspath, paths)):
        for file in _below(path):
            with suppress(FileNotFoundError):
                state = os.stat(file)
                digest.update(f"{file}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _below(path: str) -> Iterator[str]:
    """Yield a file, or all files in a folder, in the same order each time."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))
