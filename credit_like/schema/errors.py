"""Error messages about experiment files, with the place and what to change."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from credit_like.errors import UserError, cut
from credit_like.registry import BrokenPluginError, closest
from credit_like.schema.plugin import PluginError, UnknownPluginError

Path = tuple[str | int, ...]

_PERIODS = (("data", "train"), ("data", "valid"), ("data", "test"), ("evaluation", "climatology_period"))

_KEY = "\0"
"""Placeholder in a message for the key as the file spells it."""

_MOST_SHOWN = 50
_LONGEST = 200
_QUOTED = re.compile(rf"('[^']{{{_LONGEST}}})[^']+'")
"""Matches a quoted value that is too long to be shown in full."""

_PARENT = "\1"
"""Placeholder in a message for the parent of the key."""


@dataclass(frozen=True)
class Place:
    """Where a key is written: a file and line, or a command-line option (line 0)."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Locations:
    """Where each key of a merged experiment is written."""

    def __init__(self, places: Mapping[Path, Place], root: Place) -> None:
        self._places = {**places, (): root}

    def resolve(self, loc: Iterable[str | int]) -> tuple[Place, str]:
        """Return the nearest place in the file for a location in the experiment, and the key as the file spells it.

        The experiment holds some values in a fuller form than the file (one source as a list of one, a pair of times as
        `start` and `end`). Parts of the location that the file does not have are skipped, and their indices are not
        shown.
        """
        found: Path = ()
        key: list[str] = []
        for part in loc:
            if found in _PERIODS and isinstance(part, int) and not self._has_parts((*found, part)):
                continue  # `[first, last]` is one period, and 0 is the index of that period
            if (*found, part) in self._places:
                found = (*found, part)
                key.append(str(part))
            elif isinstance(part, str):
                key.append(part)
        return self._places[found], ".".join(key)

    def _has_parts(self, path: Path) -> bool:
        return any((*path, key) in self._places for key in (0, "start", "end"))

    def problem(self, loc: Iterable[str | int], message: str) -> Problem:
        place, key = self.resolve(loc)
        return Problem(place.file, place.line, key, message)


@dataclass(frozen=True)
class Problem:
    """One problem, with its place and what to change: `file:line: key: expected …, got …, change …`."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        key = cut(self.key, _LONGEST)
        message = _QUOTED.sub(lambda match: f"{match[1]}…'", self.message)
        text = ": ".join(part for part in (str(Place(self.file, self.line)), key, message) if part)
        # Text from a file must not start new lines or send control sequences to the terminal.
        return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


class ExperimentError(UserError):
    """All problems of one experiment file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(dict.fromkeys(problems))
        shown = [str(problem) for problem in self.problems[:_MOST_SHOWN]]
        more = len(self.problems) - len(shown)
        super().__init__("\n".join([*shown, f"… and {more} more problems"] if more else shown))


def in_order(problems: Iterable[Problem], first: str) -> list[Problem]:
    """Return the problems sorted by file and line, the experiment's own file first."""
    return sorted(problems, key=lambda problem: (problem.file != first, problem.file, problem.line))


def problems_of(error: ValidationError, model: type[BaseModel], data: Any, locations: Locations) -> list[Problem]:
    """Convert every error of a validation to a problem, including those inside plug-ins."""
    by_place: dict[tuple[Place, str], list[str]] = {}
    for loc, message in _messages(error, model, data, ()):
        place, key = locations.resolve(loc)
        by_place.setdefault((place, key), []).append(
            message.replace(_KEY, key or "the file").replace(_PARENT, key.rpartition(".")[0])
        )
    return [Problem(place.file, place.line, key, _either(messages)) for (place, key), messages in by_place.items()]


def error_paths(error: ValidationError, model: type[BaseModel], data: Any) -> list[Path]:
    """Return the places in the data of all errors of a validation, including those inside plug-ins."""
    return [path for path, _ in _messages(error, model, data, ())]


def _either(messages: list[str]) -> str:
    """Join the messages about one value; each member of a union reports what it expected."""
    unique = list(dict.fromkeys(messages))
    return unique[0] if len(unique) == 1 else "; or ".join(unique)


def _messages(error: ValidationError, model: type[BaseModel], data: Any, prefix: Path) -> list[tuple[Path, str]]:
    result: list[tuple[Path, str]] = []
    renamed: set[Path] = set()
    missing: list[tuple[Path, str]] = []
    for item in error.errors(include_url=False):
        path = _inside(item["loc"], data)
        if item["type"] in ("extra_forbidden", "missing"):
            path = (*_inside(item["loc"][:-1], data), item["loc"][-1])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, PluginError):
            result += _messages(cause.error, cause.config, item["input"], (*prefix, *path))
        elif isinstance(cause, UnknownPluginError):
            result.append(((*prefix, *path, "type"), f"{cause}, change {_KEY}"))
        elif isinstance(cause, BrokenPluginError):
            result.append(((*prefix, *path, "type"), str(cause)))
        elif item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # long enough; the invalid entries are reported separately
        elif item["type"] == "extra_forbidden":
            section = _section(model, path[:-1])
            known = list(_keys(section)) if section else []
            got = str(path[-1])
            close = closest(got, known)
            if close:
                renamed.add((*path[:-1], close))
            result.append(((*prefix, *path), _unknown_key(got, close, known, bool(prefix or path[1:]))))
        elif item["type"] == "missing":
            missing.append((path, f"expected this key, got nothing, add `{path[-1]}: …`"))
        else:
            result.append(((*prefix, *path), _message(item)))
    return result + [((*prefix, *path), message) for path, message in missing if path not in renamed]


def _inside(loc: Iterable[str | int], data: Any) -> Path:
    """Return a location without pydantic's labels of union members, which are strings where the data have no keys."""
    path: list[str | int] = []
    value = data
    for part in loc:
        if isinstance(value, Mapping) and isinstance(part, str):
            path.append(part)
            value = value.get(part)
        elif isinstance(part, int):
            path.append(part)
            if isinstance(value, list | tuple):  # a mapping is kept, as it stands for a list of one
                value = value[part] if part < len(value) else None
    return tuple(path)


def _keys(section: type[BaseModel]) -> Iterable[str]:
    return (field.alias or name for name, field in section.model_fields.items())


def _section(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the section at a path inside a model, or None if the value there is not a section."""
    section: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int) or section is None:
            continue
        field = next((f for name, f in section.model_fields.items() if part in (f.alias, name)), None)
        section = _first_section(field.annotation) if field else None
    return section


def _first_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for arg in typing.get_args(annotation) if (found := _first_section(arg))), None)


def _unknown_key(got: str, close: str | None, known: list[str], is_nested: bool) -> str:
    where = f"a key of {_PARENT}" if is_nested else "a section of an experiment"
    if close:
        return f"expected {where}, got {got!r}, change it; did you mean {close!r}?"
    return f"expected {where}, got {got!r}, change it to one of {', '.join(known)} or remove it"


_WANTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
    "tuple_type": "a list",
    "list_type": "a list",
    "is_instance_of": "a mapping of keys",
    "none_required": "nothing",
}


def _message(item: Mapping[str, Any]) -> str:
    """Return `expected …, got …, change …` for one pydantic error."""
    kind, ctx = item["type"], item.get("ctx", {})
    got = shown(item["input"])
    if kind in ("value_error", "assertion_error"):
        text = str(ctx.get("error", item["msg"]))
        return text if "change" in text or "did you mean" in text else f"{text}, change {_KEY}"
    if kind in ("literal_error", "enum"):
        choices = [choice.strip().strip("'") for choice in ctx["expected"].replace(" or ", ", ").split(",")]
        close = closest(str(item["input"]), choices)
        hint = f"; did you mean {close!r}?" if close else ""
        return f"expected one of {', '.join(choices)}, got {got}, change {_KEY}{hint}"
    if kind in _WANTED:
        quotes = " (put it in quotes)" if kind == "string_type" and isinstance(item["input"], int | float) else ""
        return f"expected {_WANTED[kind]}, got {got}, change {_KEY}{quotes}"
    bounds = {
        "greater_than": f"a value above {ctx.get('gt')}",
        "greater_than_equal": f"a value of at least {ctx.get('ge')}",
        "less_than": f"a value below {ctx.get('lt')}",
        "less_than_equal": f"a value of at most {ctx.get('le')}",
        "too_short": f"at least {ctx.get('min_length')} entries",
        "too_long": f"at most {ctx.get('max_length')} entries",
        "string_too_short": "text that is not empty",
        "string_pattern_mismatch": f"text of the form {ctx.get('pattern')}",
    }
    if kind not in bounds:
        return f"{item['msg'][0].lower()}{item['msg'][1:]}, got {got}, change {_KEY}"
    return f"expected {bounds[kind]}, got {got}, change {_KEY}"


def shown(value: Any) -> str:
    """Return a value as messages show it: short, and in YAML's spelling."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return cut(repr(value), 80)
