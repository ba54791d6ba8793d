"""The `data` section: which files, which variables in which role, which times."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from credit_like.errors import UserError
from credit_like.schema.base import Duration, Section
from credit_like.schema.plugin import plugin

_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2})(?::?(\d{2}))?(?::?(\d{2}))?)?")


def parse_time(value: Any) -> str:
    """An ISO time `YYYY-MM-DDTHH:MM:SS` in whatever calendar the data have, from a date, `…THH` or `…THH:MM`.

    Kept as text because a 360-day calendar has days that `datetime` does not know; such texts sort like times.
    """
    if isinstance(value, dt.datetime | dt.date):
        value = value.isoformat()
    match = _TIME.fullmatch(str(value).strip())
    _, month, day, hour, minute, second = (int(part or 0) for part in match.groups()) if match else (0,) * 6
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour <= 23 and minute <= 59 and second <= 59):
        raise UserError(f"expected a time such as 2020-01-31 or 2020-01-31T18, got {value!r}")
    assert match
    return f"{match[1]}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}"


Time = Annotated[str, BeforeValidator(parse_time, json_schema_input_type=str), PlainSerializer(str)]


PAIR = {"type": "array", "prefixItems": [{"type": "string"}] * 2, "minItems": 2, "maxItems": 2}


class Period(Section):
    """First and last time, both included; `[first, last]` in a file."""

    shorthands = (PAIR,)

    start: Time
    end: Time

    @model_validator(mode="before")
    @classmethod
    def _from_pair(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            if len(value) != 2:
                raise UserError(f"expected [first time, last time], got {value!r}")
            return {"start": value[0], "end": value[1]}
        return value

    @model_validator(mode="after")
    def _in_order(self) -> Period:
        if self.end < self.start:
            raise UserError(f"expected a period that ends after it starts, got [{self.start}, {self.end}]")
        return self


def _periods(value: Any) -> Any:
    """One period `[a, b]` or a list of disjoint ones `[[a, b], [c, d]]`; always a tuple of periods inside."""
    if isinstance(value, dict | Period):
        return [value]
    if isinstance(value, list | tuple) and value and not isinstance(value[0], list | tuple | dict | Period):
        return [value]
    return value


Periods = Annotated[
    tuple[Period, ...],
    Field(min_length=1),
    BeforeValidator(_periods, json_schema_input_type=Period | Annotated[list[Period], Field(min_length=1)]),
]


class VariableSpec(Section):
    """One variable: its name here, and where it comes from when that differs; its name alone in a file is enough."""

    shorthands = ({"type": "string"},)

    name: str = Field(min_length=1)
    var: str | None = None
    """Name in the store; the same as `name` if not given."""
    path: str | None = None
    """File, template or URL that holds this variable, when not the source's own."""
    compute: Literal["solar"] | None = None
    """Computed from time and grid instead of read."""
    units: str | None = None
    """Units wanted; converted from the store's where they differ."""
    levels: tuple[float, ...] | None = None
    """Levels of this variable alone; those of the section if not given."""
    fill: Literal["persist", "cyclic"] | None = None
    """For a forcing: `persist` holds the last analysed field, `cyclic` repeats a climatological year."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Role(Section):
    """Variables of one role, on levels and at the surface."""

    level: tuple[VariableSpec, ...] = ()
    surface: tuple[VariableSpec, ...] = ()


def _listed(value: Any) -> Any:
    """One source is a list of one."""
    return value if isinstance(value, list | tuple) else [value]


if TYPE_CHECKING:
    Sources = tuple[Any, ...]
else:
    Sources = Annotated[
        tuple[plugin("source"), ...],
        Field(min_length=1),
        BeforeValidator(_listed, json_schema_input_type=plugin("source") | list[plugin("source")]),
    ]


class DataSection(Section):
    """Which files, which variables in which role, which times."""

    source: Sources
    """Where the fields are: one source, or a list of them that are merged."""
    timestep: Duration
    """Time between two steps of the model, such as 6h; a multiple of the store's own."""
    levels: tuple[float, ...] = ()
    """Values of the level coordinate, exactly as in the store, for all variables on levels."""
    prognostic: Role
    """Predicted from themselves, step after step."""
    diagnostic: Role = Role()
    """Predicted, and not fed back."""
    dynamic_forcing: Role = Role()
    """Given at every step, like insolation."""
    static: Role = Role()
    """Given once, like orography."""
    history_len: int = Field(default=1, ge=1)
    """Past states that the model sees."""
    forecast_len: int = Field(default=1, ge=1)
    """Autoregressive steps in one training sample; 1 = single step."""
    train: Periods
    valid: Periods
    test: Periods
    statistics: str | None = None
    """netCDF file with statistics; made in `save_loc/statistics.nc` from the training period if not given."""
