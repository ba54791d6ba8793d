"""Layout of forecast files: dimensions, coordinates and attributes, and the mapping of channels to variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.data.aliases import find
from credit_like.data.sources._conventions import PERIOD
from credit_like.data.units import same_dimensions
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.registry import did_you_mean
from credit_like.variables import Variable

# CF standard names by WeatherBench2 name, each with units of its dimensions; other names are looked up in the alias table.
STANDARD_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "temperature": (("K", "air_temperature"),),
    "u_component_of_wind": (("m s-1", "eastward_wind"),),
    "v_component_of_wind": (("m s-1", "northward_wind"),),
    "specific_humidity": (("1", "specific_humidity"),),
    "geopotential": (("m2 s-2", "geopotential"), ("m", "geopotential_height")),
    "vertical_velocity": (("Pa s-1", "lagrangian_tendency_of_air_pressure"), ("m s-1", "upward_air_velocity")),
    "2m_temperature": (("K", "air_temperature"),),
    "10m_u_component_of_wind": (("m s-1", "eastward_wind"),),
    "10m_v_component_of_wind": (("m s-1", "northward_wind"),),
    "surface_pressure": (("Pa", "surface_air_pressure"),),
    "mean_sea_level_pressure": (("Pa", "air_pressure_at_mean_sea_level"),),
    "total_precipitation": (
        ("kg m-2", "precipitation_amount"),
        ("m", "lwe_thickness_of_precipitation_amount"),
        ("kg m-2 s-1", "precipitation_flux"),
        ("m s-1", "lwe_precipitation_rate"),
    ),
}


@dataclass(frozen=True)
class ForecastLayout:
    """The shape of one forecast dataset.

    `init` are initial times (datetime64[s] or cftime) and `leads` lead steps, ascending, of `timestep` seconds;
    `variables` are all outputs of the stepper, in channel order; `attrs` holds the store's attributes per variable.
    """

    init: NDArray[Any]
    leads: tuple[int, ...]
    timestep: int
    members: int
    grid: Grid
    variables: tuple[Variable, ...]
    chosen: dict[str, tuple[float, ...]]
    """Variable → its levels to write (empty at the surface)."""
    variable_attrs: Mapping[str, Mapping[str, Any]]
    attrs: Mapping[str, str]
    cf: bool = False
    parts: tuple[int, int] = (1, 1)
    """Bands of rows and of columns into which formats with chunks divide fields, so that several ranks can write one."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Return the dimensions before level, latitude and longitude."""
        names = ("forecast_reference_time", "forecast_period") if self.cf else ("time", "prediction_timedelta")
        return (names[0], "number", names[1]) if self.members > 1 else names

    @cached_property
    def _channels(self) -> dict[str, list[int]]:
        """Return variable → its chosen channels among the stepper's outputs."""
        names = [channel for variable in self.variables for channel in variable.channels]
        return {
            name: [names.index(f"{name}@{level:g}" if levels else name) for level in (levels or (0.0,))]
            for name, levels in self.chosen.items()
        }

    def select(self, fields_BCHW: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Return variable → (B, levels, H, W), or (B, H, W) at the surface."""
        return {name: self.shaped(name, fields_BCHW[:, self.channels(name)]) for name in self.chosen}

    def channels(self, name: str) -> list[int]:
        """Return the chosen channels of a variable among the stepper's outputs."""
        return self._channels[name]

    def shaped(self, name: str, fields_BCHW: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the fields of a variable's channels without the dimension of levels if it is at the surface."""
        return fields_BCHW if self.chosen[name] else fields_BCHW[:, 0]

    def field_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape ([levels], H, W) of a variable, levels in file order."""
        levels = self.chosen[name]
        return (*([len(levels)] if levels else []), self.grid.height, self.grid.width)

    def level_dim(self, name: str) -> str | None:
        """Return `level`, `level_<variable>` if its levels differ from those of the first, or None at the surface."""
        levels = self.chosen[name]
        if not levels:
            return None
        first = next(chosen for chosen in self.chosen.values() if chosen)
        return "level" if levels == first else f"level_{name}"

    def shape(self, name: str, init: int | None = None) -> tuple[int, ...]:
        """Return the full shape of a variable for `init` initial times (all of them if not given)."""
        sizes = [len(self.init) if init is None else init]
        if self.members > 1:
            sizes.append(self.members)
        return (*sizes, len(self.leads), *self.field_shape(name))

    def variable_dims(self, name: str) -> tuple[str, ...]:
        level = self.level_dim(name)
        return (*self.dims, *([level] if level else []), "latitude", "longitude")

    def coordinates(self, init: NDArray[Any] | None = None) -> xr.Dataset:
        """Return all coordinates with CF attributes and encodings, and the attributes of the dataset."""
        init = self.init if init is None else init
        reference, period = self.dims[0], self.dims[-1]
        seconds = np.array(self.leads, np.int64) * self.timestep
        coords: dict[str, Any] = {
            reference: (reference, calendar.for_xarray(init), {"standard_name": "forecast_reference_time"}),
            period: (
                period,
                seconds.astype("timedelta64[s]").astype("timedelta64[ns]"),
                {"standard_name": "forecast_period"},
            ),
            "latitude": ("latitude", self.grid.latitude, _LATITUDE),
            "longitude": ("longitude", self.grid.longitude, _LONGITUDE),
        }
        if self.members > 1:
            number = {"standard_name": "realization", "long_name": "ensemble member", "units": "1"}
            coords["number"] = ("number", np.arange(self.members, dtype=np.int32), number)
        for name, levels in self.chosen.items():
            of_levels = self.variable_attrs.get(f"level_{name}", {})
            if (dim := self.level_dim(name)) and (of_levels or dim not in coords):
                attrs = {"long_name": "level", "units": "1", "axis": "Z", "positive": "down"}
                attrs.update(of_levels)
                coords[dim] = (dim, np.array(levels, np.float64), attrs)
        if self.cf:
            valid = calendar.seconds(init)[:, None] + seconds
            times = calendar.from_seconds(valid.ravel(), calendar.calendar_of(init)).reshape(valid.shape)
            coords["time"] = (
                (reference, period),
                calendar.for_xarray(times),
                {"standard_name": "time", "long_name": "valid time"},
            )
        result = xr.Dataset(coords=coords, attrs=dict(self.attrs))
        for coordinate in result.coords.values():
            if coordinate.dtype.kind == "f":
                # coordinates have no missing values, and CF allows no fill value for them
                coordinate.encoding = {"_FillValue": None}
        unit = "hours" if (seconds % 3600 == 0).all() else "seconds"
        result[period].attrs.setdefault("long_name", "lead time")
        result[period].encoding = {"units": unit, "dtype": "int64"}
        result[reference].attrs.setdefault("long_name", "initial time")
        for name in {reference, "time"} & set(result.coords):
            whole = bool((calendar.seconds(init) % 3600 == 0).all()) and unit == "hours"
            # CF's reference date is 1970 in every calendar. Whole hours are stored as integers, so that times are
            # exact.
            encoding = {"units": f"{'hours' if whole else 'seconds'} since 1970-01-01", "dtype": "int64"}
            result[name].encoding = {**encoding, "calendar": _calendar(init)}
        return result

    def attrs_of(self, name: str) -> dict[str, Any]:
        """Return units, long_name and, if known, standard_name and the hours over which the values are sums."""
        attrs = {key: str(value) for key, value in self.variable_attrs.get(name, {}).items() if value}
        attrs = {key: attrs[key] for key in ("units", "long_name", "standard_name", PERIOD) if key in attrs}
        attrs.setdefault("long_name", name.replace("_", " "))
        if "standard_name" not in attrs and (known := find(name, STANDARD_NAMES)):
            units = attrs.get("units", STANDARD_NAMES[known][0][0])
            fitting = [cf for own, cf in STANDARD_NAMES[known] if same_dimensions(units, own)]
            if fitting:
                attrs["standard_name"] = fitting[0]
        if attrs.get("standard_name") == "air_temperature":
            attrs["units_metadata"] = "temperature: on_scale"
        if self.cf:
            attrs["coordinates"] = "time"
        return attrs


_LATITUDE = {"standard_name": "latitude", "long_name": "latitude", "units": "degrees_north", "axis": "Y"}
_LONGITUDE = {"standard_name": "longitude", "long_name": "longitude", "units": "degrees_east", "axis": "X"}


def _calendar(times: NDArray[Any]) -> str:
    """Return the calendar to write times in: that of dates before October 1582 is proleptic, which numpy's are."""
    is_early = times.dtype.kind == "M" and bool((times < np.datetime64("1582-10-15")).any())
    return "proleptic_gregorian" if is_early else calendar.calendar_of(times)


def choose(
    variables: Sequence[Variable], names: Sequence[str] = (), levels: Sequence[float] = ()
) -> dict[str, tuple[float, ...]]:
    """Return variable → levels of these `names` and `levels`, `output.variables` and `output.levels`; empty means all.

    Raises UserError for a variable that the model does not predict, and for levels that no variable has.
    """
    known = [variable.name for variable in variables]
    for name in names:
        if name not in known:
            raise UserError(
                f"inference.output.variables: expected predicted variables ({', '.join(known)}), got {name!r}"
                f"{did_you_mean(name, known)}"
            )
    there = {level for variable in variables for level in variable.levels}
    if absent := sorted(set(levels) - there):
        raise UserError(
            f"inference.output.levels: expected some of {', '.join(f'{x:g}' for x in sorted(there))}, "
            f"got {', '.join(f'{x:g}' for x in absent)}, change it to levels of data.levels"
        )
    chosen = {}
    for variable in variables:
        own = tuple(level for level in variable.levels if not levels or level in levels)
        if (not names or variable.name in names) and (own or not variable.levels):
            chosen[variable.name] = own
    return chosen
