"""Write an experiment as YAML in few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

_WIDTH, _LINES = 140, 60
"""Of the experiment that is written, where it can be."""


def written(experiment: Mapping[str, Any], path: Path) -> str:
    """Return the translation of `path` as YAML text: one line for each key of a section, with nested values on the same line."""
    short = {key: f"{key}: {_flow(value)}" for key, value in experiment.items()}
    for width in (_WIDTH, 10**9):  # the second time what does not fit stays on its line
        parts = {key: [line] for key, line in short.items()}
        for key, value in experiment.items():
            if isinstance(value, dict) and len(str(value)) > 100:
                parts[key] = [f"{key}:", *(line for name, part in value.items() for line in _inside(name, part, width))]
        for key in sorted(short, key=lambda key: len(short[key])):  # short sections make room for long ones
            if sum(map(len, parts.values())) >= _LINES and len(short[key]) <= width:
                parts[key] = [short[key]]
        lines = [f"# Translated from CREDIT's {path.name} by `credit-like import-credit`.", *chain(*parts.values())]
        if len(lines) <= _LINES:
            break
    return "\n".join(lines) + "\n"


def _inside(name: str, value: Any, width: int) -> Iterator[str]:
    """Yield the lines of a key of a section; what does not fit on one has a line for each of its parts."""
    line = f"  {name}: {_flow(value)}"
    if len(line) <= width or not value or (isinstance(value, list) and not isinstance(value[0], dict)):
        yield line
        return
    yield f"  {name}:"
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"    {'-' if isinstance(value, list) else f'{key}:'} {_flow(part)}"


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""

    class Dumper(yaml.SafeDumper):
        """A dumper without anchors."""

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    text = yaml.dump(value, Dumper=Dumper, sort_keys=False, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
