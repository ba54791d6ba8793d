"""Fields by variable, time and row, read from the configured sources. All data enter the program through this module.

Shape suffixes: T times, C channels, H rows (the requested ones), W longitudes.
"""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import itertools
import json
import logging
import os
import time as clock
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from pydantic import BaseModel

from credit_like.data import solar
from credit_like.data.axes import common_grid, common_times
from credit_like.data.files.direct import chunk_along, direct
from credit_like.data.files.remote import RemoteError
from credit_like.data.locate import (
    FurtherDimension,
    InMemory,
    OtherLevel,
    Place,
    Problems,
    Refused,
    Source,
    locate,
    merged_dimensions,
    merged_levels,
)
from credit_like.data.sources._conventions import PERIOD, RepeatedTimes
from credit_like.data.sources._files import FileConfig
from credit_like.data.times import Times, calendar_of, from_seconds, nearest_in_year, parse, seconds, to_text
from credit_like.errors import RunError, UserError
from credit_like.grid import Grid
from credit_like.schema.base import format_duration
from credit_like.schema.data import DataSection, Periods
from credit_like.variables import ROLES, Variable, Variables

Fields = NDArray[np.float32]
Out = Sequence[Fields] | Fields
"""One array (C, H, W) for each time."""
Part = tuple[slice, slice]
"""Rows and columns."""
_ACCESS = {"cache", "storage_options", "statistics"}
"""Keys of a source that do not change the values that are read."""
_SOLAR_ATTRS = {
    "units": "J m-2",
    "long_name": "insolation at the top of the atmosphere, accumulated over the step that ends at the time",
    "standard_name": "integral_wrt_time_of_toa_incoming_shortwave_flux",
}
_READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError, IndexError, TypeError)
_TRIES, _PAUSE = 3, 0.2  # number of attempts to read from an unreliable disk or server, and the pause between them in s
_LOG = logging.getLogger(__name__)


class StoreError(UserError):
    """The files do not contain what the experiment requires: `problems` as (place in the experiment, message).

    `partial` is a store of what was found, with a grid and times, for the checks that need nothing else; None where the
    files do not tell.
    """

    def __init__(self, problems: Problems, partial: FieldStore | None = None) -> None:
        self.problems, self.partial = tuple(problems), partial
        super().__init__("\n".join(f"{'.'.join(map(str, place))}: {message}" for place, message in self.problems))


class ReadError(RunError):
    """A read failed after the files had been opened; the message names the variable, time, file and cause."""


class FieldStore:
    """Fields of all variables of an experiment on one grid and one time axis with the experiment's step.

    Created by `open_store`. Picklable and safe to fork: every process opens the files itself on its first read.
    """

    def __init__(
        self,
        variables: Variables,
        grid: Grid,
        times: Times,
        step_seconds: int,
        sources: Sequence[Source],
        places: dict[str, Place],
        datasets: Sequence[xr.Dataset],
    ) -> None:
        self.variables = variables
        self.grid = grid
        self.times = times
        self.calendar = calendar_of(times)
        self.seconds = seconds(times)
        self.step_seconds = step_seconds
        self._sources = tuple(sources)
        self._places = places
        self._datasets: dict[int, xr.Dataset] = dict(enumerate(datasets))
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def in_order(self, grid: Grid, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> FieldStore:
        """Return this store with its rows and columns reordered to those of `grid`.

        It reads whole fields, whatever part is asked for.
        """
        other = copy.copy(self)
        other._datasets, other._pool = dict(self._datasets), None
        if self._order is not None:
            rows, columns = self._order[0][rows], self._order[1][columns]
        other.grid, other._order = grid, (rows, columns)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_datasets": {}, "_pool": None, "_pid": -1}

    def __len__(self) -> int:
        return len(self.times)

    def close(self) -> None:
        """Close the files that this process has open; the next read opens them again."""
        if self._pid == os.getpid():
            for source, dataset in self._datasets.items():
                if not isinstance(self._sources[source].config, InMemory):
                    dataset.close()

    @property
    def other_sums(self) -> dict[str, int]:
        """Return variable → seconds for sums over another time than the step.

        The values at the chosen times are read, which are sums over the time that the files declare, or over their spacing.
        """
        of = {name: self._sum_over(place) for name, place in self._places.items() if place.varies}
        return {name: over for name, over in of.items() if over not in (0, self.step_seconds)}

    def told_other_sums(self) -> str:
        """Return `other_sums` as text, empty where there are none."""
        each = [f"{name} over {format_duration(dt.timedelta(seconds=over))}" for name, over in self.other_sums.items()]
        step = format_duration(dt.timedelta(seconds=self.step_seconds))
        return (
            f"{', '.join(each)} in the files, which are not converted to sums over data.timestep ({step})"
            if each
            else ""
        )

    def sum_attrs(self, variable: Variable) -> dict[str, str]:
        """Return the attribute with the hours over which the values of a variable are sums, if they are."""
        place = self._places.get(variable.name)
        over = self._sum_over(place) if place else 0
        return {PERIOD: f"{over / 3600:g}"} if over else {}

    def _sum_over(self, place: Place) -> int:
        """Return the seconds over which the values are sums; 0 where they are not, or it is not known."""
        if place.sum_over != 0:
            return place.sum_over or 0
        if isinstance(self._sources[place.source].config, InMemory):
            return 0  # the times of an analysis are not those of the data that a model was trained on
        dataset = self._datasets.get(place.source)
        if dataset is None or "time" not in dataset.coords or dataset.sizes["time"] < 2:
            return 0
        return min(int(np.diff(seconds(dataset["time"].values)).min()), self.step_seconds)

    @property
    def start(self) -> str:
        """Return the first time, as text."""
        return to_text(self.times[0])

    def attrs(self, variable: Variable) -> dict[str, str]:
        """Return units, long_name and standard_name, as far as the files or the experiment specify them."""
        place = self._places.get(variable.name)
        return dict(_SOLAR_ATTRS if variable.spec.compute else place.attrs if place else {})

    def level_units(self, variable: Variable) -> str:
        """Return the units of the levels of a variable, empty if the files do not specify them."""
        return self.level_attrs(variable).get("units", "")

    def level_attrs(self, variable: Variable) -> dict[str, str]:
        """Return units, standard_name, long_name and positive of the levels of a variable, as far as the files specify them."""
        place = self._places.get(variable.name)
        return dict(place.level_attrs) if place else {}

    def valid_range(self, variable: Variable) -> tuple[float, float]:
        """Return the lowest and the highest value of a variable that the files call valid, infinite where they do not say."""
        place = self._places.get(variable.name)
        return place.valid if place else (-np.inf, np.inf)

    def source_of(self, variable: Variable) -> tuple[Any, str] | None:
        """Return the source's configuration and the variable's name in it, or None for a computed variable."""
        place = self._places.get(variable.name)
        return (self._sources[place.source].config, place.var) if place else None

    def origin(self, variable: Variable) -> str:
        """Return a hash of the source of a variable and its name there, empty for a computed variable.

        A store that `preprocess --rechunk` wrote has the origin of the data that it is a copy of. Units are no part of it.
        """
        place = self._places.get(variable.name)
        if place is None or place.copy_of:
            return place.copy_of if place else ""
        config = self._sources[place.source].config
        told = config.model_dump(mode="json", exclude=_ACCESS) if isinstance(config, BaseModel) else config.type
        return hashlib.sha256(json.dumps([told, place.var], sort_keys=True).encode()).hexdigest()[:20]

    def index(self, time: str) -> int:
        """Return the position of an ISO time on the time axis. Raises UserError with the nearest times if it is absent."""
        wanted = parse(time, self.calendar)
        after = int(np.searchsorted(self.seconds, wanted))
        if after < len(self.seconds) and self.seconds[after] == wanted:
            return after
        near = [to_text(t) for t in self.times[max(0, after - 1) : after + 1]]
        step = format_duration(dt.timedelta(seconds=self.step_seconds))
        raise UserError(
            f"expected a time in the data, got {time}; the nearest are {' and '.join(near)} (data.timestep: {step})"
        )

    def period(self, periods: Periods) -> NDArray[np.int64]:
        """Return the positions inside the periods, ends included, in order."""
        inside = np.zeros(len(self.times), bool)
        for period in periods:
            inside |= (self.seconds >= parse(period.start, self.calendar)) & (
                self.seconds <= parse(period.end, self.calendar)
            )
        return np.flatnonzero(inside)

    def reaches_over(self, periods: Periods) -> bool:
        """Return whether there are data from the start of the periods to their end, but for a quarter of them at either end."""
        positions = self.period(periods)
        first, last = parse(periods[0].start, self.calendar), parse(periods[-1].end, self.calendar)
        margin = 0.25 * (last - first)
        if not len(positions):
            return False
        begin, end = self.seconds[positions[[0, -1]]]
        return bool(begin <= first + margin and end >= last - margin)

    def time_seconds(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return seconds since 1970-01-01 at positions; the axis is extrapolated in steps beyond the last time."""
        wanted = np.asarray(positions, np.int64)
        if wanted.size and wanted.min() < 0:
            raise UserError(f"expected positions from 0 on, got {wanted.min()}")
        last = len(self.seconds) - 1
        return self.seconds[np.minimum(wanted, last)] + np.maximum(wanted - last, 0) * self.step_seconds

    def read(
        self,
        variables: Sequence[Variable],
        times: Sequence[int] | NDArray[np.int64],
        rows: slice = slice(None),
        out: Out | None = None,
        columns: slice = slice(None),
    ) -> Fields:
        """Read (T, C, H, W) float32 at positions on the time axis, NaN at missing points.

        Only `rows` and `columns` are read if the files allow it. `out` gives T arrays (C, H, W) to fill; the result is then empty.
        Computed and cyclic variables extend beyond the last time; others raise IndexError there. Raises ReadError
        naming variable, time and file if reading fails three times.
        """
        positions = np.asarray(times, np.int64)
        part = (rows, columns)
        result, into = self._target(variables, len(positions), part, out)
        jobs = [(variable, channels, positions, part, into) for variable, channels in _stacked(variables)]
        if len(jobs) > 1 and self._concurrent():
            for done in [self._threads().submit(self._fill, *job) for job in jobs]:
                done.result()
        else:
            for job in jobs:
                self._fill(*job)
        return result

    def static(self, rows: slice = slice(None), columns: slice = slice(None)) -> Fields:
        """Read (C, H, W) of the static variables."""
        statics = self.variables.role("static")
        if not statics:
            return np.empty((0, *self._size((rows, columns))), np.float32)
        return self.read(statics, [0], rows, columns=columns)[0]

    def forcing(
        self,
        times: Sequence[int] | NDArray[np.int64],
        now: int,
        rows: slice = slice(None),
        out: Out | None = None,
        columns: slice = slice(None),
    ) -> Fields:
        """Read dynamic forcing as known at position `now`: (T, C, H, W), or into `out`, as `read` does.

        `fill: persist` uses the field of `now` at all later times.
        """
        variables = self.variables.role("dynamic_forcing")
        positions = np.asarray(times, np.int64)
        part = (rows, columns)
        result, into = self._target(variables, len(positions), part, out)
        for variable, channels in _stacked(variables):
            at = np.minimum(positions, now) if variable.spec.fill == "persist" else positions
            self._fill(variable, channels, at, part, into)
        return result

    def _target(self, variables: Sequence[Variable], times: int, part: Part, out: Out | None) -> tuple[Fields, Out]:
        """Return the result of a read, and the arrays to fill: both are new fields, or nothing and `out`."""
        if out is not None:
            return np.empty((0, 0, 0, 0), np.float32), out
        result = np.empty((times, sum(map(len, variables)), *self._size(part)), np.float32)
        return result, result

    def _ranges(self, part: Part) -> tuple[range, range]:
        """Return the numbers of the rows and the columns of a part."""
        rows, columns = part
        return range(*rows.indices(self.grid.height)), range(*columns.indices(self.grid.width))

    def _size(self, part: Part) -> tuple[int, int]:
        rows, columns = self._ranges(part)
        return len(rows), len(columns)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _fill(self, variable: Variable, channels: slice, positions: NDArray[np.int64], part: Part, out: Out) -> None:
        if variable.spec.compute == "solar":
            latitude, longitude = self.grid.latitude[part[0]], self.grid.longitude[part[1]]
            table = _irradiance(variable)
            times = from_seconds(self.time_seconds(positions), self.calendar)
            for t, field in enumerate(
                solar.insolation(times, self.calendar, self.step_seconds, latitude, longitude, table)
            ):
                out[t][channels.start] = field
            return
        place = self._places[variable.name]
        start = 0
        for run in _runs(self._source_positions(place, positions)):
            targets = [out[start + t][channels] for t in range(len(run))]
            if self._order is None:
                self._load(variable, place, run, part, targets)
            else:
                rows, columns = (numbers[wanted] for numbers, wanted in zip(self._order, part, strict=True))
                shape = (len(run), len(variable), self.grid.height, self.grid.width)
                fields = np.empty(shape, np.float32)
                self._load(variable, place, run, (slice(None), slice(None)), list(fields))
                for target, field in zip(targets, fields, strict=True):
                    target[...] = field[:, rows[:, None], columns]
            start += len(run)

    def _source_positions(self, place: Place, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not place.varies:
            return np.full(len(positions), -1, np.int64)
        if place.cyclic:
            axis = self._dataset(place.source)["time"].values
            return nearest_in_year(axis, from_seconds(self.time_seconds(positions), self.calendar))
        if positions.size and not 0 <= positions.min() <= positions.max() < len(self.times):
            raise IndexError(
                f"expected times from {to_text(self.times[0])} to {to_text(self.times[-1])}, got position "
                f"{positions.max()} of {len(self.times)}; for forcing beyond the data use `fill: persist` or `cyclic`"
            )
        mapping = self._sources[place.source].position
        return positions if mapping is None else mapping[positions]

    def _load(
        self, variable: Variable, place: Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields]
    ) -> None:
        """Fill a target (C, H, W) for each of some consecutive times; retry a failed read."""
        for attempt in range(1, _TRIES + 1):
            try:
                return self._load_once(place, run, part, targets)
            except _READ_ERRORS as error:
                if attempt == _TRIES or isinstance(
                    error, RemoteError
                ):  # reads from a server have been repeated already
                    raise ReadError(self._story(variable, place, self._culprit(place, run, part), error)) from error
                clock.sleep(_PAUSE * attempt)
                if (failed := self._datasets.pop(place.source, None)) is not None:
                    failed.close()
        raise AssertionError("unreachable")

    def _culprit(self, place: Place, run: NDArray[np.int64], part: Part) -> NDArray[np.int64]:
        """Return the first of several times that cannot be read on its own, or the first of all if each can be read."""
        for position in run:
            try:
                self._load_once(place, np.array([position]), part)
            except _READ_ERRORS:
                return np.array([position])
        return run

    def _load_once(
        self, place: Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields] | None = None
    ) -> None:
        """Read the values, and fill the targets if there are any."""
        stored = self._dataset(place.source).variables[place.var]
        if targets is not None and self._load_in_place(stored, place, run, part, targets):
            return
        block_TCHW = self._block(stored, place, run, part)
        for block_CHW, target in zip(block_TCHW, targets or (), strict=False):
            _store(target, block_CHW, place)

    def _load_in_place(
        self, stored: xr.Variable, place: Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields]
    ) -> bool:
        """Decode straight into the targets if no conversion is needed and no chunk would be decoded twice."""
        levels = place.levels
        first = place.dims.index("latitude")
        if (
            stored.dtype != np.float32
            or (place.factor, place.offset) != (1, 0)
            or place.dims[first:] != ("latitude", "longitude")
            or place.dims[:first] not in ((), ("time",), ("level",), ("time", "level"))
            or not all(target.flags.c_contiguous for target in targets)
        ):
            return False
        found = direct(stored)
        if found is None or ("time" in place.dims and len(run) > 1 and found[0].chunks[0] > 1):
            return False
        array, offsets = found
        ranges = self._ranges(part)
        box = [(along.start, along.stop) for along in ranges]
        if any(along.step != 1 for along in ranges):
            return False
        pieces = [slice(0, len(levels))] if "level" in place.dims else [slice(None)]
        if "level" in place.dims:
            axis = place.dims.index("level")
            ends = [i for i, (a, b) in enumerate(itertools.pairwise(levels), 1) if b - a != 1]
            pieces = [slice(*span) for span in itertools.pairwise([0, *ends, len(levels)])]
            chunks = [
                _chunks(levels[piece.start], levels[piece.stop - 1], array.chunks[axis], offsets[axis])
                for piece in pieces
            ]
            if sum(map(len, chunks)) > len(set().union(*chunks)):
                return False
        for position, target in zip(run.tolist(), targets, strict=True):
            at = position if place.still is None else place.still
            for piece in pieces:
                spans = [(at, at + 1)] if "time" in place.dims else []
                spans += [(levels[piece.start], levels[piece.stop - 1] + 1)] if "level" in place.dims else []
                spans += box
                shape = [stop - start for start, stop in spans]
                moved = [(a + o, b + o) for (a, b), o in zip(spans, offsets, strict=True)]
                array.box(moved, target[piece].reshape(shape))
        return True

    def _block(self, stored: xr.Variable, place: Place, run: NDArray[np.int64], part: Part) -> NDArray[Any]:
        """Read (T, C, H, W) as stored."""
        rows, columns = part
        key: dict[str, Any] = {
            "latitude": slice(*rows.indices(self.grid.height)),
            "longitude": slice(*columns.indices(self.grid.width)),
        }
        if "time" in place.dims:
            key["time"] = (
                slice(int(run[0]), int(run[-1]) + 1) if place.still is None else slice(place.still, place.still + 1)
            )
        spans = _spans_of_levels(place.levels, chunk_along(stored, "level")) if "level" in place.dims else [(0, 0)]
        order = [place.dims.index(dim) for dim in ("time", "level", "latitude", "longitude") if dim in place.dims]
        parts = []
        for start, stop in spans:
            if "level" in place.dims:
                key["level"] = slice(start, stop)
            values = stored[tuple(key.get(str(dim), slice(None)) for dim in stored.dims)].values
            parts.append(values.transpose(order))
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-3)
        if not place.varies:
            field = values[0] if "time" in place.dims else values
            values = np.broadcast_to(field, (len(run), *field.shape))
        if "level" not in place.dims:
            return values[:, None]
        read = [level for start, stop in spans for level in range(start, stop)]
        wanted = [read.index(level) for level in place.levels]
        return values if wanted == list(range(values.shape[1])) else values[:, wanted]

    def _story(self, variable: Variable, place: Place, run: NDArray[np.int64], error: Exception) -> str:
        source = self._sources[place.source]
        at = f" at source time {run[0]}" if run[0] >= 0 else ""
        if run[0] >= 0 and not place.cyclic:
            first = run[0] if source.position is None else int(np.searchsorted(source.position, run[0]))
            at = f" at {to_text(self.times[min(int(first), len(self.times) - 1)])}"
        name = variable.name if place.var == variable.name else f"{variable.name} ({place.var})"
        return f"cannot read {name}{at} from {source.where}: {type(error).__name__}: {error}"

    def _forget_parent(self) -> None:
        """Forget what another process has opened, in a process that was forked from it or has unpickled the store."""
        if self._pid != os.getpid():
            self._datasets, self._pool, self._pid = {}, None, os.getpid()

    def _dataset(self, source: int) -> xr.Dataset:
        self._forget_parent()
        if source not in self._datasets:
            self._datasets[source] = self._unchanged(source, self._sources[source].open())
        return self._datasets[source]

    def _unchanged(self, source: int, dataset: xr.Dataset) -> xr.Dataset:
        """Return a dataset that was opened again. Raises UserError where positions on its time axis mean other times now."""
        if any(p.source == source and p.varies and not p.cyclic for p in self._places.values()):
            axis, position = seconds(dataset["time"].values), self._sources[source].position
            at = np.arange(len(self.seconds)) if position is None else position
            if at[-1] >= len(axis) or not np.array_equal(axis[at], self.seconds):
                dataset.close()
                where = self._sources[source].where
                raise UserError(f"expected the times that {where} had at the start, got others; start again")
        return dataset

    def _concurrent(self) -> bool:
        """Return whether several variables may be read concurrently: reads wait for a server, and the format allows it."""
        return any("://" in path for source in self._sources for path in source.paths)

    def _threads(self) -> ThreadPoolExecutor:
        self._forget_parent()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="read")
        return self._pool


def _irradiance(variable: Variable) -> solar.Irradiance | None:
    """Return the table of a computed variable. Raises UserError where it cannot be read."""
    spec = variable.spec
    return solar.read_irradiance(spec.irradiance) if spec.compute and spec.irradiance else None


def _check_irradiance(data: DataSection, variables: Variables, times: Times, problems: Problems) -> None:
    """Add to `problems` the tables of irradiance that cannot be read or do not have all years of the data."""
    for variable in variables:
        try:
            if (table := _irradiance(variable)) is not None:
                table.at(times[[0, -1]])
        except UserError as error:
            problems.append(((*_spec_place(data, variable), "irradiance"), str(error)))


def _stacked(variables: Sequence[Variable]) -> list[tuple[Variable, slice]]:
    slices = Variables.slices(variables)
    return [(variable, slices[variable.name]) for variable in variables]


def _runs(positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split where positions are not consecutive; fields without time (−1) stay together."""
    if not len(positions):
        return []
    jumps = np.diff(positions) != (0 if positions[0] < 0 else 1)
    return np.split(positions, np.flatnonzero(jumps) + 1)


def _chunks(first: int, last: int, size: int, offset: int) -> range:
    """Return the numbers of the chunks that hold the levels from first to last."""
    return range((first + offset) // size, (last + offset) // size + 1)


def _spans_of_levels(levels: Sequence[int], chunk: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return [start, stop) of the levels to read such that no chunk between wanted levels is decoded, and none twice.

    `chunk` is the size of the chunks along levels and the offset in them; without it, all levels between are read.
    """
    ordered = sorted(set(levels))
    if chunk is None:
        return [(ordered[0], ordered[-1] + 1)]
    ends = [
        i
        for i, (a, b) in enumerate(itertools.pairwise(ordered), 1)
        if _chunks(b, b, *chunk)[0] - _chunks(a, a, *chunk)[0] > 1
    ]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in itertools.pairwise([0, *ends, len(ordered)])]


def _store(target: Fields, block: NDArray[Any], place: Place) -> None:
    """Convert units in the precision of the stored values, then round once to float32."""
    if place.factor != 1:
        block = block * place.factor
    np.copyto(target, block if place.offset == 0 else block + place.offset, casting="unsafe")


# --- opening ---------------------------------------------------------------------------------------------------------


def open_store(data: DataSection, variables: Variables) -> FieldStore:
    """Open the sources of an experiment and locate every variable, level and unit in them.

    No fields are read, except where a static variable has several times, which must be equal.

    Raises StoreError (a ValueError) that lists all problems together.
    """
    problems: Problems = []
    sources, datasets = _open_sources(data, variables, problems)
    absent = {i for i, dataset in enumerate(datasets) if not dataset.sizes}  # what cannot be opened, or is not needed
    by_path = {source.config.path: i for i, source in enumerate(sources) if i >= len(data.source)}
    places: dict[str, Place] = {}
    further: list[FurtherDimension] = []
    other_levels: list[OtherLevel] = []
    refused = Refused()
    for variable in variables:
        if variable.spec.compute:
            continue
        where = _spec_place(data, variable)
        among = [by_path[variable.spec.path]] if variable.spec.path in by_path else list(range(len(data.source)))
        try:
            if variable.spec.path is None or variable.spec.path in by_path:
                places[variable.name] = locate(variable, among, sources, datasets, refused)
        except FurtherDimension as error:
            further.append(error)
        except OtherLevel as error:
            error.place = ("data", "levels") if variable.spec.levels is None else where
            other_levels.append(error)
        except ValueError as error:
            if not absent.intersection(among):  # else it may be in the one that cannot be opened
                problems.append((where, str(error)))
    problems = [*merged_dimensions(further), *merged_levels(other_levels), *problems]
    of_grid = sorted({place.source for place in places.values()} | refused.sources)
    of_time = sorted(
        {place.source for place in places.values() if place.varies and not place.cyclic} | refused.sources_with_times
    )
    grid = common_grid(sources, datasets, of_grid, problems) if of_grid else None
    step = int(data.timestep.total_seconds())
    found = common_times(sources, datasets, of_time, step, problems) if of_time else None
    if not of_time and not problems:
        problems.append((("data", "source"), "expected a variable with times, got none"))
    partial = None
    if grid is not None and found is not None:
        times, positions = found
        _check_irradiance(data, variables, times, problems)
        placed = [replace(source, position=position) for source, position in zip(sources, positions, strict=True)]
        partial = FieldStore(variables, grid, times, step, placed, places, datasets)
    if problems or partial is None:
        raise StoreError(problems, partial)
    return partial


def _open_sources(data: DataSection, variables: Variables, problems: Problems) -> tuple[list[Source], list[xr.Dataset]]:
    """Open the listed sources that are needed, and one for every `path` of a variable."""
    own = [variable for variable in variables if not variable.spec.path and not variable.spec.compute]
    sources, datasets = [], []
    for i, config in enumerate(data.source):
        sources.append(Source(config, ("data", "source", i), _settings(data, i)))
        datasets.append(_try_open(sources[-1], problems) if own else xr.Dataset())
    like = next((i for i, config in enumerate(data.source) if "path" in type(config).model_fields), None)
    for path in dict.fromkeys(variable.spec.path for variable in variables if variable.spec.path):
        of_path = [variable for variable in variables if variable.spec.path == path]
        where = (*_spec_place(data, of_path[0]), "path")
        if like is None:
            problems.append((where, f"expected a source with files to read {path} like, got {data.source[0].type}"))
            continue
        options = data.source[like]
        is_of_files = isinstance(options, FileConfig)
        options = options.for_path(path) if is_of_files else options.model_copy(update={"path": path})
        sources.append(Source(options, where, _settings(data, like)))
        datasets.append(_try_open(sources[-1], problems))
    return sources, datasets


def _settings(data: DataSection, position: int) -> str:
    return f"data.source.{position}" if len(data.source) > 1 else "data.source"


def _try_open(source: Source, problems: Problems) -> xr.Dataset:
    """Open a source, and add to `problems` why it cannot be; one with repeated times is then opened without them."""
    try:
        return source.open()
    except RepeatedTimes as error:
        problems.append((source.place, str(error)))
        if source.config.duplicates == "first":
            return xr.Dataset()
        return _try_open(replace(source, config=source.config.model_copy(update={"duplicates": "first"})), problems)
    except ValueError as error:
        problems.append((source.place, str(error)))
        return xr.Dataset()


def _spec_place(data: DataSection, variable: Variable) -> tuple[str | int, ...]:
    """Return the place in the experiment where a variable is specified."""
    for role in ROLES:
        for kind in ("level", "surface"):
            for i, spec in enumerate(getattr(getattr(data, role), kind)):
                if spec.name == variable.name:
                    return ("data", role, kind, i)
    raise AssertionError(variable.name)
