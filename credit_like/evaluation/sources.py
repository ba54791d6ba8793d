"""Sources of forecasts to score: forecast files, persistence, climatology.

Axes: M members, L leads, K levels (1 at the surface), H latitude rows, W longitudes.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import xarray as xr
from dask.utils import SerializableLock
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.data import units
from credit_like.data.aliases import find, other_quantity
from credit_like.data.files import netcdf_files
from credit_like.data.sources import grib
from credit_like.data.sources._conventions import FROM_START, PERIOD, RANGES, role_of
from credit_like.data.store import FieldStore
from credit_like.errors import UserError, reading
from credit_like.evaluation.climatology import Climatology
from credit_like.grid import Grid, turn
from credit_like.variables import Variable

_LOG = logging.getLogger(__name__)
_CF = {"forecast_reference_time": "time", "forecast_period": "prediction_timedelta"}
_OTHER_NAMES = {"init_time": "time", "lead_time": "prediction_timedelta", "lat": "latitude", "lon": "longitude"}
_MEMBERS = ("realization", "member", "ensemble", "ensemble_member", "ens")
_GRIB = (".grib", ".grib2", ".grb", ".grb2")
_TIME_AXES = (
    ("time", "MO", "dates", "hours since 1900-01-01"),
    ("prediction_timedelta", "m", "time differences", "hours"),
)
"""Axes of forecasts, kinds of their values, what these are, and a fitting attribute `units`."""
_FORECAST_DIMS = ("time", "prediction_timedelta", "latitude", "longitude")
Array = NDArray[np.float64]


class Scored(Protocol):
    """A source of forecasts."""

    @property
    def provenance(self) -> str:
        """Return a description of the origin of the forecasts."""

    def fields(self, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]) -> Array | None:
        """Return (M, L, K, H, W) from `init` at `leads` (seconds), or None if the source lacks the variable.

        Missing forecasts are NaN. `levels` are positions among the variable's own.
        """


@dataclass
class Truth:
    """Analyses at valid times, read by one thread at a time, because not all libraries behind a store are thread-safe."""

    store: FieldStore
    _lock: SerializableLock = field(default_factory=SerializableLock, repr=False)

    def at(self, seconds: NDArray[np.int64], variable: Variable, levels: Sequence[int]) -> Array:
        """Return (T, K, H, W), NaN at times that the store does not have."""
        there, position = self.positions(seconds)
        shape = (len(seconds), len(levels), self.store.grid.height, self.store.grid.width)
        result = np.full(shape, np.nan)
        if there.any():
            with self._lock:
                result[there] = self.store.read([variable], position[there])[:, list(levels)]
        return result

    def positions(self, seconds: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return whether the store has these times, and their positions."""
        position = np.minimum(np.searchsorted(self.store.seconds, seconds), len(self.store.seconds) - 1)
        return self.store.seconds[position] == seconds, position


@dataclass
class PersistenceForecast:
    """The truth at the initial time, at every lead."""

    truth: Truth
    provenance: str = "the truth at the initial time"

    def fields(self, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]) -> Array | None:
        now = self.truth.at(np.array([init]), variable, levels)
        return np.repeat(now[None], len(leads), axis=1)


@dataclass
class ClimatologyForecast:
    """The climatology of the valid time."""

    climatology: Climatology
    calendar: str

    @property
    def provenance(self) -> str:
        return self.climatology.provenance

    def fields(self, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]) -> Array | None:
        times = calendar.from_seconds(init + np.asarray(leads, np.int64), self.calendar)
        return self.climatology.at(variable.name, times, levels)[None].astype(np.float64)


@dataclass(frozen=True)
class _Fitted:
    """A variable of a forecast dataset, on the dimensions of forecasts; the truth's units are a · its own + b."""

    array: xr.DataArray
    levels: tuple[float, ...]
    """In the truth's units; empty at the surface, and for levels of another kind."""
    a: float
    b: float
    sum_over: int = 0
    """Where the values are sums since the initial time: the seconds over which those of the truth are; else 0."""


class ForecastFiles:
    """A forecast dataset in WeatherBench2 layout on the truth's grid; names are matched through the alias table.

    Values and levels are converted to the truth's units where both are known, and sums since the initial time to sums over
    the time of the truth's. Warns of other sums over another time than those of the truth. Raises UserError if it is not a
    forecast, is on another grid or in another calendar, has times or leads that are bare numbers, or has a variable of the truth
    on other dimensions or in units of something else.
    """

    def __init__(self, dataset: xr.Dataset, truth: FieldStore, provenance: str) -> None:
        self.provenance, self.truth = provenance, truth
        self.dataset, grid = dataset, truth.grid
        self._fitted: dict[tuple[str, str], _Fitted] = {}
        for axis, kinds, what, units_attr in _TIME_AXES:
            if dataset[axis].dtype.kind not in kinds:
                raise UserError(
                    f"expected {axis} as {what} (attribute units: {units_attr}), got numbers in {provenance}; add the attribute"
                )
        init = dataset["time"].values
        init = calendar.whole_seconds(init) if init.dtype.kind == "M" else init
        self.init: NDArray[np.int64] = calendar.seconds(init)
        self.leads: NDArray[np.int64] = calendar.whole_seconds(dataset["prediction_timedelta"].values).astype(np.int64)
        self.calendar = calendar.calendar_of(init)
        self.members = dataset.sizes.get("number", 1)
        self._rows = match(dataset["latitude"].values, grid.latitude, "latitude", provenance)
        self._columns = match(dataset["longitude"].values % 360, grid.longitude % 360, "longitude", provenance)
        self._init_at = {int(second): i for i, second in enumerate(self.init)}
        self._lead_at = {int(second): i for i, second in enumerate(self.leads)}
        self._lock = SerializableLock()
        if self.calendar != truth.calendar:
            raise UserError(
                f"expected forecasts in the truth's calendar {truth.calendar}, got {self.calendar} in {provenance}; change them"
            )
        for variable in truth.variables.outputs:
            self._fit(variable)

    def name_of(self, variable: Variable) -> str | None:
        """Return the dataset's name of a variable, or None if it lacks the variable or has another quantity of its name."""
        found = find(variable.name, map(str, self.dataset.data_vars))
        is_other = found not in (None, variable.name) and other_quantity(variable.name, self.dataset[found].attrs)
        return None if is_other else found

    def levels_of(self, variable: Variable) -> list[int]:
        """Return the positions, among the variable's own levels, of those in the files."""
        fitted = self._fit(variable)
        if fitted is None:
            return []
        if not variable.levels:
            return [0]
        return [i for i, level in enumerate(variable.levels) if level in fitted.levels]

    def fields(self, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]) -> Array | None:
        fitted = self._fit(variable)
        if fitted is None:
            return None
        if fitted.sum_over:
            since = [lead - fitted.sum_over for lead in leads]
            both = sorted({*leads, *since})
            total = self._fields(fitted, init, both, variable, levels)
            total[:, [lead == 0 for lead in both]] = 0
            until, before = (total[:, np.searchsorted(both, some)] for some in (leads, since))
            difference: Array = until - before
            return difference
        return self._fields(fitted, init, leads, variable, levels)

    def _fields(
        self, fitted: _Fitted, init: int, leads: Sequence[int], variable: Variable, levels: Sequence[int]
    ) -> Array:
        """Return what `fields` does, of the values as they are in the files."""
        shape = (self.members, len(leads), len(levels), len(self._rows), len(self._columns))
        result = np.full(shape, np.nan)
        at = [(i, self._lead_at[lead]) for i, lead in enumerate(leads) if lead in self._lead_at]
        own = self.levels_of(variable)
        to_level = [i for i, level in enumerate(levels) if level in own]
        if init not in self._init_at or not at or not to_level:
            return result
        to_lead, from_lead = map(list, zip(*at, strict=True))
        array = fitted.array.isel(time=self._init_at[init], prediction_timedelta=from_lead)
        if variable.levels:
            array = array.isel(level=[fitted.levels.index(variable.levels[levels[i]]) for i in to_level])
        else:
            array = array.expand_dims("level")
        if "number" not in array.dims:
            array = array.expand_dims("number")
        dims = ("number", "prediction_timedelta", "level", "latitude", "longitude")
        start = calendar.to_text(calendar.one_time(init, self.calendar))
        with (
            self._lock,
            reading(
                f"values of {fitted.array.name} from {start}",
                self.provenance,
                "remove them and run `credit-like rollout` again",
            ),
        ):
            values = array.transpose(*dims).values
        values = values[..., self._rows, :][..., self._columns].astype(np.float64)
        if (fitted.a, fitted.b) != (1.0, 0.0):
            values = fitted.a * values + fitted.b
        result[np.ix_(range(self.members), to_lead, to_level)] = values
        return result

    def units_of(self, variable: Variable) -> tuple[str, str]:
        """Return the units of a variable in the truth, and those of its levels; empty where they are unknown."""
        return self.truth.attrs(variable).get("units", ""), self.truth.level_units(variable)

    def _seconds_of_sums(self, variable: Variable) -> int:
        """Return the seconds over which the truth's values are sums, by default its time step; 0 if they are of several."""
        hours = self.truth.sum_attrs(variable).get(PERIOD, "").split()
        if len(hours) > 1:
            return 0
        return round(3600 * float(hours[0])) if hours else self.truth.step_seconds

    def _hours_of_sums(self, array: xr.DataArray, variable: Variable) -> tuple[str, str] | None:
        """Return the hours over which values are sums in the files and in the truth, if both declare them and they differ."""
        theirs = str(array.attrs.get(PERIOD, ""))
        mine = self.truth.sum_attrs(variable).get(PERIOD, "") if theirs else ""
        return (theirs, mine) if mine and theirs != mine else None

    def _fit(self, variable: Variable) -> _Fitted | None:
        """Return a variable of the truth in the files, or None if they lack it."""
        name, key = self.name_of(variable), (variable.name, variable.role)
        if name is None or key in self._fitted:
            return self._fitted.get(key)
        what = f"{name} of {self.provenance}"
        array = _on_forecast_dims(self.dataset[name], bool(variable.levels), what)
        wanted, level_units = self.units_of(variable)
        found = str(array.attrs.get("units", ""))
        try:
            a, b = units.between(found, wanted) or (1.0, 0.0)
        except UserError as error:
            raise UserError(
                f"expected {what} in units that convert to the truth's {wanted!r}, got {found!r}; convert it or correct its units"
            ) from error
        sum_over = self._seconds_of_sums(variable) if FROM_START in array.attrs else 0
        if not sum_over and (hours := self._hours_of_sums(array, variable)):
            _LOG.warning(
                "%s are sums over %s h and those of the truth over %s h, which are not converted", what, *hours
            )
        if RANGES in array.attrs:
            _LOG.warning(
                "%s are %s, which are scored as they are; convert them to one length of time", what, array.attrs[RANGES]
            )
        levels = levels_in(array["level"], level_units) if variable.levels else ()
        if variable.levels and not set(levels) & set(variable.levels):
            shown = f"{array['level'].values[0]:g} {array['level'].attrs.get('units', '')}".strip()
            _LOG.warning(
                "%s of %s is not scored: its levels (%s, ...) are not those of the truth (%s %s)",
                *(name, self.provenance, shown, variable.levels_text, level_units),
            )
        return self._fitted.setdefault(key, _Fitted(array, levels, a, b, sum_over))


def _on_forecast_dims(array: xr.DataArray, on_levels: bool, what: str) -> xr.DataArray:
    """Return a field on the dimensions of forecasts, with `number` and `level` where it has them."""
    vertical = [str(dim) for dim in array.dims if str(dim).startswith("level")]
    if on_levels and not vertical:  # one level that was selected, whose number remains
        vertical = [str(name) for name in array.coords if str(name).startswith("level") and not array[name].ndim][:1]
        array = array.expand_dims(vertical)
    known = (*_FORECAST_DIMS, "number", *(vertical[:1] if on_levels else ()))
    array = array.squeeze([dim for dim in array.dims if dim not in known and array.sizes[dim] == 1], drop=True)
    absent = [dim for dim in _FORECAST_DIMS if dim not in array.dims]
    if absent or (on_levels and not vertical):
        raise UserError(
            f"expected {what} on {', '.join(known)}, got {', '.join(map(str, array.dims))} without "
            f"{', '.join(absent) or 'levels'}; add them or remove the variable"
        )
    if further := [dim for dim in array.dims if dim not in known]:
        raise UserError(
            f"expected {what} on {', '.join(known)}, got {array.sizes[further[0]]} values of {further[0]!r} too; select one of "
            "them"
        )
    return array.rename({vertical[0]: "level"}) if on_levels and vertical[0] != "level" else array


def levels_in(coordinate: xr.DataArray, wanted: str) -> tuple[float, ...]:
    """Return levels in the wanted units, those of the files where one of both is unknown; none for levels of another kind."""
    try:
        a, b = units.between(str(coordinate.attrs.get("units", "")), wanted) or (1.0, 0.0)
    except UserError:  # numbers of model levels beside pressures
        return ()
    found: list[float] = coordinate.values.tolist()
    return tuple(found if (a, b) == (1.0, 0.0) else (round(a * level + b, 6) for level in found))


def open_forecast(path: Path | str) -> xr.Dataset:
    """Open a zarr store, or a netCDF or GRIB file or a folder of those, lazily, under WeatherBench2's dimension names.

    Raises UserError if there is nothing, or it is not a forecast.
    """
    with reading("forecasts", path, "remove them and run `credit-like rollout` again"):
        return _open(path)


def unfinished(path: Path | str) -> list[Path]:
    """Return the unfinished files of an interrupted rollout in a folder of forecasts."""
    folder = Path(path)
    return sorted(folder.glob("*.part")) if folder.is_dir() else []


def _open(path: Path | str) -> xr.Dataset:
    where = Path(path)
    if where.is_file() and where.suffix in _GRIB:
        return _canonical(grib.open_forecasts([str(where)]), where)
    if where.is_dir() and not (where / "zarr.json").exists() and not (where / ".zgroup").exists():
        files = sorted(where.glob("*.nc"))
        if not files and (messages := sorted(str(file) for file in where.iterdir() if file.suffix in _GRIB)):
            return _canonical(grib.open_forecasts(messages), where)
        if not files:
            unfinished = (
                " (only unfinished files; run `credit-like rollout` again)" if any(where.glob("*.part")) else ""
            )
            raise UserError(
                f"expected forecasts in {where}, got no netCDF or GRIB files{unfinished}; run `credit-like rollout` first"
            )
        parts = [_open_netcdf(file) for file in files]
        dataset = xr.concat(parts, "time", data_vars="minimal", coords="minimal", compat="override", join="exact")
        return dataset.sortby("time")
    if not where.exists() and "://" not in str(path):
        part = Path(f"{path}.part")
        left = f", but an unfinished {part.name}; run `credit-like rollout` again" if part.exists() else ""
        raise UserError(f"expected forecasts at {path}, got nothing there{left or '; run `credit-like rollout` first'}")
    if where.suffix == ".nc":
        return _open_netcdf(where)
    consolidated = None if "://" in str(path) else _is_consolidated(where)
    return _canonical(xr.open_zarr(path, consolidated=consolidated, decode_timedelta=True), where)


def _open_netcdf(path: Path) -> xr.Dataset:
    """Open a netCDF file as dask arrays with the file's own chunks."""
    dataset = xr.decode_cf(netcdf_files.open_lazily(path), decode_timedelta=True)
    chunked = {
        name: variable.chunk(variable.encoding.get("preferred_chunks", {}), name=f"{name}-{uuid.uuid4().hex}")
        for name, variable in dataset.variables.items()
        if name not in dataset.xindexes
    }
    return _canonical(dataset.assign(chunked), path)


def _is_consolidated(path: Path) -> bool:
    return (path / ".zmetadata").exists() or (
        (path / "zarr.json").exists() and "consolidated_metadata" in (path / "zarr.json").read_text()
    )


def _canonical(dataset: xr.Dataset, path: Path) -> xr.Dataset:
    if _CF.keys() <= set(dataset.dims):
        dataset = dataset.drop_vars("time", errors="ignore").rename(_CF)
    dataset = dataset.rename({old: new for old, new in _OTHER_NAMES.items() if old in dataset.dims})
    members = [name for name in _MEMBERS if name in dataset.dims]
    if len(members) == 1 and "number" not in dataset.variables and "number" not in dataset.dims:
        dataset = dataset.rename({members[0]: "number"})
    dataset = _with_level(dataset)
    if absent := [name for name in _FORECAST_DIMS if name not in dataset.dims]:
        raise UserError(
            f"expected forecasts with dimensions {', '.join(_FORECAST_DIMS)} in {path}, got none of {', '.join(absent)}"
        )
    for name in _FORECAST_DIMS:
        # Zarr fills missing chunks, so values that are lost are all the same.
        axis = dataset[name]
        if name not in dataset.coords or axis.isnull().any() or len(np.unique(axis.values)) < axis.size:
            raise UserError(
                f"expected a coordinate {name} with each value once in {path}, got one whose values are missing or repeated; "
                "write its values again, or remove the forecasts and run `credit-like rollout` again"
            )
    return dataset


def _with_level(dataset: xr.Dataset) -> xr.Dataset:
    """Return a dataset whose levels are the dimension or the single coordinate `level`, if they have another known name."""
    dims = [str(dim) for dim in dataset.dims]
    single = [str(name) for name in dataset.coords if not dataset[name].ndim]
    if "level" in dataset.variables or any(dim.startswith("level") for dim in dims):
        return dataset
    for names in (dims, single):
        vertical = [name for name in names if name not in _FORECAST_DIMS and role_of(dataset, name) == "level"]
        if vertical:
            return dataset.rename({vertical[0]: "level"}) if len(vertical) == 1 else dataset
    return dataset


def match(there: NDArray[np.float64], wanted: NDArray[np.float64], axis: str, what: str) -> list[int]:
    """Return the positions of the wanted coordinates among the file's, to a thousandth of a degree.

    Longitudes may differ by whole circles, and so by rounding on either side of Greenwich.
    """

    def apart(of: NDArray[np.float64], value: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
        return np.abs(turn(of - value) if axis == "longitude" else of - value)

    order = [int(np.argmin(apart(there, value))) for value in wanted]
    # Written so that NaN is refused too, which every comparison denies.
    if len(there) != len(wanted) or not apart(there[order], wanted).max() <= 1e-3:
        got = "some that are NaN" if np.isnan(there).any() else f"{len(there)} from {there[0]:g} to {there[-1]:g}"
        raise UserError(
            f"expected forecasts on the truth's {len(wanted)} {axis}s from {wanted[0]:g} to {wanted[-1]:g}, got {got} in {what}; "
            "regrid them first"
        )
    return order


def in_order_of(grid: Grid, truth: FieldStore) -> FieldStore:
    """Return the truth with the rows and columns of `grid`, which files may have in another order.

    Climatologies, thresholds and the height of the ground come from the data of the experiment, and must meet the truth
    point by point. Raises UserError for a truth on another grid.
    """
    what = "those of this experiment"
    rows = match(grid.latitude, truth.grid.latitude, "latitude", what)
    columns = match(grid.longitude % 360, truth.grid.longitude % 360, "longitude", what)
    if rows == [*range(len(rows))] and columns == [*range(len(columns))]:
        return truth
    # The inverse: where each row and column of the grid is in the truth.
    return truth.in_order(grid, np.argsort(rows), np.argsort(columns))
