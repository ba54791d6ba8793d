"""The `inference` and `evaluation` sections."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from credit_like.errors import UserError
from credit_like.schema.base import (
    Duration,
    DurationText,
    FileName,
    Latitude,
    Longitude,
    Section,
    UserPath,
    check_box,
    format_duration,
    parse_duration,
)
from credit_like.schema.data import Periods, Sources, Time, parse_time
from credit_like.schema.derive import Derive
from credit_like.schema.plugin import plugin


class InitialTimes(Section):
    """Initial times: explicit `times`, or every `interval` from `start` to `end`, both included.

    In a file also one time, a list of times, or `[first, last, interval]`.
    """

    shorthands = ({"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1})

    times: tuple[Time, ...] = ()
    """Explicit initial times."""
    start: Time | None = None
    """First initial time."""
    end: Time | None = None
    """Last initial time."""
    interval: Duration | None = None
    """Time between initial times, such as 12h."""

    @model_validator(mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        """Convert a time, a list of times or `[first, last, interval]` to a mapping."""
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
    BeforeValidator(_lead, json_schema_input_type=Annotated[int, Field(ge=1)] | DurationText),
    PlainSerializer(lambda v: v if isinstance(v, int) else format_duration(v)),
]


class Perturbations(Section):
    """How the initial states of members differ; the first member starts from the analysis."""

    type: Literal["gaussian", "bred", "lagged"] = "gaussian"
    """`gaussian`: random fields on the sphere. `bred`: pairs of bred vectors, added and subtracted. `lagged`: forecasts from
    earlier analyses, valid at the initial time."""
    cycles: int = Field(default=4, ge=1, le=1000)
    """For `bred`: number of breeding cycles before the initial time."""
    cycle: Duration = dt.timedelta(days=1)
    """For `bred`: length of a cycle, a multiple of the time step."""
    lag: Duration | None = None
    """For `lagged`: time between the analyses of successive members. Default: one time step."""

    @model_validator(mode="after")
    def _of_the_type(self) -> Perturbations:
        keys = {"bred": {"cycles", "cycle"}, "lagged": {"lag"}}.get(self.type, set())
        # A resolved experiment holds the defaults of all keys.
        foreign = sorted(type(self).model_fields.keys() - keys - {"type"})
        if others := [key for key in foreign if getattr(self, key) != type(self).model_fields[key].default]:
            raise UserError(f"expected no {', '.join(others)} with `type: {self.type}`, got one, remove it")
        return self


class Ensemble(Section):
    """An ensemble: members with noise in the model, from perturbed initial states, or both.

    The first member starts from the unperturbed state.
    """

    members: int = Field(default=1, ge=1, le=100_000)
    """Number of members; 1 = a single unperturbed forecast."""
    from_: Literal["model", "perturbations", "both"] | None = Field(default=None, alias="from")
    """What makes the members differ. Default: the noise of a model that has any, and perturbations where there is an
    `amplitude` or a type of `perturbations`."""
    length_scale_km: float = Field(default=1000.0, gt=0, le=20_000)
    """Correlation length of the perturbations in km."""
    amplitude: dict[str, Annotated[float, Field(ge=0)]] = Field(default={})
    """Standard deviation of the perturbation of each variable, in units of the standard deviation of its change per
    step. Bred vectors grow from such perturbations, and are scaled back to their size."""
    perturbations: Perturbations | None = None
    """How the initial states differ. Default: by Gaussian random fields, where there is an `amplitude`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the perturbations and of the noise."""

    @property
    def kind(self) -> str:
        """Return the type of the perturbations."""
        return self.perturbations.type if self.perturbations else "gaussian"

    def sources(self, noisy: bool) -> tuple[bool, bool]:
        """Return whether members have noise of their own, and whether their initial states are perturbed.

        `noisy`: whether the model has noise.
        """
        if self.from_ is None:
            return noisy, not noisy or self.perturbations is not None or any(self.amplitude.values())
        return self.from_ != "perturbations", self.from_ != "model"


class InferenceSection(Section):
    """The forecasts to make with a trained model."""

    init: InitialTimes | None = None
    """Initial times. Default: every fourth step of the test period."""
    lead: Lead = Field(default="5d")
    """Length of a forecast: a duration (10d) or a number of steps (40)."""
    output: plugin("writer", default="zarr") = Field(default={"type": "zarr"})  # type: ignore[valid-type]
    """Format of the forecast files, by its `type` (or `format`), and its keys."""
    checkpoint: Literal["newest", "best"] | Annotated[int, Field(ge=0, strict=True)] = "newest"
    """The checkpoint to forecast with: `newest`, `best` (lowest validation loss of the newest phase), or the step of one."""
    weights: Literal["ema", "raw"] = "ema"
    """Use the moving average of the weights if the run has one (`ema`), or the trained weights (`raw`)."""
    batch_size: int = Field(default=1, ge=1, le=100_000)
    """Number of forecasts (initial times, or members) that are computed at once."""
    amp: bool | None = None
    """Compute in bfloat16; by default as training does."""
    ensemble: Ensemble = Ensemble()
    """Ensemble of forecasts."""
    derive: Derive | None = None
    """Fields to write that follow from predicted ones, such as `[{pressure_levels: [850, 500]}, geopotential]`."""

    @model_validator(mode="before")
    @classmethod
    def _format_is_the_type(cls, value: Any) -> Any:
        """Accept `output: {format: zarr}` for `output: {type: zarr}`, and both where they are the same."""
        if isinstance(value, dict) and isinstance(value.get("output"), dict) and "format" in value["output"]:
            output = dict(value["output"])
            name = output.pop("format")
            if output.setdefault("type", name) != name:
                raise UserError(
                    f"expected `type` or `format` of output, which are the same key, got type {output['type']!r} and format "
                    f"{name!r}, remove one"
                )
            return {**value, "output": output}
        return value


class Box(Section):
    """A latitude-longitude box in degrees; `west > east` crosses the date line or Greenwich."""

    south: Latitude
    """Southern limit in degrees north."""
    north: Latitude
    """Northern limit in degrees north."""
    west: Longitude = 0.0
    """Western limit in degrees east, together with `east`. Default: the full circle."""
    east: Longitude = 360.0
    """Eastern limit in degrees east, together with `west`. Default: the full circle."""

    @model_validator(mode="after")
    def _upright(self) -> Box:
        check_box(self.south, self.north, *({"west", "east"} & self.model_fields_set))
        if self.east - self.west > 360:
            raise UserError(
                f"expected a box of at most 360 degrees of longitude, got west {self.west:g} and east {self.east:g}"
            )
        return self


Quantile = Annotated[float, Field(gt=0, lt=1)]


class Thresholds(Section):
    """Thresholds of events; the event is a value above the threshold, and its probability the fraction of the members."""

    values: dict[str, tuple[float, ...]] = Field(default={})
    """Variable → thresholds in its units, at all of its levels."""
    quantiles: tuple[Quantile, ...] = ()
    """Quantiles, between 0 and 1, of the values at each point over the period of the climatology; for all variables."""

    @model_validator(mode="after")
    def _different(self) -> Thresholds:
        for name, values in (*self.values.items(), ("quantiles", self.quantiles)):
            if len(set(values)) < len(values):
                raise UserError(f"expected each threshold once, got one of {name} more than once, remove it")
        return self


class EvaluationSection(Section):
    """How forecasts are scored, and against what."""

    truth: Sources | None = None
    """Source of the truth. Default: the experiment's own data."""
    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = ("rmse", "bias", "acc", "activity", "spectrum")
    """Names of the metrics to compute, such as rmse, acc or crps."""
    thresholds: Thresholds = Thresholds()
    """Thresholds of the metrics brier, fair-brier and reliability, such as `{quantiles: [0.1, 0.9]}`."""
    regions: dict[str, Box] = Field(default={})
    """Name → box of regions to score beside the whole grid, which is `global`."""
    baselines: dict[FileName, UserPath] = Field(default={})
    """Name → forecast store or results file in WeatherBench2 layout, scored beside persistence and climatology."""
    climatology_window_days: int = Field(default=61, ge=1, le=366)
    """Width in days of the window, centred on the day of year, over which the climatology averages."""
    climatology_period: Periods | None = None
    """Period of the climatology. Default: the training period."""
    bootstrap: int = Field(default=0, ge=0, le=100_000)
    """Number of bootstrap resamples of the initial times, for confidence intervals; 0 = none."""
    derive: Derive | None = None
    """Fields to score that follow from predicted ones: of the forecasts, unless their files have them, and of the truth.
    Default: those of `inference.derive`."""

    @field_validator("regions")
    @classmethod
    def _global_is_the_whole_grid(cls, value: dict[str, Box]) -> dict[str, Box]:
        if "global" in value:
            raise UserError("expected another name than global, which is the whole grid, change it")
        return value
