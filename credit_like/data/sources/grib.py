"""GRIB files of edition 1 and 2, decoded by ecCodes (`pip install 'credit-like[grib]'`).

All files of a source form one index of messages, so that it does not matter how variables, levels, steps and members are
spread over files. A field is read by its offset when it is needed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from pydantic import Field
from xarray.core import indexing

from credit_like.data.files.direct import DirectArray, Spans, direct
from credit_like.data.files.find import find_files, is_url
from credit_like.data.sources import _grib_files
from credit_like.data.sources._conventions import FROM_START, PERIOD, RANGES, RepeatedTimes
from credit_like.data.sources._files import FileConfig, canonical
from credit_like.data.sources._grib_files import Geometries, Geometry, Message
from credit_like.data.sources._spectral import Synthesis
from credit_like.errors import UserError

_LOG = logging.getLogger(__name__)
_UPPER_AIR = (
    "t", "u", "v", "w", "q", "r", "z", "gh", "d", "vo", "o3", "pv", "pt", "pres", "wz", "strf", "vp", "cc", "clwc", "ciwc",
    "crwc", "cswc", "absv", "icmr", "clwmr", "rwmr", "snmr", "grle", "wind",
)  # fmt: skip
_LEVELS = {
    "isobaricInhPa": {"standard_name": "air_pressure", "units": "hPa"},
    "hybrid": {"standard_name": "model_level_number", "units": "1"},
}


_RANGES = {"avg": "means", "max": "maxima", "min": "minima"}
"""What a field is over its range of steps, by `stepType`."""
_WIND_ATTRS = {
    "u": {"units": "m s**-1", "long_name": "U component of wind", "standard_name": "eastward_wind"},
    "v": {"units": "m s**-1", "long_name": "V component of wind", "standard_name": "northward_wind"},
}


@dataclass(frozen=True)
class _Axes:
    """How the times of messages become dimensions."""

    times: Mapping[str, Callable[[Message], int]]
    """Dimension → its value for a message, in seconds."""
    is_forecast: bool = False

    def choose(self, key: str, in_source: str) -> str:
        """Return the remedy for messages that differ in a key: that of a data source, or for forecasts, which have no `select`."""
        return f"copy those of one of them, with `grib_copy -w {key}=VALUE`" if self.is_forecast else in_source


_VALID = _Axes({"time": lambda message: message.time})
_FORECAST = _Axes(
    {
        "time": lambda message: message.time - round(3600 * message.step),
        "prediction_timedelta": lambda message: round(3600 * message.step),
    },
    is_forecast=True,
)


class Config(FileConfig):
    type: Literal["grib"] = "grib"
    select: dict[str, int | float | str] = Field(default={})
    """Key of the messages → the value to read, such as `{number: 0}`. The keys are `number`, `step` and `period` (hours
    of a range of steps) in hours, ecCodes' `stepType`, `stepRange`, `dataType`, `typeOfLevel`, `gridType`, `dataDate`
    and `dataTime`, and a type of level, such as `heightAboveGround`.
    """


def open_dataset(config: Config) -> xr.Dataset:
    """Open the files of `config.path` as one lazy dataset, with ecCodes' short names.

    A field is named by its short name, or `NAME_TYPEOFLEVEL` for upper-air variables that are not on pressure or model
    levels (`z_surface`). Times are those at which a field is valid: the end of a range of steps. Absent messages are
    missing values; a variable without time range that is there once has no time dimension, and one on a single level that is
    neither of pressure nor of a model has no dimension of level.

    Spectral coefficients are evaluated on the grid of the other fields, or on the Gaussian grid of their truncation, and
    spectral vorticity and divergence give the wind too.

    Raises UserError if there is no file, a file is damaged or not GRIB, fields are not on one latitude-longitude grid,
    or several messages are valid at the same time.
    """
    paths = find_files(config.path, config.storage_options)
    if urls := [path for path in paths if is_url(path)]:
        raise UserError(f"expected GRIB files on disk, got {urls[0]}; download them first")
    try:
        messages = [message for path in paths for message in _grib_files.index(path)]
    except OSError as error:
        raise UserError(f"expected GRIB files, got one that does not open: {error}") from error
    chosen = _selected(messages, config.select, config.is_inherited)
    raw = _dataset(chosen, _VALID, config.duplicates)
    options = config.model_copy(update={"select": {}})
    options.refuse_absent({*map(str, raw.variables), *map(str, raw.dims)})
    return canonical(raw, options, chosen[0].path)


def open_forecasts(paths: Sequence[str]) -> xr.Dataset:
    """Open forecasts in GRIB files as one lazy dataset, with ecCodes' short names.

    Fields are on (time, prediction_timedelta, number, level, latitude, longitude), of which `number` is absent for one member and
    the level has the name of its type. Variables whose messages contradict each other are left out with a warning.

    Raises UserError if ecCodes is absent, a file is damaged or not GRIB, or fields are not on one latitude-longitude grid.
    """
    return _dataset([message for path in paths for message in _grib_files.index(path)], _FORECAST, None)


def _dataset(messages: Sequence[Message], axes: _Axes, duplicates: str | None) -> xr.Dataset:
    """Return the fields of all messages and their coordinates."""
    _refuse_spectral_wind(messages)
    geometry = Geometries(messages)
    first = messages[0]
    for message in {message.grid: message for message in reversed(messages)}.values():
        _same_grid(geometry, first, message, axes)
    plane = geometry(first)
    coordinates: dict[str, Any] = {
        "latitude": ("latitude", plane.latitude, {"units": "degrees_north"}),
        "longitude": ("longitude", plane.longitude, {"units": "degrees_east"}),
    }
    variables: dict[str, list[Message]] = {}
    for message in messages:
        variables.setdefault(_name(message), []).append(message)
    for dim, seconds in axes.times.items():
        values = np.unique([seconds(message) for message in messages])
        coordinates[dim] = (dim, values.astype("timedelta64[s]" if dim == "prediction_timedelta" else "datetime64[s]"))
    members = np.unique([int(message.key("number")) for message in messages])
    if len(members) > 1:
        coordinates["number"] = ("number", members)
    on_levels = [message for group in variables.values() if _has_levels(group) for message in group]
    for kind in {message.level_type for message in on_levels}:
        levels = np.unique([message.level for message in on_levels if message.level_type == kind])
        coordinates[kind] = (kind, levels, _LEVELS.get(kind, {}))
    fields = {}
    for name, group in variables.items():
        try:
            fields[name] = _field(name, group, coordinates, geometry, axes, duplicates)
        except UserError as error:
            if not axes.is_forecast:
                raise
            _LOG.warning("%s is not read: %s", name, error)
    return xr.Dataset(fields | _winds(fields, variables), coordinates)


def _name(message: Message) -> str:
    """Return the name of a message's variable; it depends on nothing else in the file."""
    if message.name in _UPPER_AIR and message.level_type not in _LEVELS:
        return f"{message.name}_{message.level_type}"
    return message.name


def _has_levels(group: Sequence[Message]) -> bool:
    """Return whether a variable has a dimension of level: one on a single level at the surface, such as 2 m, has none."""
    return any(message.level_type in _LEVELS or message.level != group[0].level for message in group)


def _selected(messages: Sequence[Message], select: dict[str, int | float | str], is_inherited: bool) -> list[Message]:
    """Return the messages with the selected keys. Raises UserError if a key or its value does not exist.

    A key that was written for other files (`is_inherited`) need not exist.
    """
    chosen = list(messages)
    for key, wanted in select.items():
        there: set[int | float | str]
        if any(message.level_type == key for message in messages):
            there = {m.level for m in chosen if m.level_type == key}
            kept = [m for m in chosen if m.level_type != key or _same(m.level, wanted)]
        elif key in dict(messages[0].keys):
            there = {m.key(key) for m in chosen}
            kept = [m for m in chosen if _same(m.key(key), wanted)]
        elif is_inherited:
            continue
        else:
            kinds = sorted({m.level_type for m in messages})
            raise UserError(
                f"expected data.source.select to name keys of the messages, got {key!r}; remove it or use one of "
                f"{', '.join([*dict(messages[0].keys), *kinds])}"
            )
        if not any(_same(value, wanted) for value in there):
            listed = ", ".join(sorted(map(str, there)))
            raise UserError(
                f"expected {key} of {messages[0].path} ({listed}), got {wanted}; change data.source.select.{key}"
            )
        chosen = kept
    return chosen


def _same(value: int | float | str, wanted: int | float | str) -> bool:
    try:
        return str(value) == str(wanted) or float(value) == float(wanted)
    except ValueError:
        return False


def _refuse_spectral_wind(messages: Sequence[Message]) -> None:
    """Raise UserError for spectral wind components, which archives hold with and without a factor cos φ."""
    for message in messages:
        if message.spectral and message.name in ("u", "v"):
            raise UserError(
                f"expected wind on a grid, or vorticity and divergence, got spectral coefficients in {message.where}, which do "
                "not say whether they are of the wind or of the wind times cos φ; convert the file with `cdo sp2gpl` or request "
                "vo and d"
            )


def _winds(fields: dict[str, xr.Variable], messages: dict[str, list[Message]]) -> dict[str, xr.Variable]:
    """Return u and v of spectral vorticity and divergence, where the files have these and no wind."""
    pair = [messages.get(name, []) for name in ("vo", "d")]
    if not all(pair) or not all(message.spectral for group in pair for message in group) or {"u", "v"} & fields.keys():
        return {}
    vo, d = fields["vo"], fields["d"]
    if vo.shape != d.shape or vo.dims != d.dims or pair[0][0].grid != pair[1][0].grid:
        return {}
    return {
        name: xr.Variable(vo.dims, indexing.LazilyIndexedArray(_Wind(_messages_of(vo), _messages_of(d), at)), attrs)
        for at, (name, attrs) in enumerate(_WIND_ATTRS.items())
    }


def _messages_of(variable: xr.Variable) -> _Messages:
    found = direct(variable)
    assert found is not None
    assert isinstance(found[0], _Messages)
    return found[0]


def _same_grid(geometry: Geometries, first: Message, other: Message, axes: _Axes) -> None:
    """Raise UserError if two messages are on different grids."""
    one, two = geometry(first), geometry(other)
    for axis in ("latitude", "longitude"):
        a, b = getattr(one, axis), getattr(two, axis)
        if a.shape != b.shape or np.abs(a - b).max() > 1e-4:
            raise UserError(
                f"expected all fields on one grid, got {first.where} on {_shape(first, one)} and {other.where} on "
                f"{_shape(other, two)}; "
                + axes.choose("gridType", "list them as sources of their own, or set data.source.select.gridType")
            )


def _shape(message: Message, plane: _grib_files.Geometry) -> str:
    rows, columns = plane.latitude, plane.longitude
    return f"{message.key('gridType')} {len(rows)} × {len(columns)} from {rows[0]:g}N {columns[0]:g}E"


def _field(
    name: str,
    group: list[Message],
    coordinates: dict[str, Any],
    geometry: Geometries,
    axes: _Axes,
    duplicates: str | None,
) -> xr.Variable:
    """Return one variable of the messages given."""
    kinds = sorted({message.level_type for message in group})
    if len(kinds) > 1:
        raise UserError(
            f"expected {name} on one type of level, got {', '.join(kinds)} in {group[0].path}; "
            + axes.choose(
                "typeOfLevel", f"list them as sources of their own, with data.source.select.typeOfLevel: {kinds[0]}"
            )
        )
    several = axes.is_forecast or any(message.time != group[0].time for message in group)
    still = len(coordinates["time"][1]) > 1 and not several and all(not message.period for message in group)
    places: dict[str, Callable[[Message], float]] = {
        **axes.times,
        "number": lambda message: int(message.key("number")),
        kinds[0]: lambda message: message.level,
    }
    parameters: dict[tuple[tuple[str, str], ...], Message] = {}  # few, of many messages
    for message in group:
        parameters.setdefault(message.attrs, message)
    units = {dict(attrs).get("units", ""): message for attrs, message in parameters.items()}
    if len(units) > 1:
        (one, first), (other, second), *_ = units.items()
        raise UserError(
            f"expected {name} in the same units, got {one!r} in {first.where} and {other!r} in {second.where}; give "
            "files with one of them"
        )
    absent = {"time"} if still else set()
    absent |= set() if _has_levels(group) else {kinds[0]}
    dims = [dim for dim in places if dim in coordinates and dim not in absent]
    values = {dim: np.asarray(coordinates[dim][1]) for dim in dims}
    values |= {dim: values[dim].astype(np.int64) for dim in axes.times if dim in values}
    table = np.full([len(axis) for axis in values.values()], -1, np.int64)
    for i, message in enumerate(group):
        at = tuple(int(np.searchsorted(axis, places[dim](message))) for dim, axis in values.items())
        if table[at] < 0:
            table[at] = i
        elif duplicates is None:
            raise RepeatedTimes(_twice(group[int(table[at])], message, axes))
    lazy = indexing.LazilyIndexedArray(_Messages(group, table, geometry))
    ranges = [(message, str(message.key("stepType"))) for message in group if message.period]
    sums = [message for message, kind in ranges if kind == "accum"]
    periods = sorted({message.period for message in sums})
    over = {PERIOD: " ".join(f"{period:g}" for period in periods)} if periods else {}
    if axes.is_forecast and len(periods) > 1 and all(message.period == message.step for message in sums):
        over[FROM_START] = "true"
    hours = sorted({message.period for message, kind in ranges if kind in _RANGES})
    if axes.is_forecast and len(hours) > 1:
        what = next(_RANGES[kind] for _, kind in ranges if kind in _RANGES)
        over[RANGES] = f"{what} over {', '.join(f'{period:g}' for period in hours)} h"
    return xr.Variable((*dims, "latitude", "longitude"), lazy, dict(group[0].attrs) | over)


def _twice(one: Message, two: Message, axes: _Axes) -> str:
    """Return a message about two fields for the same time, with the key by which they differ."""
    keys = [key for key, value in one.keys if two.key(key) != value]
    time = np.datetime64(one.time, "s")
    if not keys:
        remedy = "remove one of them" if axes.is_forecast else "set data.source.duplicates: first"
        return f"expected each field once, got {one.where} and {two.where}, both valid at {time}; {remedy}"
    key = next((key for key in ("period", "stepType", "step") if key in keys), keys[0])
    return (
        f"expected one field for each time, got {one.where} and {two.where}, both valid at {time}, with {key} "
        f"{one.key(key)} and {two.key(key)}; "
        + axes.choose("stepRange" if key == "period" else key, f"set data.source.select.{key} to one of them")
    )


class _Messages(DirectArray):
    """A variable of messages; `table` has the position in `messages` along the leading dimensions, −1 where absent."""

    def __init__(self, messages: Sequence[Message], table: NDArray[np.int64], geometry: Geometries) -> None:
        self.messages, self.table, self.geometry = messages, table, geometry
        plane = geometry(messages[0])
        self.shape = (*table.shape, len(plane.latitude), len(plane.longitude))
        self.dtype = np.dtype(np.float32)
        self.chunks = (*(1 for _ in table.shape), *self.shape[-2:])

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the messages in the box one after the other; each is decoded as a whole."""
        result = np.empty([stop - start for start, stop in spans], np.float32) if out is None else out
        rows, columns = (slice(*span) for span in spans[-2:])
        for at, field in self.fields(spans, self.geometry):
            result[at] = np.nan if field is None else field[rows, columns]
        return result

    def fields(
        self, spans: Spans, geometry: Callable[[Message], Geometry]
    ) -> Iterator[tuple[tuple[int, ...], NDArray[np.float64] | None]]:
        """Yield (position in the box, field) in order, as `geometry` arranges them; None for absent messages."""
        places = list(itertools.product(*(range(start, stop) for start, stop in spans[:-2])))
        wanted = [int(self.table[place]) for place in places]
        found = _grib_files.decode([self.messages[i] for i in wanted if i >= 0], geometry)
        for place, i in zip(places, wanted, strict=True):
            at = tuple(p - start for p, (start, _) in zip(place, spans, strict=False))
            yield at, next(found) if i >= 0 else None


class _Wind(DirectArray):
    """One component of the wind, of spectral vorticity and divergence on the same times, members and levels."""

    def __init__(self, vorticity: _Messages, divergence: _Messages, component: int) -> None:
        self.vorticity, self.divergence, self.component = vorticity, divergence, component
        self.shape, self.dtype, self.chunks = vorticity.shape, vorticity.dtype, vorticity.chunks

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read pairs of messages one after the other; a field is missing where one of them is."""
        result = np.empty([stop - start for start, stop in spans], np.float32) if out is None else out
        rows, columns = (slice(*span) for span in spans[-2:])
        geometry = self.vorticity.geometry(self.vorticity.messages[0])
        synthesis = geometry.arrange
        assert isinstance(synthesis, Synthesis)
        stored = replace(geometry, arrange=lambda values: values)
        pairs = zip(*(part.fields(spans, lambda _: stored) for part in (self.vorticity, self.divergence)), strict=True)
        for (at, vorticity), (_, divergence) in pairs:
            if vorticity is None or divergence is None:
                result[at] = np.nan
            else:
                result[at] = synthesis.wind(vorticity, divergence)[self.component][rows, columns]
        return result
