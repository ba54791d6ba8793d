"""Profiles of machines: `site: derecho` reads the file `config/site/derecho.yml`, by the rules of experiment files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from credit_like.errors import UserError
from credit_like.registry import did_you_mean
from credit_like.schema.errors import ExperimentError, shown
from credit_like.schema.shipped import shipped


def profiles() -> dict[str, Path]:
    """Return all profiles by name; one in the current folder's `config/site` takes precedence over a shipped one."""
    folders = (shipped("config/site"), Path("config") / "site")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yml"))}


def find(name: str) -> Path:
    """Return the file of a profile, or the file itself where `name` is a path.

    Raises UserError with the closest name where there is none.
    """
    known = profiles()
    if name not in known and Path(name).suffix in (".yml", ".yaml") and Path(name).is_file():
        return Path(name)
    if name not in known:
        raise UserError(
            f"expected a site, one of {', '.join(sorted(known))} or a file, got {name!r}{did_you_mean(name, sorted(known))}"
        )
    return known[name]


def read(name: str) -> dict[str, Any]:
    """Return the `site` section of a profile, or of a file where `name` is a path; its text is that of an experiment file.

    Raises UserError where there is no such file, and with what is wrong in it.
    """
    from credit_like.schema.load import read_plain  # which loads whole experiments, and these name sites

    file = find(name)
    try:
        section = read_plain(file).get("site")
    except ExperimentError as error:
        raise UserError("; ".join(map(str, error.problems))) from None
    if not isinstance(section, dict):
        raise UserError(f"expected a mapping under `site:` in {file}, got {shown(section)}")
    return section
