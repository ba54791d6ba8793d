"""The base class of all sections of an experiment file, and types that they share."""

from __future__ import annotations

import datetime as dt
import os
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from credit_like.errors import UserError, cut

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(s|min|h|d)", re.ASCII)
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,15})?)\s*(B|kB|MB|GB|TB)", re.ASCII)
_WALLTIME = re.compile(r"(\d{1,15}):([0-5]\d):([0-5]\d)", re.ASCII)


_BREAKS = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories that end a line, control a terminal, or cannot be encoded as UTF-8."""
_LARGEST = 3.4e38
_NAME_BYTES = 100
_APART = re.compile(r"""[\s'"\\#]""")


def one_line(text: str) -> str:
    """Return the text, which becomes part of a line of a script.

    Raises UserError for a control character, such as a newline, which would begin another line.
    """
    for character in text:
        if unicodedata.category(character) in _BREAKS:
            raise UserError(f"expected text without control characters, got {text[:200]!a}")
    return text


def one_word(text: str) -> str:
    """Return the text, which becomes one word of a scheduler's directive.

    Raises UserError for text that a scheduler would read as several words, as a comment or as nothing.
    """
    if not one_line(text) or _APART.search(text):
        raise UserError(
            f"expected one word, without blanks, quotes, backslashes and #, for the scheduler, got {text[:200]!a}"
        )
    return text


def file_name(text: str) -> str:
    """Return the text, which becomes part of the names of files, arrays and curves.

    Raises UserError for text that would name a file elsewhere or none at all.
    """
    if not one_line(text) or "/" in text or text.startswith(".") or len(text.encode()) > _NAME_BYTES:
        raise UserError(
            f"expected a name of at most {_NAME_BYTES} bytes without '/' and without a dot at its start, because files "
            f"have it in their names, got {cut(text, 60)!r}"
        )
    return text


Line = Annotated[str, AfterValidator(one_line)]
Word = Annotated[str, AfterValidator(one_word)]
FileName = Annotated[str, AfterValidator(file_name)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A file, a folder or a URL; `~` at its start is the home folder."""
Latitude = Annotated[float, Field(ge=-90, le=90)]
Longitude = Annotated[float, Field(ge=-360, le=720)]
"""Degrees east of Greenwich, in any of the usual ranges."""


def check_box(south: float, north: float, *given: str) -> None:
    """Check a latitude-longitude box, of whose limits in longitude, `west` and `east`, these are `given`.

    Raises UserError for a box that is upside down, or open on one side.
    """
    if south > north:
        raise UserError(f"expected south below north, got south {south:g} and north {north:g}")
    if len(given) == 1:
        other = {"west": "east", "east": "west"}[given[0]]
        raise UserError(
            f"expected both west and east, or neither, got only {given[0]}; give {other} too, or remove {given[0]}"
        )


def _is_number(annotation: Any) -> bool:
    """Return whether a type is a number or an optional one, with or without bounds."""
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(part is NoneType or _is_number(part) for part in get_args(annotation))
    return annotation in (int, float)


def _floats(value: Any) -> Iterator[float]:
    """Yield the floats in a value and in its tuples and mappings; sections look after their own."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _floats(part)
    elif isinstance(value, dict):
        yield from _floats((*value.keys(), *value.values()))


class HiddenKey(Exception):
    """The value of this key is not valid, which has been reported: what depends on it cannot be checked."""


class Section(BaseModel):
    """A frozen section of an experiment. Unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    shorthands: ClassVar[tuple[dict[str, Any], ...]] = ()
    """JSON Schemas of the short forms that a file may use for this section instead of a mapping."""

    if not TYPE_CHECKING:  # type checkers would then accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise HiddenKey for a key that `schema.partial` has removed; all others are attributes of the instance."""
            if name in type(self).model_fields:
                raise HiddenKey(name)
            return super().__getattr__(name)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `true` for a number (Python counts True as 1) and integers beyond 64 bits."""
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name or ""].annotation):
            raise UserError(f"expected a number, got {str(value).lower()}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError("expected a number below 2**63, got a greater one")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _fits_single_precision(cls, value: Any) -> Any:
        """Reject numbers in which models do not compute: torch refuses them in the middle of a step."""
        for number in _floats(value):
            if abs(number) > _LARGEST:
                raise UserError(
                    f"expected a number of at most {_LARGEST:g}, the largest in single precision, got {number:g}"
                )
        return value

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out values that are None by default; a None that replaces another default is kept."""
        data: dict[str, Any] = handler(self)
        absent = {key for name, f in type(self).model_fields.items() if f.default is None for key in (name, f.alias)}
        return {key: value for key, value in data.items() if value is not None or key not in absent}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        return {"anyOf": [*cls.shorthands, schema]} if cls.shorthands else schema


def parse_duration(value: Any) -> dt.timedelta:
    """Parse a duration such as `6h`, `30min`, `10d`, `90s` or `HH:MM:SS`.

    Raises UserError for anything else and for a duration that is not positive.
    """
    try:
        duration = value if isinstance(value, dt.timedelta) else _duration(str(value).strip())
    except OverflowError:
        raise UserError(f"expected a duration of less than a million years, got {value!r}") from None
    if duration is None:
        raise UserError(f"expected a duration such as 6h, 30min, 10d or 12:00:00, got {value!r}")
    if duration <= dt.timedelta(0):
        raise UserError(f"expected a duration longer than zero, got {value!r}")
    return duration


def _duration(text: str) -> dt.timedelta | None:
    if clock := _WALLTIME.fullmatch(text):
        hours, minutes, seconds = map(int, clock.groups())
        return dt.timedelta(hours=hours, minutes=minutes, seconds=seconds)
    short = _DURATION.fullmatch(text)
    # Decimal, because a float cannot hold the microseconds of a century.
    return dt.timedelta(microseconds=int(Decimal(short[1]) * _UNITS[short[2]] * 10**6)) if short else None


def format_duration(duration: dt.timedelta) -> str:
    """Return a duration as `Nd`, `Nh`, `Nmin` or `Ns`, in the largest unit that is exact."""
    seconds = duration // dt.timedelta(seconds=1)
    if microseconds := duration.microseconds:
        return f"{seconds}.{microseconds:06d}".rstrip("0") + "s"
    unit = next(unit for unit in ("d", "h", "min", "s") if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"


DurationText = Annotated[str, WithJsonSchema({"type": "string", "x-is": "duration"})]
Duration = Annotated[
    dt.timedelta,
    BeforeValidator(parse_duration, json_schema_input_type=DurationText),
    PlainSerializer(format_duration, return_type=str),
]


def parse_size(value: Any) -> int:
    """Parse a number of bytes such as `100GB` or `1.5TB`, in powers of ten.

    Raises UserError for anything else and for less than one byte.
    """
    found = _SIZE.fullmatch(str(value).strip())
    size = int(Decimal(found[1]) * _BYTES[found[2]]) if found else value
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 2**63:
        raise UserError(f"expected a size such as 100GB, 500MB or 1.5TB, got {value!r}")
    return size


def format_size(size: int) -> str:
    """Return a size as `NTB`, `NGB`, `NMB`, `NkB` or `NB`, in the largest unit that is exact."""
    unit = next(unit for unit in reversed(_BYTES) if size % _BYTES[unit] == 0)
    return f"{size // _BYTES[unit]}{unit}"


Size = Annotated[
    int,
    BeforeValidator(parse_size, json_schema_input_type=str | Annotated[int, Field(ge=1)]),
    PlainSerializer(format_size, return_type=str),
]
