"""The model zoo and the site profiles that come with the program: `models/` and `config/site/` of the repository.

An installed wheel has a copy of both in `credit_like/_shipped` (see `setup.py`); a checkout uses its own folders.
"""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str = "") -> Path:
    """Return the path of a shipped file or folder, such as `models/wxformer-1deg/model.yml`; it need not exist."""
    inside = _PACKAGE / "_shipped"
    return (inside if inside.is_dir() else _PACKAGE.parent) / name


def shipped_file(name: str) -> Path | None:
    """Return the path of a shipped file that is named by its path in the repository; None where there is none."""
    if Path(name).is_absolute() or ".." in Path(name).parts or not name.startswith(("models/", "config/site/")):
        return None
    path = shipped(name)
    return path if os.path.isfile(path) else None
