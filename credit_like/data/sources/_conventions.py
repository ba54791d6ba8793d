"""Reading conventions of ERA5, CMIP6, CAM and WRF files: further dimensions, their roles, and time and grid without axes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data.times import Times, from_seconds, parse
from credit_like.errors import UserError
from credit_like.grid import turn

DIMS = ("time", "level", "latitude", "longitude")
PERIOD = "period_hours"
"""Attribute of variables that are sums over time: the hours of the sum, several if fields differ."""
FROM_START = "sums_from_initial_time"
"""Attribute of variables of forecasts that are sums from the initial time to each lead."""
RANGES = "ranges_of_steps"
"""Attribute of variables of forecasts that are means, maxima or minima over times of several lengths: which, and the hours."""
DIFFERS = "differs_between_files"
"""Attribute of variables without time that are not the same in all files: two of the files."""
_STANDARD_NAMES = {
    "time": ("time",),
    "level": (
        "air_pressure", "model_level_number", "atmosphere_sigma_coordinate", "height", "altitude", "depth",
        "atmosphere_hybrid_sigma_pressure_coordinate", "atmosphere_hybrid_height_coordinate",
    ),
    "latitude": ("latitude",),
    "longitude": ("longitude",),
}  # fmt: skip
_AXES = {"T": "time", "Z": "level", "Y": "latitude", "X": "longitude"}
_NAMES = {
    "time": ("time", "valid_time", "timestep", "times", "date", "datetime", "step"),
    "level": (
        "level", "lev", "plev", "pressure_level", "isobaricinhpa", "model_level", "hybrid", "pressure", "pfull",
        "height", "depth", "bottom_top",
    ),
    "latitude": ("latitude", "lat", "nav_lat", "y", "grid_yt", "south_north", "xlat"),
    "longitude": ("longitude", "lon", "nav_lon", "x", "grid_xt", "west_east", "xlong"),
}  # fmt: skip
_APART = (
    "number",
    "realization",
    "member",
    "member_id",
    "ensemble",
    "ensemble_member",
    "step",
    "leadtime",
    "lead_time",
)
_DEGREES = {
    "latitude": ("degrees_north", "degree_north", "degrees_N"),
    "longitude": ("degrees_east", "degree_east", "degrees_E"),
}
VALID = ("valid_min", "valid_max", "valid_range")
"""Attributes with the values that are no missing ones, by CF."""
_PRESSURES = ("Pa", "hPa", "kPa", "mbar", "mb", "millibar", "millibars")
_TEXT_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})[ T_](\d{2}):(\d{2}):(\d{2})")


class RepeatedTimes(UserError):
    """Files have a time more than once, and the experiment does not say which of them is read."""


def roles(raw: xr.Dataset, given: Mapping[str, str]) -> dict[str, str]:
    """Return the dimension of each role: those `given`, and the others by attributes or common names.

    Of several dimensions with one role (`lev` and `ilev`, `time` and `step`) the one that most fields have is chosen,
    then the longest, then the one with the more common name.
    """
    found: dict[str, list[str]] = {}
    for dim in map(str, raw.dims):
        role = role_of(raw, dim)
        if role and role not in given and dim not in given.values():
            found.setdefault(role, []).append(dim)
    fields = [variable.dims for variable in raw.variables.values() if len(variable.dims) > 1]

    def rank(role: str, dim: str) -> tuple[int, int, int]:
        names = _NAMES[role]
        position = names.index(dim.lower()) if dim.lower() in names else len(names)
        return sum(dim in dims for dims in fields), raw.sizes[dim], -position

    return {**given, **{role: max(dims, key=lambda dim: rank(role, dim)) for role, dims in found.items()}}


def role_of(raw: xr.Dataset, dim: str) -> str | None:
    """Return the role of a dimension from its standard name, axis, units or common names."""
    attrs = raw[dim].attrs if dim in raw.variables else {}
    for role, standard_names in _STANDARD_NAMES.items():
        if attrs.get("standard_name") in standard_names:
            return role
    if attrs.get("axis") in _AXES:
        return _AXES[attrs["axis"]]
    units = str(attrs.get("units", ""))
    for role, spellings in _DEGREES.items():
        if units in spellings:
            return role
    named = next((role for role in DIMS if dim in _NAMES[role] or dim.lower() in _NAMES[role]), None)
    if named is None and " since " in units:
        return "time"
    if named is None and units in _PRESSURES:
        return "level"
    return named


def reduced(raw: xr.Dataset, kept: Mapping[str, str], select: Mapping[str, int | float | str], path: str) -> xr.Dataset:
    """Return the dataset without selected dimensions and without those of size 1 that have no role.

    Raises UserError if a dimension does not have the selected value.
    """
    chosen = {dim: _position(raw, dim, value, path) for dim, value in select.items() if dim in raw.dims}
    single = {str(dim): 0 for dim, size in raw.sizes.items() if size == 1 and dim not in {*kept.values(), *chosen}}
    return raw.isel({**single, **chosen}, drop=True)


def _position(raw: xr.Dataset, dim: str, wanted: int | float | str, path: str) -> int:
    """Return where a dimension has a value; dimensions without coordinate count from 0."""
    values = raw[dim].values.tolist() if dim in raw.variables else list(range(raw.sizes[dim]))
    for i, value in enumerate(values):
        if _same(value, wanted):
            return i
    raise UserError(
        f"expected {dim} of {path} ({listed(raw, dim)}), got {wanted}; change data.source.select.{dim}",
    )


def _same(value: Any, wanted: int | float | str) -> bool:
    text = value.decode() if isinstance(value, bytes) else str(value)
    try:
        return text.strip() == str(wanted) or float(text) == float(wanted)
    except ValueError:
        return False


def own_name(dim: str) -> str:
    """Return the name that a dimension has in its file: an underscore is put before it where another one has its role."""
    return dim[1:] if dim.startswith("_") and dim[1:] in DIMS else dim


def listed(dataset: xr.Dataset, dim: str, most: int = 8) -> str:
    """Return the values of a dimension as text, or its positions where it has no coordinate."""
    values = dataset[dim].values.tolist() if dim in dataset.variables else list(range(dataset.sizes[dim]))
    texts = [
        value.decode() if isinstance(value, bytes) else f"{value:g}" if isinstance(value, float) else str(value)
        for value in values
    ]
    return ", ".join(texts if len(texts) <= most else [*texts[: most - 2], "…", texts[-1]])


def single_values(raw: xr.Dataset) -> dict[str, Any]:
    """Return the only level, member and step of a file: variables without dimension, and dimensions of size 1."""
    return {
        str(name): variable.values.ravel().tolist()[0]
        for name, variable in raw.variables.items()
        if variable.size == 1
        and set(variable.dims) <= {name}
        and (
            str(name).lower() in _APART
            or variable.attrs.get("standard_name") in ("realization", "forecast_period")
            or role_of(raw, str(name)) == "level"
        )
    }


def same_points(name: str, one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two axes of degrees have the same points in the same order; longitudes may differ by whole circles."""
    if one.shape != other.shape:
        return False
    theirs = np.asarray(other, np.float64)
    apart = np.asarray(one, np.float64) - theirs
    return bool(np.allclose(theirs + (turn(apart) if name == "longitude" else apart), theirs, atol=1e-4))


def same_circle(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether two axes are the same whole circle of longitudes that begins elsewhere or is counted from another meridian."""
    if one.shape != other.shape or same_points("longitude", one, other):
        return False
    steps = np.abs(turn(np.diff(np.asarray(one, np.float64))))
    if not np.isclose(steps.mean() * len(one), 360, rtol=1e-3):
        return False
    here, there = (np.sort(np.round(np.asarray(axis, np.float64) % 360, 3) % 360) for axis in (one, other))
    return bool(np.allclose(here, there, atol=2e-3))


def fields(dataset: xr.Dataset) -> list[str]:
    """Return the names of the variables on latitude and longitude."""
    return [str(name) for name, v in dataset.data_vars.items() if {"latitude", "longitude"} <= set(v.dims)]


def text_times(raw: xr.Dataset, dim: str, calendar: str | None) -> Times | None:
    """Return the times that a variable on `dim` holds as text, as WRF's `Times` does, or None if there is none."""
    for variable in raw.variables.values():
        if variable.dims[:1] != (dim,) or variable.dtype.kind not in "SUO":
            continue
        if variable.ndim == 2 and variable.dtype.kind == "S":
            texts = [bytes(row.tobytes()).decode(errors="replace") for row in variable.values]
        elif variable.ndim == 1:
            texts = [
                text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in variable.values
            ]
        else:
            continue
        matches = [_TEXT_TIME.match(text) for text in texts]
        if matches and all(matches):
            known = calendar or "standard"
            found = [parse("{}-{}-{}T{}:{}:{}".format(*match.groups()), known) for match in matches if match]
            return from_seconds(np.array(found, np.int64), known)
    return None


def numeric_times(raw: xr.Dataset, dim: str) -> str | None:
    """Return the name of a variable that holds the times of `dim` as numbers since a date, or None if there is none."""
    for name, variable in raw.variables.items():
        if variable.dims == (dim,) and " since " in str(variable.attrs.get("units", "")):
            return str(name)
    return None


def valid_times(raw: xr.Dataset, dim: str) -> str | None:
    """Return the name of a variable that holds the valid times of `dim`, whose own coordinate is another; None if there is none.

    In netCDF of cfgrib, `time` is the reference time of a forecast, and `valid_time` the time that its field is of.
    """
    if dim not in raw.variables or dim == "valid_time" or raw[dim].attrs.get("standard_name") == "time":
        return None
    found = [
        str(name)
        for name, variable in raw.variables.items()
        if variable.dims == (dim,)
        and name != dim
        and (name == "valid_time" or variable.attrs.get("standard_name") == "time")
        and " since " in str(variable.attrs.get("units", ""))
    ]
    return next((name for name in found if name == "valid_time"), found[0] if found else None)


def plane_axes(raw: xr.Dataset, names: Mapping[str, str], path: str) -> dict[str, NDArray[np.float64]]:
    """Return latitude and longitude of a file that holds them as fields, one value for each row and column.

    Returns an empty dict if the file has no such fields. Raises UserError if the grid is curvilinear.
    """
    if not {"latitude", "longitude"} <= set(names):
        return {}
    plane = (names["latitude"], names["longitude"])
    axes: dict[str, NDArray[np.float64]] = {}
    for role, along in (("latitude", 1), ("longitude", 0)):
        found = [
            variable
            for name, variable in raw.variables.items()
            if variable.dims[-2:] == plane
            and variable.ndim <= 3
            and (
                variable.attrs.get("standard_name") == role
                or (
                    str(name).lower() in _NAMES[role]
                    and str(name) not in ("x", "y")  # names of axes: a field of such a name is a quantity
                    and variable.attrs.get("standard_name") is None
                )
            )
        ]
        if not found:
            return {}
        values = np.asarray(found[0].values, np.float64)
        values = values[0] if values.ndim == 3 else values
        spacing = float(np.abs(np.diff(values, axis=1 - along)).min(initial=360.0))
        if np.ptp(values, axis=along).max() > 0.05 * spacing:
            raise UserError(
                f"expected one {role} for each {'row' if role == 'latitude' else 'column'} of {path}, got a "
                "curvilinear grid; set data.source.regrid.weights, or regrid the files"
            )
        axes[role] = values.mean(along)
    return axes
