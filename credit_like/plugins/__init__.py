"""Folders of plug-ins outside the package, importable as packages.

The folder /home/me/my_parts is the package `credit_like.plugins.my_parts_<its path in hexadecimal>`, and its file
`losses/zonal.py` is the module `….losses.zonal`; relative imports work between the files of a folder. The name contains
the path, so that a configuration of a plug-in can be unpickled in any process that sees the folder. `sys.path` is not
changed, so a file of the folder cannot shadow a library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


def package_name(folder: Path) -> str:
    """Return the name of the package as which a folder is imported."""
    readable = "".join(c if c.isalnum() else "_" for c in folder.name)
    return f"{__name__}.{readable}_{str(folder).encode().hex()}"


class _Folders(MetaPathFinder):
    """Meta path finder for the packages of `package_name`; Python's own finders handle their contents."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        try:
            folder = Path(bytes.fromhex(name.rpartition("_")[2]).decode())
        except ValueError:
            return None
        if not folder.is_dir():
            return None
        initial = folder / "__init__.py"
        if initial.is_file():
            return spec_from_file_location(fullname, initial, submodule_search_locations=[str(folder)])
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


sys.meta_path.append(_Folders())
