"""Anemoi datasets: zarr stores of one array (dates, variables, ensemble, cells), on disk or behind a URL.

The layout is that of https://github.com/ecmwf/anemoi-datasets (`usage/gridded/store.py`, read at commit 091aaea; a test reads what
release 0.5.47 makes): arrays `data`, `dates`, `latitudes`, `longitudes`, statistics `mean` and `stdev` by variable,
`statistics_tendencies_6h_stdev` of the change over 6 h where it was asked for; attributes `variables`, `variables_metadata`,
`missing_dates`, `constant_fields`, `field_shape`, `allow_nans`, in early releases `variables_with_nans`.
`field_shape` may be absent, or have longitude first, so that the grid is taken from the coordinates of the cells.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from xarray.core import indexing

from credit_like.data.files.chunks import ChunkedArray, layout_of
from credit_like.data.files.direct import DirectArray, Spans
from credit_like.data.files.find import is_url
from credit_like.data.files.reduced import regular_rows
from credit_like.data.sources._cache import Cache, remote
from credit_like.data.sources._files import FileConfig, open_files
from credit_like.errors import UserError

_ON_LEVEL = re.compile(r"(.+)_(\d+)")
_LEVEL_TYPES = ("pl", "ml", None)
_LEVEL_ATTRS = {
    "pl": {"standard_name": "air_pressure", "units": "hPa"},
    "ml": {"standard_name": "model_level_number", "units": "1"},
}
_KEPT = 2  # chunks that stay decoded: a chunk has all variables, and a sample the times t and t + 1
Geometry = Callable[[NDArray[np.floating]], NDArray[np.floating]]
"""Maps values (…, cells) to (…, rows, columns)."""


class Config(FileConfig):
    type: Literal["anemoi"] = "anemoi"
    cache: Cache | None = None
    """Local copies of what is read from a URL. Default: none; every read goes to the server."""
    statistics: bool = False
    """Use the statistics in the dataset, with those of its tendencies, instead of fitting them to `data.train`."""


def open_dataset(config: Config) -> xr.Dataset:
    """Open datasets as one lazy dataset, with variables `t_500`, `t_850` joined to `t` on levels.

    A variable at the surface that has the name of one on levels is `NAME_surface` (`z_surface`). Dates that the dataset
    marks as missing are left out. Reduced Gaussian grids become regular ones.

    Raises UserError if there is no such dataset, or if its cells are not on rows of equal latitude.
    """

    def open_one(path: str) -> xr.Dataset:
        with _opened(path, config) as group:
            return _dataset(group, path)

    return open_files(config, open_one, "an Anemoi dataset")


def stored_statistics(config: Config, hours: float) -> dict[tuple[str, float | None], tuple[float, float, float]]:
    """Return mean, standard deviation and that of the change over some hours, by the name and level that `open_dataset` gives.

    The last is NaN where the dataset does not have it, as for constant fields. Variables with missing values are left out: those
    that the dataset names, as its early releases did, or that lack values at its first, middle or last date.
    """
    if not isinstance(config.path, str):
        raise UserError("expected one dataset with statistics, got several paths; remove data.source.statistics")
    with _opened(config.path, config) as group:
        names = _variables(group, config.path)
        spans = (f"{hours:g}h", f"{hours / 24:g}d", f"{60 * hours:g}m")
        keys = [f"statistics_tendencies_{span}_stdev" for span in spans]
        mean, spread = (_values(group, key) for key in ("mean", "stdev"))
        change = next((_values(group, key) for key in keys if key in group), np.full(len(names), np.nan))
        attrs = _attrs(group)
        lacking = _with_gaps(group, names, attrs)
    on_levels, flat, _ = _sorted(names, attrs.get("variables_metadata", {}))
    columns: dict[tuple[str, float | None], int] = {(name, None): column for name, column in flat.items()}
    columns |= {(name, level): column for name, by_level in on_levels.items() for level, column in by_level.items()}
    return {
        key: (float(mean[column]), float(spread[column]), float(change[column]))
        for key, column in columns.items()
        if names[column] not in lacking
    }


def _with_gaps(group: zarr.Group, names: Sequence[str], attrs: Mapping[str, Any]) -> set[str]:
    """Return the variables with missing values."""
    named = set(attrs.get("variables_with_nans") or [])
    if named or attrs.get("allow_nans") is False:
        return named
    array, kept = _array(group, "data"), _kept(group, attrs)
    looked = {int(kept[at]) for at in (0, len(kept) // 2, -1)} if len(kept) else set()
    states = [np.isnan(np.asarray(array[at])).any(axis=(1, 2)) for at in looked]
    return {name for name, lacks in zip(names, np.any(states, axis=0), strict=True) if lacks} if states else set()


def _kept(group: zarr.Group, attrs: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the positions of the dates that are not marked as missing."""
    dates = _values(group, "dates").astype("datetime64[s]")
    return np.flatnonzero(~np.isin(dates, np.array(attrs.get("missing_dates", []), "datetime64[s]")))


@contextmanager
def _opened(path: str, config: Config) -> Iterator[zarr.Group]:
    """Open the group of a dataset; its coordinates must be read within this context."""
    if not is_url(path):
        yield zarr.open_group(path, mode="r")
        return
    store = remote(path, config.storage_options, config.cache)
    with store.opening():
        yield zarr.open_group(store, mode="r")


def _values(group: zarr.Group, name: str) -> NDArray[Any]:
    """Read an array of a dataset."""
    return np.asarray(_array(group, name)[...])


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group.get(name)
    if not isinstance(array, zarr.Array):
        raise ValueError(f"it has no array {name!r}")  # open_files says which file
    return array


def _attrs(group: zarr.Group) -> dict[str, Any]:
    """Return the attributes of a dataset."""
    return dict(group.attrs.asdict())


def _variables(group: zarr.Group, path: str) -> list[str]:
    """Return the names of the variables in their order."""
    attrs = _attrs(group)
    named = attrs.get("variables") or sorted(
        attrs.get("name_to_index", {}), key=lambda name: attrs["name_to_index"][name]
    )
    if not named:
        raise UserError(f"expected an Anemoi dataset with the attribute `variables`, got {path} without it")
    return [str(name) for name in named]


def _dataset(group: zarr.Group, path: str) -> xr.Dataset:
    """Return all variables of a dataset lazily."""
    array, names, attrs = _array(group, "data"), _variables(group, path), _attrs(group)
    if array.ndim != 4 or array.shape[1] != len(names):
        raise UserError(f"expected data (dates, {len(names)} variables, ensemble, cells) in {path}, got {array.shape}")
    dates = _values(group, "dates").astype("datetime64[s]")
    if len(dates) != array.shape[0]:
        raise UserError(f"expected a date for each of {array.shape[0]} states in {path}, got {len(dates)}")
    kept = _kept(group, attrs)
    latitude, longitude, geometry = _grid(group, array.shape[3], path)
    metadata = attrs.get("variables_metadata", {})
    on_levels, flat, level_type = _sorted(names, metadata)
    constant = {name for name in flat if (metadata.get(name) or {}).get("constant_in_time")} | set(
        attrs.get("constant_fields", [])
    )
    states = _States(array, Path(path), geometry, kept, (len(latitude), len(longitude)))

    def variable(columns: Sequence[int], levels: bool) -> xr.Variable:
        still = not levels and names[columns[0]] in constant
        lazy = _Fields(states, np.array(columns), levels, still)
        units = (metadata.get(names[columns[0]]) or {}).get("units")
        return xr.Variable(
            lazy.dims, indexing.LazilyIndexedArray(lazy), {"units": units} if isinstance(units, str) else {}
        )

    variables = {name: variable(list(by_level.values()), True) for name, by_level in on_levels.items()}
    variables |= {name: variable([column], False) for name, column in flat.items()}
    coordinates: dict[str, Any] = {"time": dates[kept], "latitude": latitude, "longitude": longitude}
    if on_levels:
        levels = np.array(list(next(iter(on_levels.values()))), np.float64)
        coordinates["level"] = ("level", levels, _LEVEL_ATTRS.get(level_type or "", {}))
    if states.members > 1:
        coordinates["ensemble"] = np.arange(states.members)
    return xr.Dataset(variables, coordinates)


def _sorted(
    names: Sequence[str], metadata: Mapping[str, Any]
) -> tuple[dict[str, dict[float, int]], dict[str, int], str | None]:
    """Return the columns of variables on levels, by name and level, those of all others by name, and the type of level.

    The levels are those that most variables have, in ascending order; a variable that lacks one of them, and a level that others
    lack, remain under their own names, such as `w_500`.
    """
    found: dict[str, dict[float, int]] = {}
    types: dict[str, str | None] = {}
    for column, name in enumerate(names):
        parts, mars = _ON_LEVEL.fullmatch(name), (metadata.get(name) or {}).get("mars") or {}
        if parts and mars.get("levtype") in _LEVEL_TYPES:
            found.setdefault(parts[1], {})[float(mars.get("levelist") or parts[2])] = column
            types[parts[1]] = mars.get("levtype")
    sets = [tuple(sorted(by_level)) for by_level in found.values() if len(by_level) > 1]
    axis = max(sets, key=lambda levels: (sets.count(levels), len(levels)), default=())
    joined = {
        name: {level: by_level[level] for level in axis}
        for name, by_level in found.items()
        if axis and {*axis} <= {*by_level}
    }
    taken = {column for by_level in joined.values() for column in by_level.values()}
    rest = {column: name for column, name in enumerate(names) if column not in taken}
    flat = {f"{name}_surface" if name in joined else name: column for column, name in rest.items()}
    return joined, flat, next((types[name] for name in joined), None)


def _grid(group: zarr.Group, cells: int, path: str) -> tuple[NDArray[np.float64], NDArray[np.float64], Geometry]:
    """Return latitude, longitude and the geometry of the cells. Raises UserError unless they are on rows of equal latitude."""
    latitude, longitude = (
        _values(group, name if name in group else name[:-1]).astype(np.float64) for name in ("latitudes", "longitudes")
    )
    if latitude.shape != (cells,) or longitude.shape != (cells,):
        raise UserError(f"expected coordinates of {cells} cells in {path}, got {latitude.shape} and {longitude.shape}")
    rows, columns = _runs(latitude), _runs(longitude)
    for lengths, along, across, order in ((rows, latitude, longitude, "C"), (columns, longitude, latitude, "F")):
        shape = (len(lengths), int(lengths[0]))
        if shape[1] > 1 and np.all(lengths == shape[1]):
            plane = across.reshape(shape)
            if np.allclose(plane, plane[:1], rtol=0, atol=1e-4):
                axes = along.reshape(shape)[:, 0], plane[0]
                regular = _Plane(shape, transposed=order == "F")
                return (*(axes[::-1] if order == "F" else axes), regular)
    reduced = regular_rows(rows, longitude) if 1 < len(rows) < cells else None
    if reduced is None:
        attrs = _attrs(group)
        raise UserError(
            f"expected a latitude-longitude or a Gaussian grid in {path}, got {cells} cells with resolution "
            f"{attrs.get('resolution')} and field_shape {attrs.get('field_shape')}; make the dataset on such a grid"
        )
    return latitude[np.cumsum(rows) - rows], *reduced


def _runs(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the lengths of runs of equal values."""
    return np.diff(np.flatnonzero(np.r_[True, np.abs(np.diff(values)) > 1e-4, True]))


@dataclass(frozen=True)
class _Plane:
    """Cells in the order of rows, or of columns if `transposed`."""

    shape: tuple[int, int]
    transposed: bool = False

    def __call__(self, values: NDArray[np.floating]) -> NDArray[np.floating]:
        plane = values.reshape(*values.shape[:-1], *self.shape)
        return plane.swapaxes(-1, -2) if self.transposed else plane


class _States:
    """The states of a dataset by date, with the chunks used last kept decoded."""

    def __init__(
        self, array: zarr.Array[Any], folder: Path, geometry: Geometry, kept: NDArray[np.int64], plane: tuple[int, int]
    ) -> None:
        layout = layout_of(array, folder) if folder.is_dir() else None
        self.source: Any = array if layout is None else ChunkedArray(layout)
        self.geometry, self.kept, self.plane = geometry, kept, plane
        self.members, self.dtype = int(array.shape[2]), np.dtype(array.dtype)
        self.per_chunk, self.dates = int(array.chunks[0]), int(array.shape[0])
        self._decoded: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, time: int) -> NDArray[Any]:
        """Return (variables, members, cells) at a position among the dates that are not missing."""
        first, within = divmod(int(self.kept[time]), self.per_chunk)
        with self._lock:  # threads that want other variables of the same chunk wait for it
            if first not in self._decoded:
                start = first * self.per_chunk
                self._decoded[first] = self._read(start, min(start + self.per_chunk, self.dates))
            self._decoded.move_to_end(first)
            while len(self._decoded) > _KEPT:
                self._decoded.popitem(last=False)
            return self._decoded[first][within]

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        if isinstance(self.source, ChunkedArray):
            return self.source.box([(start, stop), *((0, size) for size in self.source.shape[1:])])
        return np.asarray(self.source[start:stop])


class _Fields(DirectArray):
    """One variable of a dataset: (time, level, ensemble, latitude, longitude), without those that it does not have."""

    def __init__(self, states: _States, columns: NDArray[np.int64], levels: bool, still: bool) -> None:
        self.states, self.columns = states, columns
        has = {
            "time": None if still else len(states.kept),
            "level": len(columns) if levels else None,
            "ensemble": states.members if states.members > 1 else None,
        }
        self._has = [size is not None for size in has.values()]
        self.dims = (*(dim for dim, size in has.items() if size is not None), "latitude", "longitude")
        self.shape = (*(size for size in has.values() if size is not None), *states.plane)
        self.chunks = self.shape if still else (1, *self.shape[1:])
        self.dtype = states.dtype

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        given = iter(spans)
        times, levels, members = ([*range(*next(given))] if has else [0] for has in self._has)
        rows, columns = (slice(*span) for span in given)
        shape = [stop - start for start, stop in spans]
        result: NDArray[Any] = np.empty(shape, self.dtype) if out is None else out
        into = result.reshape(len(times), len(levels), len(members), *result.shape[-2:])
        for t, time in enumerate(times):
            cells = self.states.at(time)[self.columns[levels]][:, members]
            into[t] = self.states.geometry(cells)[..., rows, columns]
        return result
