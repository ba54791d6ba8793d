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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from pydantic import BaseModel

from credit_like import registry
from credit_like.data import aliases, solar, units
from credit_like.data.files.direct import chunk_along, direct
from credit_like.data.files.remote import RemoteError
from credit_like.data.sources._conventions import DIFFERS, DIMS, PERIOD, RepeatedTimes, listed, own_name, same_circle
from credit_like.data.sources._files import FileConfig
from credit_like.data.times import Times, calendar_of, from_seconds, nearest_in_year, parse, seconds, to_text
from credit_like.errors import RunError, UserError
from credit_like.grid import Grid, turn
from credit_like.schema.base import format_duration
from credit_like.schema.data import DataSection, Periods
from credit_like.variables import ROLES, Variable, Variables

Fields = NDArray[np.float32]
Out = Sequence[Fields] | Fields
Part = tuple[slice, slice]  # rows and columns
"""One array (C, H, W) for each time."""
Problems = list[tuple[tuple[str | int, ...], str]]
_ATTRS = ("units", "long_name", "standard_name", "cell_methods", "positive")
ORIGIN = "credit_like_origin"
"""Attribute of a copy or a mean of a variable: what `FieldStore.origin` says of the data from which it was made."""
_ACCESS = {"cache", "storage_options", "statistics"}
"""Keys of a source that do not change the values that are read."""
_SOLAR_ATTRS = {
    "units": "J m-2",
    "long_name": "insolation at the top of the atmosphere, accumulated over the step that ends at the time",
    "standard_name": "integral_wrt_time_of_toa_incoming_shortwave_flux",
}
_READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError, IndexError, TypeError)
_YEAR = 366 * 86400  # s
_COMPARED = 20  # times at which fields that are called static are compared
_TRIES, _PAUSE = 3, 0.2  # number of attempts to read from an unreliable disk or server, and the pause between them in s
_LOG = logging.getLogger(__name__)


class StoreError(UserError):
    """The files do not contain what the experiment requires: `problems` as (place in the experiment, message).

    `partial` is a store of what was found, with a grid and times, for the checks that need nothing else; None where the
    files do not tell.
    """

    def __init__(
        self, problems: Sequence[tuple[tuple[str | int, ...], str]], partial: FieldStore | None = None
    ) -> None:
        self.problems, self.partial = tuple(problems), partial
        super().__init__("\n".join(f"{'.'.join(map(str, place))}: {message}" for place, message in self.problems))


class ReadError(RunError):
    """A read failed after the files had been opened; the message names the variable, time, file and cause."""


IN_MEMORY = "the data set given"


@dataclass(frozen=True)
class InMemory:
    """A dataset in memory, in place of a configured source; messages name it by its `type`."""

    dataset: xr.Dataset
    type: str = IN_MEMORY
    model_fields: ClassVar[dict[str, Any]] = {}


@dataclass(frozen=True)
class _Source:
    """A configured source; `position` maps the store's times to the source's own, None if they are the same."""

    config: Any
    place: tuple[str | int, ...]
    """Where the experiment describes it: an entry of `data.source`, or the `path` of a variable."""
    settings: str
    """Key of the entry of `data.source` with its settings, as messages spell it."""
    position: NDArray[np.int64] | None = None

    @property
    def where(self) -> str:
        return self.paths[0] if len(self.paths) == 1 else self.config.type

    @property
    def paths(self) -> list[str]:
        """Return the configured paths; none of data that are not in files."""
        path = getattr(self.config, "path", "")
        return [path] if isinstance(path, str) and path else list(path)

    def open(self) -> xr.Dataset:
        """Open all variables of the source lazily. Raises UserError that lists the available names if one is absent."""
        if isinstance(self.config, InMemory):
            return self.config.dataset
        try:
            dataset: xr.Dataset = registry.of("source", self.config).open_dataset(self.config)
        except UserError as error:
            error.args = (self._spelled(str(error)),)
            raise
        return dataset

    def _spelled(self, message: str) -> str:
        """Return a message of a source, which does not know its place in the experiment, with this one's keys."""
        if self.place[:2] != ("data", "source"):
            message = message.replace("data.source.path", ".".join(map(str, self.place)))
        return message.replace("data.source.", f"{self.settings}.")


@dataclass(frozen=True)
class _Place:
    """Location of the values of one variable; target = factor · stored + offset."""

    source: int
    var: str
    dims: tuple[str, ...]
    levels: tuple[int, ...]
    factor: float
    offset: float
    attrs: dict[str, str]
    cyclic: bool = False
    still: int | None = None
    """For a static field, the position on its time axis, if it has one, of the time that is read."""
    level_attrs: dict[str, str] = field(default_factory=dict)
    sum_over: int | None = None
    """Seconds over which the values are sums, by what the files declare: 0 = the spacing of the files, None = no sums."""
    valid: tuple[float, float] = (-np.inf, np.inf)
    """The lowest and the highest value that the files call valid."""
    copy_of: str = ""
    """Of a store that `preprocess --rechunk` wrote, the origin of the data that were copied."""

    @property
    def varies(self) -> bool:
        """Return whether the field depends on time."""
        return "time" in self.dims and self.still is None


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
        sources: Sequence[_Source],
        places: dict[str, _Place],
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
        """Return this store with its rows and columns in another order, in which they are those of `grid`.

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
        """Return what `other_sums` are, empty where there are none."""
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

    def _sum_over(self, place: _Place) -> int:
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

    def reaches_over(self, periods: Periods, lacking: float = 0.25) -> bool:
        """Return whether there are data from the start of the periods to their end, but for this part of them at either end."""
        positions = self.period(periods)
        first, last = parse(periods[0].start, self.calendar), parse(periods[-1].end, self.calendar)
        margin = lacking * (last - first)
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

    def _source_positions(self, place: _Place, positions: NDArray[np.int64]) -> NDArray[np.int64]:
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
        self, variable: Variable, place: _Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields]
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

    def _culprit(self, place: _Place, run: NDArray[np.int64], part: Part) -> NDArray[np.int64]:
        """Return the first of several times that cannot be read on its own, or the first of all if each can be read."""
        for position in run:
            try:
                self._load_once(place, np.array([position]), part)
            except _READ_ERRORS:
                return np.array([position])
        return run

    def _load_once(
        self, place: _Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields] | None = None
    ) -> None:
        """Read the values, and fill the targets if there are any."""
        stored = self._dataset(place.source).variables[place.var]
        if targets is not None and self._load_in_place(stored, place, run, part, targets):
            return
        block_TCHW = self._block(stored, place, run, part)
        for block_CHW, target in zip(block_TCHW, targets or (), strict=False):
            _store(target, block_CHW, place)

    def _load_in_place(
        self, stored: xr.Variable, place: _Place, run: NDArray[np.int64], part: Part, targets: Sequence[Fields]
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

    def _block(self, stored: xr.Variable, place: _Place, run: NDArray[np.int64], part: Part) -> NDArray[Any]:
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

    def _story(self, variable: Variable, place: _Place, run: NDArray[np.int64], error: Exception) -> str:
        source = self._sources[place.source]
        at = f" at source time {run[0]}" if run[0] >= 0 else ""
        if run[0] >= 0 and not place.cyclic:
            first = run[0] if source.position is None else int(np.searchsorted(source.position, run[0]))
            at = f" at {to_text(self.times[min(int(first), len(self.times) - 1)])}"
        name = variable.name if place.var == variable.name else f"{variable.name} ({place.var})"
        return f"cannot read {name}{at} from {source.where}: {type(error).__name__}: {error}"

    def _dataset(self, source: int) -> xr.Dataset:
        if self._pid != os.getpid():
            self._datasets, self._pool, self._pid = {}, None, os.getpid()
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
        if self._pid != os.getpid():
            self._datasets, self._pool, self._pid = {}, None, os.getpid()
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


def _store(target: Fields, block: NDArray[Any], place: _Place) -> None:
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
    places: dict[str, _Place] = {}
    further: list[_FurtherDimension] = []
    other_levels: list[_OtherLevel] = []
    refused = _Refused()
    for variable in variables:
        if variable.spec.compute:
            continue
        where = _spec_place(data, variable)
        among = [by_path[variable.spec.path]] if variable.spec.path in by_path else list(range(len(data.source)))
        try:
            if variable.spec.path is None or variable.spec.path in by_path:
                places[variable.name] = _find(variable, among, sources, datasets, refused)
        except _FurtherDimension as error:
            further.append(error)
        except _OtherLevel as error:
            error.place = ("data", "levels") if variable.spec.levels is None else where
            other_levels.append(error)
        except ValueError as error:
            if not absent.intersection(among):  # else it may be in the one that cannot be opened
                problems.append((where, str(error)))
    problems = [*_merged_problems(further), *_merged_levels(other_levels), *problems]
    of_grid = sorted({place.source for place in places.values()} | refused.sources)
    of_time = sorted(
        {place.source for place in places.values() if place.varies and not place.cyclic} | refused.sources_with_times
    )
    grid = _common_grid(sources, datasets, of_grid, problems) if of_grid else None
    step = int(data.timestep.total_seconds())
    found = _common_times(sources, datasets, of_time, step, problems) if of_time else None
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


def _open_sources(
    data: DataSection, variables: Variables, problems: Problems
) -> tuple[list[_Source], list[xr.Dataset]]:
    """Open the listed sources that are needed, and one for every `path` of a variable."""
    own = [variable for variable in variables if not variable.spec.path and not variable.spec.compute]
    sources, datasets = [], []
    for i, config in enumerate(data.source):
        sources.append(_Source(config, ("data", "source", i), _settings(data, i)))
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
        sources.append(_Source(options, where, _settings(data, like)))
        datasets.append(_try_open(sources[-1], problems))
    return sources, datasets


def _settings(data: DataSection, position: int) -> str:
    return f"data.source.{position}" if len(data.source) > 1 else "data.source"


def _try_open(source: _Source, problems: Problems) -> xr.Dataset:
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


@dataclass
class _Refused:
    """The sources of variables that exist but do not fit the experiment."""

    sources: set[int] = field(default_factory=set)
    sources_with_times: set[int] = field(default_factory=set)

    def add(self, variable: Variable, source: int, dataset: xr.Dataset, stored: xr.DataArray) -> None:
        """Keep the source if its grid, and its times, are those of other variables too."""
        if {"latitude", "longitude"} <= set(stored.dims):
            self.sources.add(source)
            if variable.role != "static" and variable.spec.fill != "cyclic" and "time" in stored.dims:
                self.sources_with_times |= {source} if "time" in dataset.coords else set()


def _find(
    variable: Variable,
    among: Sequence[int],
    sources: Sequence[_Source],
    datasets: Sequence[xr.Dataset],
    refused: _Refused,
) -> _Place:
    """Find a variable in the first source that has it. Raises UserError that lists the available names.

    The source of a variable that is there but does not suit is added to `refused`.
    """
    var = variable.spec.var or variable.name
    available = [str(name) for i in among for name in datasets[i].data_vars]
    others: list[str] = []
    for i in among:
        names = [str(name) for name in datasets[i].data_vars]
        found = var if var in names else (None if variable.spec.var else aliases.find(var, names))
        if found is None:
            continue
        if found != var and (told := aliases.other_quantity(var, datasets[i][found].attrs)):
            others.append(f"{found} of {sources[i].where}, which is {told!r}")
            refused.add(variable, i, datasets[i], datasets[i][found])
            continue
        if found != var:
            _LOG.info("%s is read from %s, which is its name in %s", variable.name, found, sources[i].where)
        try:
            return _place(variable, i, found, datasets[i], sources[i])
        except UserError:
            refused.add(variable, i, datasets[i], datasets[i][found])
            raise
    if others:
        raise UserError(
            f"expected {var}, got {', '.join(others)}; write {var} into the files, or name the variable to read instead: "
            f"{{name: {variable.name}, var: …}}"
        )
    known = sorted(set(available))
    where = ", ".join(dict.fromkeys(sources[i].where for i in among))
    hint = registry.did_you_mean(var, known)
    raise UserError(f"expected a variable of {where} ({', '.join(known)}), got {var!r}{hint}")


def _place(variable: Variable, number: int, var: str, dataset: xr.Dataset, source: _Source) -> _Place:
    stored, where = dataset[var], source.where
    dims = tuple(map(str, stored.dims))
    if missing := {"latitude", "longitude"} - set(dims):
        raise UserError(
            f"expected {var} of {where} on latitude and longitude, got dimensions {dims} without {sorted(missing)[0]}"
        )
    if other := sorted(set(dims) - set(DIMS)):
        raise _FurtherDimension(dataset, var, other[0], source)
    if files := stored.attrs.get(DIFFERS):
        raise UserError(
            f"expected {var}, which has no time, to be the same in all files of {where}, got different fields in {files}; give "
            "the variable the `path` of one file, or write a time axis into the files"
        )
    still = (_constant(stored, var) if stored.sizes.get("time", 1) > 1 else 0) if variable.role == "static" else None
    if variable.role != "static" and "time" not in dims:
        raise UserError(f"expected {var} of {where} on time, got dimensions {dims}; move it to static")
    if "time" in dims and "time" not in dataset.coords and variable.role != "static":
        raise UserError(
            f"expected times of {var} in {where}, got a time dimension without a coordinate; name it in "
            f"{source.settings}.dims.time"
        )
    if stored.dtype.kind not in "iufb":
        raise UserError(f"expected real numbers in {var} of {where}, got {stored.dtype}; make the store anew")
    attrs = {key: str(stored.attrs[key]) for key in _ATTRS if key in stored.attrs}
    if "long_name" not in attrs and "description" in stored.attrs:  # its name in WRF
        attrs["long_name"] = str(stored.attrs["description"])
    factor, offset = 1.0, 0.0
    if variable.spec.units and "units" in attrs:
        factor, offset = units.conversion(attrs["units"], variable.spec.units)
    attrs.update({"units": variable.spec.units} if variable.spec.units else {})
    levels = _levels(variable, var, dims, dataset, where)
    cyclic = variable.spec.fill == "cyclic"
    if cyclic:
        _refuse_several_years(stored, dataset["time"].values, var, where)
    of_level = dataset["level"].attrs if "level" in dataset.coords else {}
    level_attrs = {key: str(of_level[key]) for key in _ATTRS if key in of_level}
    over = _sum_over(var, stored.attrs, where, source.settings)
    copy_of = str(stored.attrs.get(ORIGIN, ""))
    valid = _valid_range(stored.attrs, factor, offset)
    return _Place(number, var, dims, levels, factor, offset, attrs, cyclic, still, level_attrs, over, valid, copy_of)


def _valid_range(attrs: Mapping[Any, Any], factor: float, offset: float) -> tuple[float, float]:
    """Return the valid range of CF's attributes in converted values; without limits where they do not say it in numbers."""
    limits = (attrs.get("valid_min", -np.inf), attrs.get("valid_max", np.inf))
    try:
        low, high = np.asarray(attrs.get("valid_range", limits), np.float64)
    except (TypeError, ValueError):
        return -np.inf, np.inf
    return factor * float(low) + offset, factor * float(high) + offset


def _refuse_several_years(stored: xr.DataArray, times: Times, var: str, where: str) -> None:
    """Raise UserError for different years, of which the first would be repeated instead of the mean.

    A year that is continued at its ends, or repeated along the axis of other data as in a copy of such data, is one year. Two
    fields after the first year tell whether it is repeated.
    """
    after = np.flatnonzero(seconds(times) - seconds(times[:1]) > _YEAR)
    if not len(after):
        return
    later = after[[0, -1]]
    first = nearest_in_year(times, times[later])
    again = [(int(a), int(b)) for a, b in zip(first, later, strict=True) if a != b]
    if not again or not all(
        np.array_equal(stored.isel(time=a).values, stored.isel(time=b).values, equal_nan=True) for a, b in again
    ):
        raise UserError(
            f"expected one climatological year of {var} in {where}, got {to_text(times[0])} to {to_text(times[-1])}; make a mean "
            "year, give its file as `path`, or use fill: persist"
        )


def _sum_over(var: str, attrs: Mapping[Any, Any], where: str, settings: str) -> int | None:
    """Return the seconds over which a variable is a sum: 0 where its files do not say this, None for one that is no sum.

    Raises UserError for sums over several periods in one variable.
    """
    if not _is_sum(var, attrs):
        return None
    periods = str(attrs.get(PERIOD, "")).split()
    if len(periods) > 1:
        raise UserError(
            f"expected {var} of {where} over one period, got {', '.join(periods)} h; read it from a source of its own with "
            f"{settings}.select.period: {periods[0]}"
        )
    return round(3600 * float(periods[0])) if periods else 0


def _is_sum(var: str, attrs: Mapping[Any, Any]) -> bool:
    """Return whether attributes, or the unit of precipitation or of a flux, say that a variable is a sum over time."""
    if "time: point" in str(attrs.get("cell_methods", "")) or "instant" in (
        attrs.get("GRIB_stepType"),
        attrs.get("stepType"),
    ):
        return False
    unit = "".join(str(attrs.get("units", "")).replace("**", "").split())
    return (
        PERIOD in attrs
        or "time: sum" in str(attrs.get("cell_methods", ""))
        or "accum" in (attrs.get("GRIB_stepType"), attrs.get("stepType"))
        # The energy of a column of air has the unit of a sum of fluxes.
        or (
            unit in ("Jm-2", "J/m2", "Jm^-2")
            and "vertical_integral" not in f"{var} {attrs.get('long_name', '')}".lower().replace(" ", "_")
        )
        or (aliases.find("total_precipitation", [var]) is not None and unit in ("m", "mm", "kgm-2"))
    )


class _FurtherDimension(UserError):
    """A variable has a dimension of which the experiment does not select a value."""

    def __init__(self, dataset: xr.Dataset, var: str, dim: str, source: _Source) -> None:
        self.var, self.key, self.place = var, (source.where, dim), source.place
        first = dataset[dim].values[0] if dim in dataset.variables else 0
        name = own_name(dim)
        self.got = (
            f"of {source.where} on time, level, latitude, longitude, got dimension {name!r} ({listed(dataset, dim)}); set "
            f"{source.settings}.select: {{{name}: {first}}} to read one, or name it in {source.settings}.dims"
        )
        super().__init__(f"expected {var} {self.got}")


def _merged_problems(found: Sequence[_FurtherDimension]) -> Problems:
    """Return one problem for each dimension of a source, with all the variables that have it."""
    by_key: dict[tuple[str, str], list[_FurtherDimension]] = {}
    for problem in found:
        by_key.setdefault(problem.key, []).append(problem)
    return [
        (group[0].place, f"expected {', '.join(dict.fromkeys(one.var for one in group))} {group[0].got}")
        for group in by_key.values()
    ]


class _OtherLevel(UserError):
    """A variable does not have a level of the experiment."""

    def __init__(self, var: str, where: str, there: NDArray[Any], wanted: Sequence[float]) -> None:
        self.var = var
        self.place: tuple[str | int, ...] = ()
        known = ", ".join(f"{value:g}" for value in there)
        absent = [level for level in wanted if not np.isclose(there, level, rtol=1e-6, atol=0).any()]
        near = [there[np.argmin(np.abs(there - level))] for level in absent]
        line = ""
        for factor in (100.0, 0.01):  # Pa in the file and hPa in the experiment, or the reverse
            if all(np.isclose(there, level * factor, rtol=1e-6, atol=0).any() for level in wanted):
                near = [level * factor for level in absent]
                line = f"; change it to levels: [{', '.join(f'{level * factor:g}' for level in wanted)}]"
        got, cure = (", ".join(f"{level:g}" for level in values) for values in (absent, near))
        # Neighbours that are far, or the same for two levels, are no guess at what was meant.
        close = len(set(near)) == len(near) and all(
            0.5 < level / one < 2 for level, one in zip(near, absent, strict=True)
        )
        self.got = f"in {where} ({known}), got {got}" + (
            f"; did you mean {cure}?{line}" if line or close else "; change it"
        )
        super().__init__(f"expected levels of {var} {self.got}")


def _merged_levels(found: Sequence[_OtherLevel]) -> Problems:
    """Return one problem for the same levels of several variables."""
    by_key: dict[tuple[tuple[str | int, ...], str], list[str]] = {}
    for problem in found:
        by_key.setdefault((problem.place, problem.got), []).append(problem.var)
    return [
        (where, f"expected levels of {', '.join(dict.fromkeys(names))} {got}") for (where, got), names in by_key.items()
    ]


def _constant(stored: xr.DataArray, var: str) -> int:
    """Return the position of a time at which a static field with a time axis has data, as those of CAM and WRF do at all.

    Archives may have an axis that begins before their data and ends after them. Raises UserError if the fields at some times,
    spread over the axis, that have data differ.
    """
    times, is_float = stored.sizes["time"], stored.dtype.kind == "f"
    first, field = 0, None
    for t in sorted({0, times // 2, *np.linspace(0, times - 1, _COMPARED).astype(int).tolist()}):
        other = stored.isel(time=t).values
        if is_float and not np.isfinite(other).any():
            continue
        if field is None:
            first, field = t, other
        elif not np.array_equal(field, other, equal_nan=is_float):
            raise UserError(f"expected a static field, got {times} times of {var}; move it to dynamic_forcing")
    return first


def _levels(variable: Variable, var: str, dims: tuple[str, ...], dataset: xr.Dataset, where: str) -> tuple[int, ...]:
    """Return the positions of the wanted levels on the level axis of the file."""
    wanted = variable.levels
    if "level" not in dims:
        if wanted:
            raise UserError(f"expected {var} of {where} on levels, got dimensions {dims}; move it to `surface`")
        return ()
    there = dataset["level"].values if "level" in dataset.coords else np.arange(1, dataset.sizes["level"] + 1)
    if not wanted:
        if variable.spec.levels and len(variable.spec.levels) == 1:
            wanted = variable.spec.levels  # a surface field that is stored as one level of the file
        elif len(there) == 1:
            return (0,)
        else:
            raise UserError(
                f"expected {var} of {where} without levels, got {len(there)}; "
                "move it to `level` or give one in `levels`"
            )
    matches = [np.flatnonzero(np.isclose(there, level, rtol=1e-6, atol=0)) for level in wanted]
    if not all(map(len, matches)):
        raise _OtherLevel(var, where, there, wanted)
    return tuple(int(match[0]) for match in matches)


def _common_grid(
    sources: Sequence[_Source], datasets: Sequence[xr.Dataset], used: Sequence[int], problems: Problems
) -> Grid | None:
    """Return the grid of the first of the `used` sources that has one.

    Sources without a grid, or with another one, are added to `problems`.
    """
    grids = {}
    for i in used:
        try:
            grid = Grid(*(datasets[i][name].values.astype(np.float64) for name in ("latitude", "longitude")))
            _refuse_uneven_columns(grid.longitude)
            grids[i] = grid
        except UserError as error:
            problems.append((sources[i].place, f"{sources[i].where}: {error}"))
    if not grids:
        return None
    reference, first = next(iter(grids.items()))
    for i, grid in grids.items():
        for name in ("latitude", "longitude"):
            mine, theirs = getattr(grid, name), getattr(first, name)
            if mine.shape != theirs.shape or not np.allclose(mine, theirs, atol=1e-4):
                told = _other_grid(name, sources[i].where, sources[reference].where, mine, theirs)
                problems.append((sources[i].place, told))
                break
    return first


def _refuse_uneven_columns(longitude: NDArray[np.float64]) -> None:
    """Raise UserError for longitudes that are not evenly spaced: means over an area weight the rows of a grid alone."""
    steps = turn(np.diff(longitude))
    if len(steps) > 1 and not np.allclose(steps, np.median(steps), rtol=0.02):
        raise UserError(
            f"expected longitudes at even spacing, got steps from {steps.min():g} to {steps.max():g} degrees; regrid the files, "
            "for example with `regrid` of the source"
        )


def _other_grid(name: str, where: str, other: str, mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> str:
    told = [f"{len(values)} from {values[0]:g} to {values[-1]:g}" for values in (theirs, mine)]
    cure = "bring the sources to one grid"
    if name == "longitude" and same_circle(mine, theirs):
        cure = "set region: {west: 0, east: 360} in both sources"
    return f"expected the {name}s of {other} ({told[0]}) in {where}, got {told[1]}; {cure}"


def _common_times(
    sources: Sequence[_Source], datasets: Sequence[xr.Dataset], used: Sequence[int], step: int, problems: Problems
) -> tuple[Times, list[NDArray[np.int64] | None]] | None:
    """Return the times that the `used` sources share, thinned to the step, and their positions in each source.

    Adds to `problems` what keeps the sources from having one time axis; returns None where there is none.
    """
    axes = {i: datasets[i]["time"].values for i in used}
    for i in [i for i, axis in axes.items() if not len(axis)]:
        problems.append((sources[i].place, f"expected times in {sources[i].where}, got an empty time axis"))
        del axes[i]
    if not axes:
        return None
    first = next(iter(axes))
    calendar = calendar_of(axes[first])
    since: dict[int, NDArray[np.int64]] = {}
    for i, axis in axes.items():
        if calendar_of(axis) != calendar:
            other = f"{calendar_of(axis)} in {sources[i].where}"
            told = f"expected one calendar, got {calendar} in {sources[first].where} and {other}"
            problems.append((sources[i].place, told))
            continue
        since[i] = seconds(axis)
        back = np.flatnonzero(np.diff(since[i]) <= 0)
        if len(back):
            what = "twice" if since[i][back[0] + 1] == since[i][back[0]] else "out of order"
            told = f"expected increasing times in {sources[i].where}, got {to_text(axis[back[0] + 1])} {what}"
            problems.append((sources[i].place, told))
            since[i] = np.unique(since[i])
    common = since[first]
    for axis in since.values():
        common = np.intersect1d(common, axis, assume_unique=True)
    if not len(common):
        spans = "; ".join(f"{sources[i].where}: {to_text(axes[i][0])} to {to_text(axes[i][-1])}" for i in since)
        problems.append((("data", "source"), f"expected times that all sources share, got none ({spans})"))
        return None
    try:
        common = _thin(common, step, sources[first].where)
    except StoreError as error:
        problems.extend(error.problems)
        return None
    positions: list[NDArray[np.int64] | None] = []
    for i in range(len(sources)):
        same = i not in since or (len(common) == len(since[i]) and bool(np.all(common == since[i])))
        positions.append(None if same else np.searchsorted(since[i], common))
    return from_seconds(common, calendar), positions


def _thin(axis: NDArray[np.int64], step: int, where: str) -> NDArray[np.int64]:
    """Return times that are whole steps apart: from midnight of the first day if it has any, else from the first time."""
    if len(axis) == 1:
        return axis
    spacing = int(np.diff(axis).min())
    if spacing == step:
        return axis
    if step % spacing:
        hours = f"{spacing / 3600:g} h"
        got = f"{step / 3600:g} h"
        told = f"expected a multiple of {hours}, the spacing of the times in {where}, got {got}; change data.timestep"
        raise StoreError([(("data", "timestep"), told)])
    midnight = axis[0] - axis[0] % 86400
    kept = axis[(axis - midnight) % step == 0]
    return kept if len(kept) else axis[(axis - axis[0]) % step == 0]
