"""Profiles of machines: `site: derecho` reads the file `config/site/derecho.yml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from credit_like.errors import UserError
from credit_like.registry import did_you_mean
from credit_like.schema.shipped import shipped


def profiles() -> dict[str, Path]:
    """Return all profiles by name; one in the current folder's `config/site` takes precedence over a shipped one."""
    folders = (shipped("config/site"), Path("config") / "site")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yml"))}


def read(name: str) -> dict[str, Any]:
    """Return the `site` section of a profile, or of a file where `name` is a path.

    Raises UserError with the closest name where there is none.
    """
    known = profiles()
    if name not in known and Path(name).suffix in (".yml", ".yaml") and Path(name).is_file():
        known = {name: Path(name)}
    if name not in known:
        raise UserError(
            f"expected a site, one of {', '.join(sorted(known))} or a file, got {name!r}{did_you_mean(name, sorted(known))}"
        )
    content = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("site"), dict):
        raise UserError(f"expected a mapping under `site:` in {known[name]}, got {type(content).__name__}")
    section: dict[str, Any] = content["site"]
    return section
