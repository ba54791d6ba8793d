"""Nested mappings, such as experiments, by dotted key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(value: Any, path: str = "", separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is no mapping."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from leaves(below, f"{path}{separator}{key}" if path else str(key), separator)
    elif path:
        yield path, value


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value before, value after) where these differ, sorted by key; an absent value is None."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path, before, after
