"""Code shared by file sources: their options, canonical dimensions, time, and joining files into one lazy dataset."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import cftime
import numpy as np
import xarray as xr
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, model_validator
from xarray.core import indexing

from credit_like.data import units
from credit_like.data.files.direct import DirectArray, Spans, chunk_along, direct
from credit_like.data.files.find import find_files, is_there, is_url, lacking
from credit_like.data.files.netcdf_files import open_lazily
from credit_like.data.files.regrid import conservative, read_weights, refuse_other_source, regrid, regular
from credit_like.data.files.remote import failures
from credit_like.data.sources._conventions import (
    DIFFERS,
    DIMS,
    VALID,
    RepeatedTimes,
    fields,
    numeric_times,
    plane_axes,
    reduced,
    roles,
    same_circle,
    same_points,
    single_values,
    text_times,
    valid_times,
)
from credit_like.data.sources._index import About, Kind, indexed
from credit_like.data.times import Times, from_seconds, to_text, whole_seconds
from credit_like.errors import UserError, reason
from credit_like.grid import ROUNDING, Grid
from credit_like.schema.base import Latitude, Longitude, Section, UserPath, check_box

INDEXED = 100
"""Number of files from which on an index is made."""
_RECENT = 64  # files of which the metadata stay in memory
_NUMBERS = ("_FillValue", "missing_value", "scale_factor", "add_offset")
_CODING = (*_NUMBERS, "_Unsigned")


class Dims(Section):
    """Names of dimensions in the files, for those not recognised by attributes or common names."""

    time: str | None = None
    """Name of the time dimension."""
    level: str | None = None
    """Name of the vertical dimension."""
    latitude: str | None = None
    """Name of the dimension of rows."""
    longitude: str | None = None
    """Name of the dimension of columns."""


class Region(Section):
    """A box in degrees, edges included; with `west > east` it crosses the longitude at which the data begin."""

    south: Latitude = -90.0
    """Southern limit in degrees north."""
    north: Latitude = 90.0
    """Northern limit in degrees north."""
    west: Longitude | None = None
    """Western limit in degrees east, together with `east`. Default: no limit."""
    east: Longitude | None = None
    """Eastern limit in degrees east, together with `west`. Default: no limit."""

    @model_validator(mode="after")
    def _closed(self) -> Region:
        check_box(self.south, self.north, *(name for name in ("west", "east") if getattr(self, name) is not None))
        return self


class Regrid(Section):
    """Target grid of conservative regridding; set one of these options."""

    degrees: float | None = Field(default=None, ge=0.05)
    """Spacing of a global grid with rows at the poles, north first."""
    like: UserPath | None = None
    """A file or store with the latitude and longitude to use."""
    weights: UserPath | None = None
    """A netCDF file of weights (`row`, `col`, `S`) as ESMF makes them, for any source grid of rows and columns."""

    @model_validator(mode="after")
    def _one(self) -> Regrid:
        if sum(value is not None for value in (self.degrees, self.like, self.weights)) != 1:
            raise UserError("expected one of degrees, like and weights")
        return self


class FileConfig(Section):
    """Options of files of any format."""

    path: UserPath | tuple[UserPath, ...] = ""
    """File, folder of a store, glob, strftime template (all existing files are used), URL supported by fsspec, or a
    list.
    """
    rename: dict[str, str] = Field(default={})
    """Name in the files → name in the experiment, for variables whose `var` is not enough."""
    dims: Dims = Dims()
    """Names of dimensions that are not recognised."""
    select: dict[str, int | float | str] = Field(default={})
    """Dimension of the files → the value to read, such as `{number: 0}`. Dimensions of size 1 need not be given; those
    without coordinate count from 0.
    """
    duplicates: Literal["first"] | None = None
    """What to read if a time occurs more than once in the files: `first` reads its first field, in the order of the
    files. Default: such files are refused.
    """
    time_units: str | None = None
    """Units of the time coordinate, if the files lack them: `hours since 1990-01-01`, or `hours since reftime` with a
    variable of the files that holds the start as text.
    """
    calendar: str | None = None
    """Calendar of the time coordinate, if the files do not specify it."""
    regrid: Regrid | None = None
    """Regrid the fields when they are read; `region` then applies to the result."""
    region: Region | None = None
    """Box to read. Default: the whole grid."""
    storage_options: dict[str, Any] = Field(default={})
    """Options passed to fsspec for a URL."""
    _is_inherited: bool = PrivateAttr(default=False)

    def for_path(self, path: str) -> Self:
        """Return these options for other files than those they are written for, which need not have all that they name."""
        other = self.model_copy(update={"path": path})
        other._is_inherited = True
        return other

    @property
    def is_inherited(self) -> bool:
        """Return whether these are the options of another source."""
        return self._is_inherited

    def refuse_absent(self, names: Collection[str]) -> None:
        """Raise UserError for a dimension or variable that the options name and none of the files has, of all their `names`."""
        if self.is_inherited:
            return
        where, there = self.path if isinstance(self.path, str) else ", ".join(self.path), ", ".join(sorted(names))
        for role, dim in self.dims.model_dump().items():
            if dim is not None and dim not in names:
                raise UserError(
                    f"expected {where} to have the {role} dimension {dim!r} (data.source.dims), got {there}"
                )
        for name in self.rename:
            if name not in names:
                raise UserError(f"expected {where} to have {name!r} (data.source.rename), got {there}")
        for name in self.select:
            if name not in names:
                raise UserError(
                    f"expected data.source.select to name dimensions of the files, got {name!r}; remove it or use one of {there}"
                )


def open_files(
    config: FileConfig, open_one: Callable[[str], xr.Dataset], expected: str, index: bool = False
) -> xr.Dataset:
    """Open all files of a configuration as one lazy dataset; `open_one` opens a file with nothing decoded.

    Files with the same fields are joined along time; a field without time needs to be in one of them, and has the attribute
    `DIFFERS` where the last of them has another one than the first. Files with
    different fields are merged and must have equal times; a file with a single time beside files with more has constant
    fields. With `index`, many local files are opened when they are read, and few remain open; `raw.close()` must then leave
    what was opened readable. Raises ValueError if a file is not of the `expected` kind, coordinates differ or a time is in
    two files of the same fields.
    """

    def opened(path: str) -> tuple[xr.Dataset, About]:
        raw = _open(path, open_one, expected)
        dataset = canonical(raw, config, path)
        return dataset, About.of(dataset, {*map(str, raw.variables), *map(str, raw.dims)})

    def look(path: str) -> About:
        raw = _open(path, open_one, expected)
        try:
            return About.of(canonical(raw, config, path), {*map(str, raw.variables), *map(str, raw.dims)})
        finally:
            raw.close()

    paths = find_files(config.path, config.storage_options)
    known: Sequence[About | None] = [None] * len(paths)
    recent: deque[_File] | None = None
    if index and len(paths) >= INDEXED and not any(map(is_url, paths)):
        known, recent = indexed(paths, _options(config), look), deque()
    every = [
        _File(path, partial(opened, path), partial(_open, path, open_one, expected), about, recent)
        for path, about in zip(paths, known, strict=True)
    ]
    kinds = _kinds(every)
    varying = {name for kind in kinds for name in kind.fields if "time" in kind.dims[name].split()}
    groups: dict[tuple[str, ...], list[_File]] = {}
    for file in every:
        here = file.about.kind.fields
        groups.setdefault(tuple(name for name in here if name in varying) or here, []).append(file)
    config.refuse_absent({name for kind in kinds for name in kind.names})
    parts = [
        (files[0].path, _join(files, config.duplicates) if len(files) > 1 else files[0].dataset())
        for files in groups.values()
    ]
    longest = max(part.sizes.get("time", 1) for _, part in parts)
    merged: xr.Dataset | None = None
    for path, part in parts:
        if longest > 1 and part.sizes.get("time") == 1:
            part = part.isel(time=0, drop=True)
        if merged is None:
            merged = part
            continue
        if both := sorted(set(fields(merged)) & set(fields(part))):
            raise UserError(_uneven(merged, parts[0][0], part, path, both))
        _same_coordinates(merged, part, path, DIMS)
        merged = merged.assign(
            {
                name: values
                for name, values in part.variables.items()
                if name not in merged.variables and name not in part.coords
            }
        )
        merged = merged.assign_coords(
            {name: part[name] for name in DIMS if name in part.coords and name not in merged.coords}
        )
    assert merged is not None
    return merged


def _open(path: str, open_one: Callable[[str], xr.Dataset], expected: str) -> xr.Dataset:
    try:
        return open_one(path)
    except ImportError as error:
        raise UserError(lacking(expected, path, error)) from error
    except failures(ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"expected {expected}, got {path}, which does not open: {reason(error)}") from error


class _File:
    """A file that is opened on first use, and then stays open or is one of the `recent` ones.

    Raises UserError if it is opened and is not what is known `about` it.
    """

    def __init__(
        self,
        path: str,
        open_it: Callable[[], tuple[xr.Dataset, About]],
        open_raw: Callable[[], xr.Dataset],
        about: About | None = None,
        recent: deque[_File] | None = None,
    ) -> None:
        self.path = path
        self._open_it, self._open_raw, self._about = open_it, open_raw, about
        self._recent = recent
        self._dataset: xr.Dataset | None = None

    @property
    def about(self) -> About:
        if self._about is None:
            self.dataset()
        assert self._about is not None
        return self._about

    def apart_from(self, other: _File) -> str:
        """Return the name of the level, member or step of which this file has another one; empty if there is none."""
        here, there = (single_values(file._open_raw()) for file in (self, other))
        return next((name for name, value in here.items() if name in there and there[name] != value), "")

    def dataset(self) -> xr.Dataset:
        dataset = self._dataset
        if dataset is None:
            dataset, about = self._open_it()
            if self._about is not None and not about.same(self._about):
                raise UserError(f"expected {self.path} as it was at the start, got other contents; start again")
            self._about, self._dataset = about, dataset
            if self._recent is not None:
                # Threads may do this at the same time: a reader keeps what it has, and a File is opened again on use.
                self._recent.append(self)
                with suppress(IndexError):
                    while len(self._recent) > _RECENT:
                        self._recent.popleft()._dataset = None
        return dataset


def _kinds(files: Sequence[_File]) -> list[Kind]:
    """Return the different kinds of files."""
    return list({id(file.about.kind): file.about.kind for file in files}.values())


def _options(config: FileConfig) -> str:
    """Return everything on which the dimensions and times of the files depend besides the files."""
    paths = [config.path] if isinstance(config.path, str) else config.path
    regrid: list[str] = []
    if config.regrid is not None and config.regrid.weights is not None and is_there(config.regrid.weights):
        found = os.stat(config.regrid.weights)
        regrid = [str(found.st_size), str(found.st_mtime_ns), str(found.st_ctime_ns)]
    if config.regrid is not None and config.regrid.like is not None:
        grid = _grid_of(config.regrid.like)
        regrid = [grid.latitude.tobytes().hex(), grid.longitude.tobytes().hex()]
    return json.dumps([config.model_dump_json(), list(map(os.path.abspath, paths)), regrid])


def _same_coordinates(first: xr.Dataset, other: xr.Dataset, path: str, names: Sequence[str]) -> None:
    for name in names:
        if name in first.coords and name in other.coords:
            a, b = first[name].values, other[name].values
            if name in ("latitude", "longitude"):
                same = same_points(name, a, b)
            else:
                same = a.shape == b.shape and (np.array_equal(a, b) if name == "time" else np.allclose(a, b))
            if not same:
                raise UserError(f"expected the same {name} in all files, got another in {path}; {_cure(name, a, b)}")


def _cure(axis: str, one: NDArray[Any], other: NDArray[Any]) -> str:
    """Return what to do about files with other values of an axis."""
    if axis == "longitude" and same_circle(one, other):
        return "its columns begin elsewhere: set data.source.region: {west: 0, east: 360}"
    return "list it as a source of its own" + (", with other names by `rename`" if axis == "level" else "")


def _join(files: Sequence[_File], duplicates: str | None) -> xr.Dataset:
    """Join the files along time; each may have any of the times."""
    for file in files:
        if file.about.kind.calendar is None:
            raise UserError(f"expected files with a time axis where there are several, got {file.path} without one")
        if file.about.kind.calendar != files[0].about.kind.calendar:
            raise UserError(
                f"expected the same calendar in all files, got {files[0].about.kind.calendar} in {files[0].path} and "
                f"{file.about.kind.calendar} in {file.path}; convert one of them, for instance with xarray's "
                "`convert_calendar`"
            )
    for file in files[1:]:
        if file.about.kind.coordinates != files[0].about.kind.coordinates:
            _same_coordinates(files[0].dataset(), file.dataset(), file.path, DIMS[1:])
    _refuse_other_fields(files)
    of_time = _times_of(files, duplicates)
    first, kinds = files[0].dataset(), _kinds(files)
    variables: dict[str, Any] = {}
    constant = {name for kind in kinds for name in kind.fields if "time" not in kind.dims[name].split()}
    for field in sorted(constant):  # which one of the files may have, and the others not
        variables[field] = _constant_field([file for file in files if field in file.about.kind.fields], field)
    for name, variable in first.data_vars.items():
        if name in variables or any(name not in kind.dtypes for kind in kinds):
            continue  # not a field: the files of a group have the same fields
        if any(set(kind.dims[str(name)].split()) != set(variable.dims) for kind in kinds):
            continue  # not a field either
        if "time" not in variable.dims:
            variables[str(name)] = variable.variable
            continue
        shape = tuple(len(of_time.seconds) if dim == "time" else n for dim, n in variable.sizes.items())
        dtype = np.result_type(*{np.dtype(kind.dtypes[str(name)]) for kind in kinds})
        lazy = indexing.LazilyIndexedArray(_Joined(files, of_time, str(name), variable.dims, shape, dtype))
        variables[str(name)] = xr.Variable(variable.dims, lazy, variable.attrs)
    coordinates = {name: coordinate for name, coordinate in first.coords.items() if "time" not in coordinate.dims}
    times = from_seconds(of_time.seconds, str(files[0].about.kind.calendar))
    return xr.Dataset(variables, {**coordinates, "time": times}, first.attrs)


def _constant_field(files: Sequence[_File], name: str) -> xr.Variable:
    """Return a field without time of several files, marked as one that differs if that of the last file is another."""
    variable = files[0].dataset().variables[name]
    if len(files) == 1 or not {"latitude", "longitude"} <= set(variable.dims):
        return variable
    other = files[-1].dataset().variables[name]
    if set(other.dims) == set(variable.dims):
        one, two = variable.values, other.transpose(*variable.dims).values
        if np.array_equal(one, two, equal_nan=one.dtype.kind == "f" and two.dtype.kind == "f"):
            return variable
    marked = variable.copy(deep=False)
    marked.attrs = {**variable.attrs, DIFFERS: f"{files[0].path} and {files[-1].path}"}
    return marked


def _refuse_other_fields(files: Sequence[_File]) -> None:
    """Raise UserError for a field that has other dimensions, whose order may differ, or other units in another file."""
    first = files[0].about.kind
    for file in files[1:]:
        kind = file.about.kind
        for name in first.fields if kind is not first else ():
            if name not in kind.dims:  # a field without time
                continue
            if set(kind.dims[name].split()) != set(first.dims[name].split()):
                raise UserError(
                    f"expected {name} on {first.dims[name]} in all files, as in {files[0].path}, got it on {kind.dims[name]} "
                    f"in {file.path}; list it as a source of its own"
                )
            if _differ(one := kind.units.get(name, ""), other := first.units.get(name, "")):
                raise UserError(
                    f"expected {name} in {other!r} in all files, as in {files[0].path}, got it in {one!r} in {file.path}; "
                    "convert it, or list the file as a source of its own"
                )


def _differ(one: str, other: str) -> bool:
    """Return whether two units are, or may be, different ones; a file without units may have any.

    Texts that are no known units are compared as they are, but for their spelling of blanks and powers, and letters' case.
    """
    texts = [re.sub(r"\s|\*\*|\^", "", text) for text in (one, other)]
    if not all(texts) or texts[0] == texts[1]:
        return False
    same = units.same(one, other)
    return texts[0].lower() != texts[1].lower() if same is None else not same


@dataclass(frozen=True)
class _Times:
    """The times of several files in order, the number of the file that is read for each, and its position in that file."""

    seconds: NDArray[np.int64]
    file: NDArray[np.int64]
    local: NDArray[np.int64]


def _times_of(files: Sequence[_File], duplicates: str | None) -> _Times:
    """Return the times of the files, each once: of the file that is listed first of those that have it.

    Raises UserError where a time is in two files and the experiment does not say which of them is read.
    """
    of_files = [file.about.seconds for file in files]
    since = np.concatenate(of_files)
    number = np.repeat(np.arange(len(files)), list(map(len, of_files)))
    local = np.concatenate([np.arange(len(times)) for times in of_files])
    times, first = np.unique(since, return_index=True)
    if duplicates is None and len(times) < len(since):
        again = int(np.setdiff1d(np.arange(len(since)), first)[0])
        file, before = files[number[again]], files[number[first[np.searchsorted(times, since[again])]]]
        cure = "set data.source.duplicates: first, or remove the file"
        if name := file.apart_from(before):
            cure = f"their {name} differs: list the files of each {name} as a source of its own, with other names by `rename`"
        raise RepeatedTimes(
            f"expected each time in one file, got {to_text(file.about.times[local[again]])} in {file.path} a second time "
            f"(after {before.path}); {cure}"
        )
    return _Times(times, number[first], local[first])


class _Joined(DirectArray):
    """One variable of several files, joined along time without loading."""

    def __init__(
        self,
        files: Sequence[_File],
        times: _Times,
        name: str,
        dims: tuple[Hashable, ...],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self.files, self.times, self.name = files, times, name
        self.dims, self.axis = dims, dims.index("time")
        self.shape, self.dtype = shape, dtype
        variable = files[0].dataset().variables[name]
        along = [chunk_along(variable, str(dim)) for dim in dims]
        self.chunks = tuple(n if found is None else found[0] for n, found in zip(shape, along, strict=True))

    def box(self, spans: Spans, out: NDArray[Any] | None = None) -> NDArray[Any]:
        start, stop = spans[self.axis]
        positions = np.arange(start, stop)
        found = None
        if len(self._parts(positions)) == 1 and (np.diff(self.times.local[positions]) == 1).all():
            variable = self.files[self.times.file[start]].dataset().variables[self.name]
            found = direct(variable) if variable.dims == self.dims else None
        if found is None:
            values = self._read(tuple(slice(*span) for span in spans))
            if out is not None:
                out[...] = values
            return values if out is None else out
        array, offsets = found
        ahead = [int(self.times.local[start]) - start if i == self.axis else 0 for i in range(len(spans))]
        return array.box([(a + o + b, e + o + b) for (a, e), o, b in zip(spans, offsets, ahead, strict=True)], out)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        wanted = key[self.axis]
        if isinstance(wanted, int | np.integer):
            return self._part(key, int(self.times.file[wanted]), int(self.times.local[wanted]))
        parts = [
            self._part(key, int(self.times.file[part[0]]), self.times.local[part])
            for part in self._parts(np.arange(self.shape[self.axis])[wanted])
        ]
        axis = sum(not isinstance(k, int | np.integer) for k in key[: self.axis])
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)

    def _parts(self, positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Split positions where another file begins."""
        return np.split(positions, np.flatnonzero(np.diff(self.times.file[positions])) + 1)

    def _part(self, key: tuple[Any, ...], file: int, local: Any) -> Any:
        if isinstance(local, np.ndarray) and np.all(np.diff(local) == 1):
            local = slice(int(local[0]), int(local[-1]) + 1)
        variable = self.files[file].dataset().variables[self.name]
        of_dim = dict(zip(self.dims, (*key[: self.axis], local, *key[self.axis + 1 :]), strict=True))
        values = variable[tuple(of_dim[dim] for dim in variable.dims)]  # in the order of this file
        return values.transpose(*(dim for dim in self.dims if dim in values.dims)).values


def canonical(raw: xr.Dataset, config: FileConfig, path: str) -> xr.Dataset:
    """Return the dataset with canonical dimensions, decoded times and values, and 1-D latitude and longitude.

    Dimensions are named time, level, latitude, longitude. `raw` has nothing decoded. Options apply to what it has; of all files
    together, `FileConfig.refuse_absent` says what they lack. Raises UserError if a dimension cannot be recognised or time cannot
    be decoded.
    """
    given = {here: dim for here, dim in config.dims.model_dump().items() if dim in raw.dims or dim in raw.variables}
    names = {here: dim for here, dim in roles(raw, given).items() if dim not in config.select}
    raw = reduced(raw, names, config.select, path)
    axes = {} if config.regrid and config.regrid.weights else plane_axes(raw, names, path)
    written = None
    if (of_time := names.get("time")) in raw.dims and of_time not in raw.variables:
        written = text_times(raw, str(of_time), config.calendar)
        if written is None and (numbers := numeric_times(raw, str(of_time))):
            raw = raw.assign_coords({str(of_time): raw[numbers].variable.load()})
    elif of_time in raw.dims and (valid := valid_times(raw, str(of_time))):
        raw = raw.assign_coords({str(of_time): raw[valid].variable.load()})
    units_by = _start(raw, config)
    renamed = {there: here for here, there in names.items() if there != here and there in {*raw.dims, *raw.variables}}
    # Another dimension of such a name, with its coordinate, makes way for the one that was chosen.
    raw = raw.rename(
        {
            here: f"_{here}"
            for there, here in renamed.items()
            if there in raw.dims and here in raw.dims and here not in renamed
        }
    )
    blocked = [here for here in renamed.values() if here in raw.variables or here in raw.dims]
    dataset = raw.drop_vars([name for name in blocked if name in raw.variables]).rename(renamed)
    dataset = dataset.rename({name: new for name, new in config.rename.items() if name in dataset.variables})
    dataset = dataset.drop_vars([name for name in axes if name in dataset.variables])
    dataset = dataset.assign_coords({name: (name, values) for name, values in axes.items()})
    for name in ("latitude", "longitude"):
        if name not in dataset.coords and name in dataset.dims and not (config.regrid and config.regrid.weights):
            raise UserError(f"expected values of {name} in {path}, got a dimension without coordinate")
    dataset = _decode_values(_with_numbers(dataset, path))
    if "time" in dataset.variables and "time" in dataset.dims:
        times = _decode_time(dataset["time"].variable, units_by, config.calendar, path)
        dataset = dataset.assign_coords(time=("time", times))
    elif written is not None:
        dataset = dataset.assign_coords(time=("time", written))
    dataset = _increasing(dataset, config.duplicates, path)
    return _within(_regridded(dataset, config, path), config.region)


def _uneven(one: xr.Dataset, path: str, other: xr.Dataset, other_path: str, both: list[str]) -> str:
    """Return the message for files of which some variables, but not all, are in several of them."""
    missing, added = (sorted(set(fields(a)) - set(fields(b))) for a, b in ((one, other), (other, one)))
    difference = " and ".join(
        text
        for text in (
            f"without {', '.join(missing)}" if missing else "",
            f"with {', '.join(added)} in addition" if added else "",
        )
        if text
    )
    return (
        f"expected the variables of {path} in {other_path} too, or none of them, got {', '.join(both)} {difference}; "
        "rename or leave out variables so that the files agree, give a variable its own `path`, or list several sources"
    )


def _increasing(dataset: xr.Dataset, duplicates: str | None, path: str) -> xr.Dataset:
    """Return the dataset with increasing times; repeated ones are dropped if the experiment says so."""
    if "time" not in dataset.coords or "time" not in dataset.dims:
        return dataset
    times = dataset["time"].values
    first = np.unique(times, return_index=True)[1]
    if len(first) == 1 and len(times) > 2:
        # What is missing at the end of a netCDF-3 file is read as zeros.
        raise UserError(
            f"expected times that differ in {path}, got {to_text(times[0])} {len(times)} times; the file may be cut off"
        )
    if len(first) < len(times):
        if duplicates is None:
            again = times[np.setdiff1d(np.arange(len(times)), first)[0]]
            raise RepeatedTimes(
                f"expected each time once in {path}, got {to_text(again)} twice; set data.source.duplicates: first"
            )
        dataset = dataset.isel(time=np.sort(first))
    times = dataset["time"].values
    back = np.flatnonzero(times[1:] <= times[:-1])
    if len(back):
        raise UserError(
            f"expected increasing times in {path}, got {to_text(times[back[0] + 1])} out of order; sort it by time, "
            "for instance with xarray's `sortby`"
        )
    return dataset


def _regridded(dataset: xr.Dataset, config: FileConfig, path: str) -> xr.Dataset:
    """Regrid to the grid that `config.regrid` specifies, if any."""
    asked = config.regrid
    if asked is None or not {"latitude", "longitude"} <= set(dataset.dims):
        return dataset
    if asked.weights is not None:
        if not is_there(asked.weights):
            raise UserError(f"expected a file of weights, got {asked.weights!r}; change data.source.regrid.weights")
        stored = read_weights(asked.weights)
        shape = (dataset.sizes["latitude"], dataset.sizes["longitude"])
        if stored.source_shape != shape:
            raise UserError(f"expected {path} on the grid of {asked.weights}, {stored.source_shape}, got {shape}")
        refuse_other_source(stored, dataset, path, asked.weights)
        return regrid(dataset, stored)
    target = regular(asked.degrees) if asked.degrees is not None else _grid_of(str(asked.like))
    source = Grid(dataset["latitude"].values.astype(np.float64), dataset["longitude"].values.astype(np.float64))
    return regrid(dataset, conservative(source, target))


def _grid_of(path: str) -> Grid:
    """Return the grid of a file or store."""
    if not is_there(path):
        raise UserError(f"expected a file or store with the grid, got {path!r}; change data.source.regrid.like")
    is_store = Path(path).is_dir()
    with xr.open_zarr(path, decode_cf=False, consolidated=False, chunks=None) if is_store else open_lazily(path) as raw:
        named = canonical(raw.drop_vars("time", errors="ignore"), FileConfig(), path)
        return Grid(*(named[name].values.astype(np.float64) for name in ("latitude", "longitude")))


def _start(raw: xr.Dataset, config: FileConfig) -> str | None:
    """Return `config.time_units` with the start taken from the variable of the file that it names, if it names one."""
    if config.time_units is None or " since " not in config.time_units:
        return config.time_units
    unit, since = config.time_units.split(" since ", 1)
    if since.strip() not in raw.variables:
        return config.time_units
    value = np.asarray(raw[since.strip()].values)
    text = value.tobytes().decode() if value.dtype.kind == "S" else "".join(map(str, value.ravel().tolist()))
    match = re.search(r"(\d{4})\D+(\d{1,2})\D+(\d{1,2})(?:\D+(\d{1,2}))?(?::(\d{2}))?(?::(\d{2}))?", text)
    if match is None:
        raise UserError(f"expected a date in variable {since!r}, got {text!r}; change data.source.time_units")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups())
    return f"{unit} since {year:04d}-{month:02d}-{day:02d} {hour:02d}:{minute:02d}:{second:02d}"


def _decode_time(variable: xr.Variable, units: str | None, calendar: str | None, path: str) -> Times:
    """Decode times to datetime64[s] for standard calendars, to cftime objects for others.

    `units` and `calendar` are those of files that do not state theirs, or state units that cannot be decoded; packed times are
    unpacked.
    """
    attrs = dict(variable.attrs)
    if units and "since" not in str(attrs.get("units", "")):
        attrs["units"] = units
    if calendar and not attrs.get("calendar"):
        attrs["calendar"] = calendar
    values = variable.values
    if values.dtype.kind == "M":
        return whole_seconds(values)
    scale, offset = (np.asarray(attrs.pop(key, n), float).item() for key, n in (("scale_factor", 1), ("add_offset", 0)))
    if (scale, offset) != (1.0, 0.0):
        values = values.astype(np.float64) * scale + offset
    if "since" not in str(attrs.get("units", "")):
        raise UserError(
            f"expected time units such as 'hours since 1990-01-01' in {path}, got {attrs.get('units')!r}; "
            "set data.source.time_units"
        )
    try:
        coder = xr.coders.CFDatetimeCoder(time_unit="us")  # in seconds it truncates
        decoded = coder.decode(xr.Variable(variable.dims, values, attrs)).values
    except (ValueError, OverflowError) as error:
        if units and attrs["units"] != units:
            given = xr.Variable(variable.dims, variable.values, variable.attrs | {"units": units})
            return _decode_time(given, None, calendar, path)
        raise UserError(
            f"expected times that decode in {path}, got {attrs['units']!r}: {error}; set data.source.time_units"
        ) from error
    if decoded.dtype.kind == "M":
        return whole_seconds(decoded)
    first = decoded.ravel()[0]
    if isinstance(first, cftime.datetime) and first.calendar in ("standard", "gregorian", "proleptic_gregorian"):
        return whole_seconds(np.array([np.datetime64(time.isoformat(), "us") for time in decoded]))
    return np.asarray(decoded, dtype=object)


def _with_numbers(dataset: xr.Dataset, path: str) -> xr.Dataset:
    """Return the dataset with scales, offsets and missing values as numbers where they are written as text.

    Blank text is none. Raises UserError for other text.
    """
    dataset = dataset.copy()
    for name, variable in dataset.variables.items():
        for key in _NUMBERS if variable.dtype.kind in "iufb" else ():
            text = np.asarray(variable.attrs.get(key, 0))
            if text.dtype.kind not in "SUO":
                continue
            if not str(variable.attrs[key]).strip():
                del variable.attrs[key]
                continue
            try:
                number = text.astype(np.float64)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"expected a number as {key} of {name} in {path}, got {variable.attrs[key]!r}; correct the attribute, for "
                    "instance with `ncatted`"
                ) from error
            is_missing = key in ("_FillValue", "missing_value") and variable.dtype.kind == "f"
            variable.attrs[key] = number.astype(variable.dtype if is_missing else np.float64)[()]
    return dataset


def _decode_values(dataset: xr.Dataset) -> xr.Dataset:
    """Apply scale, offset and missing values; floats whose missing value is NaN remain unchanged."""
    coded = [str(name) for name, variable in dataset.variables.items() if name != "time" and _is_coded(variable)]
    plain = dataset.drop_vars(coded)
    for name in set(map(str, plain.variables)) - {"time"}:
        plain[name].attrs = {key: value for key, value in plain[name].attrs.items() if key not in _CODING}
    if not coded:
        return plain
    dataset = dataset.assign({name: _with_unpacked_range(dataset[name]) for name in coded if name in dataset.data_vars})
    decoded = xr.decode_cf(dataset[coded].drop_vars("time", errors="ignore"), decode_times=False, decode_coords=False)
    return plain.assign({name: decoded[name].variable for name in coded if name not in dataset.coords}).assign_coords(
        {name: decoded[name].variable for name in coded if name in dataset.coords}
    )


def _with_unpacked_range(array: xr.DataArray) -> xr.DataArray:
    """Return a variable whose valid range is in unpacked values. By CF it is packed where it has the type of the packed values."""
    attrs, packed = dict(array.attrs), "f" if array.dtype.kind == "f" else "iu"
    for key in [key for key in VALID if key in attrs]:
        if "_Unsigned" in attrs:
            del attrs[key]  # its numbers may be signed ones
        elif np.asarray(attrs[key]).dtype.kind in packed:
            attrs[key] = np.asarray(attrs[key]) * attrs.get("scale_factor", 1) + attrs.get("add_offset", 0)
    result = array.copy(deep=False)
    result.attrs = attrs
    return result


def _is_coded(variable: xr.Variable) -> bool:
    attrs = variable.attrs
    missing = [np.asarray(attrs[key]).ravel() for key in ("_FillValue", "missing_value") if key in attrs]
    if variable.dtype.kind == "f":
        return "scale_factor" in attrs or "add_offset" in attrs or any(not np.all(np.isnan(value)) for value in missing)
    return variable.dtype.kind in "iu" and any(key in attrs for key in _CODING)


def _within(dataset: xr.Dataset, region: Region | None) -> xr.Dataset:
    """Return the rows and columns inside a region; data are rolled if the region crosses their edge."""
    if region is None or "latitude" not in dataset.coords:
        return dataset
    latitude, longitude = (dataset[name].values.astype(np.float64) for name in ("latitude", "longitude"))
    rows = np.flatnonzero((latitude >= region.south - ROUNDING) & (latitude <= region.north + ROUNDING))
    columns = np.arange(dataset.sizes["longitude"])
    if region.west is not None and region.east is not None:
        east_of = (longitude - region.west + ROUNDING) % 360
        width = (region.east - region.west) % 360 or 360.0
        inside = np.flatnonzero(east_of <= width + 2 * ROUNDING)
        columns = inside[np.argsort(east_of[inside], kind="stable")]
    if len(rows) < 2 or len(columns) < 2:
        raise UserError(
            f"expected a region with at least 2 × 2 points, got {len(rows)} × {len(columns)}; change data.source.region"
        )
    cut = dataset.isel(latitude=slice(int(rows[0]), int(rows[-1]) + 1))
    if np.all(np.diff(columns) == 1):
        return cut.isel(longitude=slice(int(columns[0]), int(columns[-1]) + 1))
    cut = cut.isel(longitude=columns)
    west = cut["longitude"].values[0]
    west = west - 360 if west >= 360 else west
    return cut.assign_coords(longitude=west + (cut["longitude"].values - west) % 360)
