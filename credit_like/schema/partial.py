"""Experiments with invalid keys, for the checks that do not depend on these keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ValidationError

from credit_like.layout import Finding
from credit_like.registry import closest
from credit_like.schema.base import HiddenKey
from credit_like.schema.errors import Path, error_paths
from credit_like.schema.experiment import Experiment

_STAND_INS: dict[Path, Any] = {
    ("name",): "hidden",
    ("save_loc",): "hidden",
    ("model",): {"type": "persistence"},
    ("data", "source"): {"type": "synthetic"},
    ("data", "timestep"): "1h",
    ("data", "prognostic"): {},
    ("data", "train"): ["2000-01-01", "2000-01-01"],
    ("data", "valid"): ["2000-01-01", "2000-01-01"],
    ("data", "test"): ["2000-01-01", "2000-01-01"],
}
"""Values of required keys, with which an experiment is validated before the keys are hidden."""
_MOST_ROUNDS = 10
"""Most validations: each may show keys that depend on one that has been removed."""


def partial_experiment(data: Mapping[str, Any], wrong: Iterable[Path]) -> Experiment | None:
    """Return an experiment without the keys at the paths `wrong`; None if too little is left.

    Reading one of these keys raises HiddenKey. A key that is misspelt hides the key that it probably means.
    """
    hidden = {_key(data, path) for path in wrong}
    for _ in range(_MOST_ROUNDS):
        if () in hidden or ("data",) in hidden:
            return None
        rest = _without(data, hidden)
        try:
            experiment = Experiment.model_validate(rest)
        except ValidationError as error:
            known = len(hidden)
            # A key that is absent now cannot be removed: its section is.
            found = [_key(rest, path) for path in error_paths(error, Experiment, rest)]
            hidden |= {path if _has(rest, path) or path in _STAND_INS else path[:-1] for path in found}
            if len(hidden) == known:
                return None
            continue
        for path in _outermost(hidden):
            _hide(experiment, rest, path)
        return experiment
    return None


def visible(check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield the findings of a check, up to where it reads a hidden key."""
    with suppress(HiddenKey):
        yield from check(*arguments)


def _key(data: Any, path: Path) -> Path:
    """Return the path of the innermost key of a mapping, outside of lists."""
    for depth, part in enumerate(path):
        if not isinstance(data, Mapping) or isinstance(part, int):
            return path[:depth]
        data = data.get(str(part))
    return path


def _has(data: Any, path: Path) -> bool:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _outermost(hidden: set[Path]) -> list[Path]:
    """Return the paths that do not lie in another one; what stands for a section must keep its keys."""
    return sorted(path for path in hidden if not any(path[:length] in hidden for length in range(len(path))))


def _without(data: Mapping[str, Any], hidden: set[Path]) -> dict[str, Any]:
    """Return a copy of the data without these keys; required ones get a value that stands for them."""
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for path in _outermost(hidden):
        section: Any = result
        for part in path[:-1]:
            section = section.get(part) if isinstance(section, Mapping) else None
        if isinstance(section, dict):
            section.pop(path[-1], None)
            if path in _STAND_INS:
                section[path[-1]] = copy.deepcopy(_STAND_INS[path])
    return result


def _hide(section: Any, data: Any, path: Path) -> None:
    """Remove a key from its section.

    The sections on the way are in the file, so they belong to this experiment alone; a default may be shared.
    """
    for part in path[:-1]:
        name = _field(section, str(part))
        if name is None or not isinstance(data, Mapping) or part not in data:
            return
        section, data = section.__dict__.get(name), data[part]
    if isinstance(section, BaseModel) and (name := _field(section, str(path[-1]))):
        section.__dict__.pop(name, None)


def _field(section: Any, key: str) -> str | None:
    """Return the field of a section that a key of a file means, also where it is misspelt."""
    fields = type(section).model_fields if isinstance(section, BaseModel) else {}
    names = {field.alias or name: name for name, field in fields.items()}
    return names.get(key) or names.get(closest(key, list(names)) or "")
