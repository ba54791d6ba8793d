"""The folder of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder: `CREDIT_LIKE_CACHE`, or one in the user's home."""
    return Path(os.environ.get("CREDIT_LIKE_CACHE") or Path.home() / ".cache" / "credit_like")
