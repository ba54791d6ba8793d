"""The `inference` and `evaluation` sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from credit_like.errors import UserError
from credit_like.schema.base import Duration, Section, format_duration, parse_duration
from credit_like.schema.data import Periods, Sources, Time, parse_time
from credit_like.schema.plugin import plugin


class InitialTimes(Section):
    """Either explicit `times`, or every `interval` from `start` to `end`, both included.

    In a file also a time, a list of times, or `[first, last, interval]`.
    """

    shorthands = ({"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1})

    times: tuple[Time, ...] = ()
    start: Time | None = None
    end: Time | None = None
    interval: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        """`2020-01-01`, a list of times, or `[first, last, interval]`."""
        if isinstance(value, dict | InitialTimes):
            return value
        if not isinstance(value, list | tuple):
            return {"times": [value]}
        if len(value) == 3:
            try:
                parse_time(value[2])
            except ValueError:
                return {"start": value[0], "end": value[1], "interval": value[2]}
        return {"times": list(value)}

    @model_validator(mode="after")
    def _complete(self) -> InitialTimes:
        ranged = (self.start, self.end, self.interval)
        if bool(self.times) == any(part is not None for part in ranged) or (not self.times and None in ranged):
            raise UserError("expected a time, a list of times or [first, last, interval]")
        return self


def _lead(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise UserError(f"expected a lead of at least 1 step, got {value}")
        return value
    text = str(value).strip()
    if text.endswith(("steps", "step")):
        number = text.removesuffix("steps").removesuffix("step").strip()
        if number.isdecimal() and len(number) < 10:
            return _lead(int(number))
    return parse_duration(value)


Lead = Annotated[
    Any,
    BeforeValidator(_lead, json_schema_input_type=int | str),
    PlainSerializer(lambda v: v if isinstance(v, int) else format_duration(v)),
]


class Ensemble(Section):
    """Members from initial states perturbed by Gaussian random fields on the sphere."""

    members: int = Field(default=1, ge=1)
    length_scale_km: float = Field(default=1000.0, gt=0)
    amplitude: dict[str, float] = Field(default={})
    """Standard deviation per variable, as a fraction of that variable's own standard deviation of change per step."""
    seed: int = 0


class InferenceSection(Section):
    """Which forecasts to make from a trained model."""

    init: InitialTimes | None = None
    """Initial times; every fourth step of the test period if not given."""
    lead: Lead = Field(default="5d")
    """How far: a duration (10d) or a number of steps (40)."""
    output: plugin("writer", default="zarr") = Field(default={"type": "zarr"})  # type: ignore[valid-type]
    weights: Literal["ema", "raw"] = "ema"
    """The moving average of the weights where the run kept one, or the weights as trained."""
    batch_size: int = Field(default=1, ge=1)
    amp: bool | None = None
    """Compute in bfloat16; by default as training does."""
    ensemble: Ensemble = Ensemble()

    @model_validator(mode="before")
    @classmethod
    def _format_is_the_type(cls, value: Any) -> Any:
        """`output: {format: zarr}` is how files are spoken of; `type` is how plug-ins are."""
        if isinstance(value, dict) and isinstance(value.get("output"), dict) and "format" in value["output"]:
            output = dict(value["output"])
            output["type"] = output.pop("format")
            return {**value, "output": output}
        return value


class Box(Section):
    """A region in degrees; `west > east` crosses the date line or Greenwich."""

    south: float = Field(ge=-90, le=90)
    north: float = Field(ge=-90, le=90)
    west: float = 0.0
    east: float = 360.0

    @model_validator(mode="after")
    def _upright(self) -> Box:
        if self.south > self.north:
            raise UserError(f"expected south below north, got south {self.south:g} and north {self.north:g}")
        return self


class EvaluationSection(Section):
    """What forecasts are compared with, and how."""

    truth: Sources | None = None
    """Where the truth is, when not in the experiment's own source."""
    metrics: tuple[str, ...] = ("rmse", "bias", "acc", "activity", "spectrum")
    regions: dict[str, Box] = Field(default={})
    baselines: dict[str, str] = Field(default={})
    """Name → forecast store or results file in WeatherBench2 layout, beside persistence and climatology."""
    climatology_window_days: int = Field(default=61, ge=1)
    climatology_period: Periods | None = None
    """Years of the climatology; the training period if not given."""
    bootstrap: int = Field(default=0, ge=0)
    """Resamples of the initial times for confidence intervals; 0 = none."""
