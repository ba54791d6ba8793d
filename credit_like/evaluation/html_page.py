"""HTML pages that contain their data, style and scripts, and need no network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from credit_like.outputs import replacing

REPORT_MARK = '<meta name="generator" content="credit-like evaluate">'
"""A line of every report."""


def render(template: str, data: Mapping[str, Any], title: str) -> str:
    """Return a page of the folder `page`: `{{title}}`, `{{data}}` and `{{name of a file there}}` are substituted."""
    folder = resources.files("credit_like.evaluation") / "page"
    # Names and units come from external files. Without these characters no text can end or change the script element.
    text_of_data = json.dumps(data, separators=(",", ":"), allow_nan=False)
    own = {
        "data": text_of_data.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&"}),
        "title": html.escape(title),
    }

    def part(place: re.Match[str]) -> str:
        name = place[1]
        return own[name] if name in own else (folder / name).read_text(encoding="utf-8")

    # Substitution takes one pass, so that placeholders in inserted text are not expanded.
    return re.sub(r"\{\{([\w.]+)\}\}", part, (folder / template).read_text(encoding="utf-8"))


def save_page(text: str, path: Path) -> Path:
    """Write a page atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
    return path
