"""The `data` section: files, variables with their roles, and periods."""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from credit_like.errors import UserError
from credit_like.schema.base import Duration, FileName, Section, UserPath
from credit_like.schema.plugin import plugin

_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2})(?::?(\d{2}))?(?::?(\d{2}))?)?")


def parse_time(value: Any) -> str:
    """Convert a date, `…THH` or `…THH:MM` to an ISO time `YYYY-MM-DDTHH:MM:SS`, in any calendar.

    The time stays text because a 360-day calendar has days that `datetime` does not support; such texts sort like
    times. Raises UserError for anything else.
    """
    if isinstance(value, dt.datetime | dt.date):
        value = value.isoformat()
    match = _TIME.fullmatch(str(value).strip())
    _, month, day, hour, minute, second = (int(part or 0) for part in match.groups()) if match else (0,) * 6
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour <= 23 and minute <= 59 and second <= 59):
        raise UserError(f"expected a time such as 2020-01-31 or 2020-01-31T18, got {value!r}")
    assert match
    return f"{match[1]}-{month:02d}-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}"


TimeText = Annotated[str, WithJsonSchema({"type": "string", "x-is": "time"})]
Time = Annotated[str, BeforeValidator(parse_time, json_schema_input_type=TimeText), PlainSerializer(str)]


PAIR = {"type": "array", "prefixItems": [{"type": "string"}] * 2, "minItems": 2, "maxItems": 2}


class Period(Section):
    """First and last time, both included; in a file also `[first, last]`."""

    shorthands = (PAIR,)

    start: Time
    """First time."""
    end: Time
    """Last time, included."""

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
            raise UserError(f"expected a period that ends after it starts, got {self}")
        return self

    def __str__(self) -> str:
        return f"[{self.start}, {self.end}]"


def _periods(value: Any) -> Any:
    """Convert one period `[a, b]` to a list of one; a list of periods `[[a, b], [c, d]]` stays."""
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


class Transform(Section):
    """A function that makes a variable more normal before it is scaled; in a file also just its `type`."""

    shorthands = ({"enum": ["log1p", "sqrt", "asinh"]},)

    type: Literal["log1p", "sqrt", "asinh"]
    """With u = x / scale: log(1 + u), √(1 + u) − 1 or asinh u; −x has the opposite value."""
    scale: float = Field(default=1.0, gt=0)
    """Size of the variable, in its units, above which the function is no longer nearly linear."""

    @model_validator(mode="before")
    @classmethod
    def _from_type(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    def __str__(self) -> str:
        return f"{self.type} of x / {self.scale:.9g}"


class VariableSpec(Section):
    """A variable, with where it is stored if that differs from the section's source; in a file also just its name."""

    shorthands = ({"type": "string"},)

    name: FileName = Field(min_length=1)
    """Name of the variable in this experiment."""
    var: str | None = None
    """Name in the store. Default: `name`."""
    path: UserPath | None = None
    """File, template or URL of this variable, if it is not in the source's own files."""
    compute: Literal["solar"] | None = None
    """Compute the variable from time and grid instead of reading it; `solar` is the insolation."""
    irradiance: UserPath | None = None
    """Table of the total solar irradiance of each year for `compute: solar`: lines of a year and its mean in W m-2. A value
    holds in the middle of its year, and is interpolated linearly between years. Default: 1360.8 W m-2 always."""
    units: str | None = None
    """Units of the variable in this experiment; values in other units are converted when read. Default: the store's."""
    levels: tuple[float, ...] | None = None
    """Levels of this variable, in the units of the level coordinate. Default: `data.levels`."""
    fill: Literal["persist", "cyclic"] | None = None
    """How to continue a forcing beyond its data: `persist` holds the last analysed field, `cyclic` repeats a
    climatological year. Default: no continuation."""

    transform: Transform | None = None
    """Transform of a predicted variable, such as precipitation. Statistics, the model's inputs and outputs and the loss are
    then those of the transformed values; forecasts and scores are in physical units."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Role(Section):
    """The variables of one role."""

    level: tuple[VariableSpec, ...] = ()
    """Variables on the levels of `data.levels`."""
    surface: tuple[VariableSpec, ...] = ()
    """Variables with a single level."""


def _listed(value: Any) -> Any:
    """Convert a single source to a list of one."""
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
    """The data: files, variables with their roles, and periods."""

    source: Sources
    """Source of the fields, or a list of sources, which are merged."""
    timestep: Duration
    """Time step of the model, such as 6h; a multiple of the store's time step."""
    levels: tuple[float, ...] = ()
    """Values of the level coordinate exactly as in the store and in its units, for all variables on levels."""
    prognostic: Role
    """Variables that are predicted and fed back as input of the next step."""
    diagnostic: Role = Role()
    """Variables that are predicted but not fed back."""
    dynamic_forcing: Role = Role()
    """Variables that are input at every step and not predicted, such as insolation."""
    static: Role = Role()
    """Variables that are input and constant in time, such as orography."""
    history_len: int = Field(default=1, ge=1, le=1000)
    """Number of input states, the current one included."""
    forecast_len: int = Field(default=1, ge=1)
    """Autoregressive steps per training sample; 1 = single-step training."""
    train: Periods
    """Training period `[first, last]`, or a list of periods."""
    valid: Periods
    """Validation period or periods."""
    test: Periods
    """Test period or periods, for forecasts and scores."""
    statistics: UserPath | None = None
    """netCDF file of the normalisation statistics. Default: fitted to the training period, in
    `save_loc/statistics.nc`."""
