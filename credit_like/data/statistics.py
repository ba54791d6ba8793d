"""Mean, standard deviation, standard deviation of the change, and missing data of every channel, in one pass.

Moments are stored as count, mean and sum of squared deviations in float64 and merged exactly (Chan, Golub and LeVeque
1983, doi:10.1080/00031305.1983.10483115), so that the result depends on neither block size nor order beyond rounding.
Every grid point has the same weight, regardless of its area. Points without data do not count.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import credit_like
from credit_like import transforms
from credit_like.data import units
from credit_like.data.files import netcdf_files
from credit_like.data.store import Fields, FieldStore
from credit_like.data.times import parse, to_text
from credit_like.errors import UserError, reading
from credit_like.grid import turn
from credit_like.naming import counted
from credit_like.outputs import replacing, sync
from credit_like.registry import did_you_mean
from credit_like.schema.data import DataSection, Periods
from credit_like.variables import Variable, Variables

Progress = Callable[[int, int], None]
"""Called with (times done, total times)."""
_DIMENSIONS = {
    "channel": ("channel",),
    "mean": ("channel",),
    "std": ("channel",),
    "change_std": ("channel",),
    "valid": ("channel", "latitude", "longitude"),
    "missing_time": ("missing",),
}
_BLOCK_BYTES = 64 * 2**20
_FITTED_AT_START = 16e9
"""Bytes of fields that one process reads within a minute or two; trainer.timeout is ten minutes by default."""
MOST = 1e20
"""No physical quantity has larger values in the units of data; those that mark missing points do, also in a mean with others."""
_FIT_AGAIN = "fit them again with `credit-like preprocess`, or undo the change where the run has checkpoints"
"""The weights of a run go with its statistics."""
_LOG = logging.getLogger(__name__)


class Statistics:
    """One dataset over dimension `channel`, all roles in the order of `Variables`.

    `mean`, `std`, `change_std` (channel) are float64 in the data's units; `change_std` is NaN for static channels and
    if no two times are consecutive. `valid` (channel, latitude, longitude) marks the points that ever have data;
    `transform` (channel) names the functions of which they are the statistics, if there are any; it is absent otherwise.
    `units` (channel) are those of the data, as far as these declare them; files of earlier releases lack it.
    `missing_time` (missing) lists the times at which one of these points lacks data, and `missing_position` the
    positions of these times in the store.
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self.dataset = dataset
        self._at = {str(name): i for i, name in enumerate(dataset["channel"].values)}

    def select(
        self, variables: Sequence[Variable]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return (mean, std, change_std), each (C,) float64. Raises UserError for a channel that does not exist."""
        at = self._positions(variables)
        self._check_transforms(variables, at)
        mean, std, change_std = (self.dataset[name].values[at] for name in ("mean", "std", "change_std"))
        return mean, std, change_std

    def mask(self, variables: Sequence[Variable]) -> NDArray[np.bool_]:
        """Return (C, H, W), True at a point that has data."""
        at = self._positions(variables)
        if not at:
            return np.ones((0, *self.dataset["valid"].shape[1:]), bool)
        return np.stack([self.dataset["valid"].values[i] for i in at]).astype(bool)

    @property
    def missing_times(self) -> set[int]:
        """Return the positions on the store's time axis that no window may contain."""
        return set(self.dataset["missing_position"].values.tolist())

    def missing(self) -> list[tuple[str, str]]:
        """Return (time, channels) of every missing or incomplete field."""
        times, what = self.dataset["missing_time"].values, self.dataset["missing_channels"].values
        return list(zip(map(str, times), map(str, what), strict=True))

    def _check_transforms(self, variables: Sequence[Variable], at: Sequence[int]) -> None:
        """Raise UserError where the statistics are not those of the values that the experiment transforms."""
        stored = (
            self.dataset["transform"].values if "transform" in self.dataset else [""] * self.dataset.sizes["channel"]
        )
        for name, i, wanted in zip(Variables.channel_names(variables), at, transforms.names(variables), strict=True):
            if str(stored[i]) != wanted:
                raise UserError(
                    f"expected statistics of {name} with the transform {wanted or 'none'!r}, got {str(stored[i]) or 'none'!r}; "
                    f"{_FIT_AGAIN}"
                )

    def refuse_other_data(
        self, store: FieldStore, variables: Variables, data: DataSection, path: str | Path, is_used: bool
    ) -> None:
        """Raise UserError where these are not statistics of the data that an experiment reads.

        `is_used`: by weights of the run, which go with them whatever its time step and training period are now. Only units are
        compared then, and where the experiment names the file. A file that does not state something is taken as it is.
        """
        cure = "run `credit-like preprocess` again, or remove the file"
        if data.statistics is not None:
            cure = "run `credit-like preprocess` again, or name another file in data.statistics"
        elif is_used:
            cure = "undo the change, or set another save_loc"
        for name, was, now in self._other_units(store, variables):
            raise UserError(f"expected statistics of {name} in {now!r}, got those in {was!r} in {path}; {cure}")
        attrs = self.dataset.attrs
        if is_used or data.statistics is not None:
            return
        for what, key, now in (
            ("the training period", "training_period", _text_of(data.train)),
            ("the time step", "timestep", str(data.timestep)),
        ):
            if (was := str(attrs.get(key, now))) != now:
                raise UserError(f"expected statistics of {what} {now}, got those of {was} in {path}; {cure}")

    def _other_units(self, store: FieldStore, variables: Variables) -> Iterator[tuple[str, str, str]]:
        """Yield a channel, the units of its statistics and those of the data, where these are known to differ."""
        if "units" not in self.dataset:
            return
        for variable in variables:
            now = store.attrs(variable).get("units", "")
            for name in variable.channels:
                was = str(self.dataset["units"].values[self._at[name]]) if name in self._at else ""
                if units.same(was, now) is False:
                    yield name, was, now

    def _positions(self, variables: Sequence[Variable]) -> list[int]:
        wanted = Variables.channel_names(variables)
        if absent := [name for name in wanted if name not in self._at]:
            known = list(self._at)
            raise UserError(
                f"expected statistics of {absent[0]!r}, got those of {', '.join(known)}"
                f"{did_you_mean(absent[0], known)}; "
                f"{_FIT_AGAIN}"
            )
        return [self._at[name] for name in wanted]

    def save(self, path: str | Path) -> None:
        """Save as netCDF under a temporary name, then rename, so that readers never see an incomplete file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding = {"valid": {"zlib": True, "dtype": "i1"}}
        with replacing(path) as draft:
            netcdf_files.save(self.dataset.assign(valid=self.dataset["valid"].astype("i1")), draft, encoding)
            sync(draft)

    @classmethod
    def is_file(cls, path: str | Path) -> bool:
        """Return whether a file contains statistics, of any variables and grid."""
        try:
            cls.load(path)
        except UserError:
            return False
        return True

    @classmethod
    def load(cls, path: str | Path, store: FieldStore | None = None) -> Statistics:
        """Load from netCDF; with a `store`, locate missing times on its time axis, which may have changed.

        Raises UserError if the file does not hold statistics or their grid differs from the store's.
        """
        with reading("a netCDF file with statistics", path, "remove it to fit the statistics again"):
            dataset = netcdf_files.load(path, decode_times=False)
        for name, dims in _DIMENSIONS.items():
            if name not in dataset.variables or dataset[name].dims != dims:
                got = "none" if name not in dataset.variables else ", ".join(map(str, dataset[name].dims))
                raise UserError(
                    f"expected statistics in {path} with {name} ({', '.join(dims)}), got {got}; fit them again"
                )
        if store is not None:
            _check_grid(dataset, store, path)
            since = np.array([parse(str(t), store.calendar) for t in dataset["missing_time"].values], np.int64)
            there = np.isin(since, store.seconds)
            dataset = dataset.isel(missing=np.flatnonzero(there))
            dataset["missing_position"] = ("missing", np.searchsorted(store.seconds, since[there]))
        return cls(dataset)


def _check_grid(dataset: xr.Dataset, store: FieldStore, path: str | Path) -> None:
    """Raise UserError unless the points of `valid` are the store's, to a thousandth of a degree and whole circles."""
    for axis, wanted in (("latitude", store.grid.latitude), ("longitude", store.grid.longitude)):
        there = dataset[axis].values
        same = there.shape == wanted.shape
        if same:
            apart = turn(there - wanted) if axis == "longitude" else there - wanted
            same = bool(np.abs(apart).max() <= 1e-3)
        if not same:
            raise UserError(
                f"expected statistics of the data's {len(wanted)} {axis}s from {wanted[0]:g} to {wanted[-1]:g}, got "
                f"{len(there)} from {there[0]:g} to {there[-1]:g} in {path}; {_FIT_AGAIN}"
            )


@dataclass
class Moments:
    """Count, mean and sum of squared deviations per channel, each (C,)."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def zero(cls, channels: int) -> Moments:
        return cls(np.zeros(channels), np.zeros(channels), np.zeros(channels))

    def merge(self, other: Moments) -> Moments:
        """Combine two samples."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        apart = other.mean - self.mean
        return Moments(count, self.mean + apart * share, self.squares + other.squares + apart**2 * self.count * share)

    @property
    def std(self) -> NDArray[np.float64]:
        """Return the standard deviation of the population; NaN without data."""
        with np.errstate(invalid="ignore"):
            return np.sqrt(np.divide(self.squares, self.count))

    def add(self, channel: int, count: int, mean: float, squares: float) -> None:
        """Merge the moments of a part of one channel."""
        if count:
            share = count / (self.count[channel] + count)
            apart = mean - self.mean[channel]
            self.squares[channel] += squares + apart**2 * self.count[channel] * share
            self.mean[channel] += apart * share
            self.count[channel] += count


def moments_of(values: NDArray[np.floating]) -> tuple[int, float, float]:
    """Return count, mean and sum of squared deviations of the values that are not missing, in float64."""
    plane = _Plane.of(values, np.empty(values.size))
    return plane.count, plane.mean, plane.squares(np.empty(values.size))


@dataclass
class _Plane:
    """A field minus its own mean in float64, flattened; NaN at missing points."""

    count: int
    mean: float
    apart: NDArray[np.float64]

    @classmethod
    def of(cls, values: NDArray[np.floating], apart: NDArray[np.float64]) -> _Plane:
        """Compute the moments; `apart` is scratch memory to reuse, since page faults take as long as the sums."""
        np.copyto(apart, values.reshape(-1))
        count, total = apart.size, apart.sum()
        if not np.isfinite(total):
            there = np.isfinite(apart)
            count, total = int(there.sum()), apart[there].sum()
            apart[~there] = np.nan
        mean = float(total / count) if count else 0.0
        apart -= mean
        return cls(count, mean, apart)

    def squares(self, scratch: NDArray[np.float64]) -> float:
        """Return the sum of squared deviations, by pairwise summation."""
        np.multiply(self.apart, self.apart, out=scratch)
        return float(scratch.sum() if self.count == scratch.size else np.nansum(scratch))

    def change(self, before: _Plane, scratch: NDArray[np.float64]) -> tuple[int, float, float]:
        """Return the moments of the change since the previous plane, over the points with data at both times."""
        np.subtract(self.apart, before.apart, out=scratch)
        if self.count == before.count == scratch.size:
            np.multiply(scratch, scratch, out=scratch)
            return scratch.size, self.mean - before.mean, float(scratch.sum())
        scratch += self.mean - before.mean
        return moments_of(scratch)


def _is_whole(plane: Fields) -> bool:
    """Return whether all values are finite; false for those whose sum is not, which are looked at one by one."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(plane.sum()))


@dataclass
class Scan:
    """Results of a pass over some times; scans of different times merge into the scan of all of them.

    `lacking`: position → (C,) number of points without data, for the times that have any. `looks`: position → (C, 4)
    mean, standard deviation, minimum and maximum of the field, if requested.
    """

    value: Moments
    change: Moments
    valid: NDArray[np.bool_]
    lacking: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    looks: dict[int, NDArray[np.float64]] = field(default_factory=dict)

    @classmethod
    def zero(cls, channels: int, height: int, width: int) -> Scan:
        return cls(Moments.zero(channels), Moments.zero(channels), np.zeros((channels, height, width), bool))

    def merge(self, other: Scan) -> Scan:
        return Scan(
            self.value.merge(other.value),
            self.change.merge(other.change),
            self.valid | other.valid,
            {**self.lacking, **other.lacking},
            {**self.looks, **other.looks},
        )

    def add(
        self,
        positions: Sequence[int],
        fields_TCHW: Fields,
        counts: Sequence[bool],
        follows: Sequence[bool],
        before_CHW: Fields | None = None,
        look: bool = False,
        physical_TCHW: Fields | None = None,
    ) -> None:
        """Add fields (T, C, H, W) to the scan; `looks` are those of `physical_TCHW`, where the fields are transformed.

        `counts` marks the times that enter the moments, `follows` those whose change since the previous time does as
        well. The field before the first time is `before_CHW`.
        """
        lacking = np.zeros(fields_TCHW.shape[:2], np.int64)
        looks = np.full((*lacking.shape, 4), np.nan)
        # The loop runs over channels first, so that results for one time are still in the CPU cache for the next.
        memory = [np.empty(math.prod(fields_TCHW.shape[2:])) for _ in range(3)]
        for c in range(fields_TCHW.shape[1]):
            last = None if before_CHW is None else _Plane.of(before_CHW[c], memory[1])
            for t, plane in enumerate(fields_TCHW[:, c]):
                now = _Plane.of(plane, memory[t % 2]) if counts[t] or look else None
                if now is not None:
                    lacking[t, c] = plane.size - now.count
                    squares = now.squares(memory[2])
                    if look and now.count:
                        shown, mean, spread = plane, now.mean, squares
                        if physical_TCHW is not None:
                            shown = physical_TCHW[t, c]
                            _, mean, spread = moments_of(shown)
                        extremes = np.fmin.reduce(shown, axis=None), np.fmax.reduce(shown, axis=None)
                        looks[t, c] = mean, (spread / now.count) ** 0.5, *extremes
                    if counts[t]:
                        self.value.add(c, now.count, now.mean, squares)
                        if follows[t] and last is not None:
                            self.change.add(c, *now.change(last, memory[2]))
                elif not _is_whole(plane):
                    lacking[t, c] = (~np.isfinite(plane)).sum()
                if lacking[t, c]:
                    self.valid[c] |= np.isfinite(plane)
                else:
                    self.valid[c] = True
                last = now
        for t, position in enumerate(positions):
            if lacking[t].any():
                self.lacking[position] = lacking[t]
            if look:
                self.looks[position] = looks[t]


def blocks(positions: NDArray[np.int64], bytes_per_time: int) -> list[NDArray[np.int64]]:
    """Cut positions into consecutive blocks of bounded memory."""
    if not len(positions):
        return []
    size = max(1, _BLOCK_BYTES // max(1, bytes_per_time))
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [run[i : i + size] for run in runs for i in range(0, len(run), size)]


TimeBlock = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Consecutive positions, and whether each enters the moments, with one more entry in front for the time before."""


def scan(
    store: FieldStore,
    variables: Sequence[Variable],
    parts: Sequence[TimeBlock],
    look: bool = False,
    progress: Callable[[int], None] | None = None,
    each: Callable[[int, Fields], None] | None = None,
) -> Scan:
    """Make one pass over blocks of times, reading the next block while one is processed.

    `each` is called with the position and the fields of every time that enters the moments. The change into a block's
    first time needs the time before it, which is read separately if the previous block does not end there.
    """
    shape = (sum(map(len, variables)), store.grid.height, store.grid.width)
    result, transformed = Scan.zero(*shape), transforms.Transforms(variables)
    # One block is being processed, one holds the previous time, and one is being filled.
    memory = [np.empty((max((len(part[0]) for part in parts), default=0), *shape), np.float32) for _ in range(3)]

    def read(i: int) -> Fields:
        fields = memory[i % 3][: len(parts[i][0])]
        store.read(variables, parts[i][0], out=fields)
        return fields

    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as ahead:
        coming = [ahead.submit(read, i) for i in range(min(1, len(parts)))]
        last, before = -1, None
        for i, (positions, counts) in enumerate(parts):
            fields = coming.pop().result()
            if positions[0] - 1 != last and counts[0] and counts[1]:
                before = store.read(variables, [int(positions[0]) - 1])[0]
            coming = [ahead.submit(read, i + 1) for _ in parts[i + 1 : i + 2]]
            steps = store.seconds[positions] - store.seconds[positions - 1]
            follows = counts[:-1] & (steps == store.step_seconds)
            previous = before if before is None else transformed.forward(before, np, 0)
            values = transformed.forward(fields, np)
            physical = fields if transformed else None
            result.add(positions.tolist(), values, counts[1:].tolist(), follows.tolist(), previous, look, physical)
            last, before = int(positions[-1]), fields[-1]
            if each is not None:
                for position, field, wanted in zip(positions.tolist(), fields, counts[1:].tolist(), strict=True):
                    if wanted:
                        each(position, field)
            if progress is not None:
                progress(len(positions))
    return result


def fit_statistics(
    store: FieldStore, variables: Variables, data: DataSection, progress: Progress | None = None
) -> Statistics:
    """Fit the statistics to the training period; missing fields are searched for in all three periods.

    Raises UserError for a predicted channel that is constant or never has data. A constant forcing or static channel
    gets a standard deviation of 1.
    """
    parts = scan_blocks(store, varying(variables), *wanted_times(store, data))
    total, done = sum(len(positions) for positions, _ in parts), 0

    def count(times: int) -> None:
        nonlocal done
        done += times
        if progress is not None:
            progress(done, total)

    return finish(store, variables, data, scan(store, varying(variables), parts, progress=count))


def refuse_long_fit(store: FieldStore, variables: Variables, data: DataSection, path: Path) -> None:
    """Raise UserError if fitting the statistics takes so long that a collective of waiting ranks may time out."""
    positions, _ = wanted_times(store, data)
    size = 4 * sum(map(len, varying(variables))) * store.grid.height * store.grid.width * len(positions)
    if size > _FITTED_AT_START:
        raise UserError(
            f"data.statistics: expected {path} before a run of several ranks, because {size / 1e9:.0f} GB of fields have to be "
            "read for it, got none; run `credit-like preprocess` first"
        )


def varying(variables: Variables) -> list[Variable]:
    """Return all variables that have times, in the order of statistics."""
    return [*variables.outputs, *variables.role("dynamic_forcing")]


def scan_blocks(
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    training: NDArray[np.bool_],
    chosen: NDArray[np.bool_] | None = None,
) -> list[TimeBlock]:
    """Return blocks of bounded memory that together cover all positions (or those `chosen`) once."""
    counts = dict(zip(positions.tolist(), training.tolist(), strict=True))
    positions = positions if chosen is None else positions[chosen]
    bytes_per_time = 4 * sum(map(len, variables)) * store.grid.height * store.grid.width
    result = []
    for block in blocks(positions, bytes_per_time):
        own = [counts[position] for position in block.tolist()]
        result.append((block, np.array([counts.get(int(block[0]) - 1, False), *own])))
    return result


def wanted_times(store: FieldStore, data: DataSection) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the positions of all three periods, and which of them belong to training."""
    train = store.period(data.train)
    if not len(train):
        ends = f"{to_text(store.times[0])} to {to_text(store.times[-1])}"
        raise UserError(f"expected times in data.train, got none; the data go from {ends}")
    positions = np.union1d(train, np.union1d(store.period(data.valid), store.period(data.test)))
    return positions, np.isin(positions, train)


def finish(store: FieldStore, variables: Variables, data: DataSection, total: Scan) -> Statistics:
    """Derive statistics from the scan of all times."""
    if sums := store.told_other_sums():
        _LOG.warning("sums: %s", sums)
    statics = variables.role("static")
    fixed = Scan.zero(sum(map(len, statics)), store.grid.height, store.grid.width)
    fixed.add([0], store.static()[None], [True], [False])
    names = Variables.channel_names([*varying(variables), *statics])
    mean = np.concatenate([total.value.mean, fixed.value.mean])
    std = np.concatenate([total.value.std, fixed.value.std])
    change_std = np.concatenate([total.change.std, np.full(len(fixed.value.mean), np.nan)])
    count = np.concatenate([total.value.count, fixed.value.count])
    std, change_std = _guard(names, Variables.channel_names(variables.outputs), mean, std, change_std, count)
    missing = _missing(store, names, total)
    functions = transforms.names([*varying(variables), *statics])
    of_channel = [store.attrs(v).get("units", "") for v in [*varying(variables), *statics] for _ in v.channels]
    dataset = xr.Dataset(
        {
            "units": ("channel", np.array(of_channel, str), {"long_name": "units of the values"}),
            **({"transform": ("channel", np.array(functions, str))} if any(functions) else {}),
            "mean": ("channel", mean, {"long_name": "mean over the training period and all points with data"}),
            "std": ("channel", std, {"long_name": "standard deviation about that mean"}),
            "change_std": (
                "channel",
                change_std,
                {"long_name": f"standard deviation of the change over {data.timestep}"},
            ),
            "count": ("channel", count, {"long_name": "values that went into the mean"}),
            "valid": (("channel", "latitude", "longitude"), np.concatenate([total.valid, fixed.valid])),
            "missing_position": ("missing", np.array([at for at, _ in missing], np.int64)),
            "missing_time": ("missing", np.array([to_text(store.times[at]) for at, _ in missing], str)),
            "missing_channels": ("missing", np.array([what for _, what in missing], str)),
        },
        {"channel": names, "latitude": store.grid.latitude, "longitude": store.grid.longitude},
        _provenance(store, data),
    )
    return Statistics(dataset)


def _guard(
    names: Sequence[str],
    predicted: Sequence[str],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
    change_std: NDArray[np.float64],
    count: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Raise UserError for a channel with a standard deviation of zero, or with one that stems from fill values."""
    if empty := [name for name, n in zip(names, count, strict=True) if n == 0]:
        raise UserError(f"expected data of {', '.join(empty)} in the training period, got only missing values")
    if filled := [name for name, m, s in zip(names, mean, std, strict=True) if max(abs(m), s) > MOST]:
        raise UserError(
            f"expected values of {', '.join(filled)} below {MOST:g}, got larger ones; if these are points without data, such as "
            "netCDF's 9.97e36, declare them as the variable's _FillValue in the files"
        )
    constant = ~(std > 1e-7 * np.abs(mean))  # float32 cannot resolve smaller deviations
    still = np.isin(names, predicted) & (constant | (change_std == 0))
    if still.any():
        raise UserError(
            "expected predicted variables that vary over the training period, got "
            f"{', '.join(np.array(names)[still])} constant; "
            "remove them or make them static"
        )
    if constant.any():
        _LOG.warning(
            "constant, so divided by 1 instead of their standard deviation: %s", ", ".join(np.array(names)[constant])
        )
    changeless = np.isin(names, predicted, invert=True) & (change_std == 0)
    return np.where(constant, 1.0, std), np.where(changeless, 1.0, change_std)


def _missing(store: FieldStore, names: Sequence[str], total: Scan) -> list[tuple[int, str]]:
    """Return (position, channels) for every time at which a point lacks data that it has at some other time."""
    never = (~total.valid).sum((1, 2))
    result = []
    for position in sorted(total.lacking):
        more = np.flatnonzero(total.lacking[position] > never)
        if len(more):
            result.append((position, " ".join(names[i] for i in more.tolist())))
    if result:
        first = ", ".join(f"{to_text(store.times[at])} ({what})" for at, what in result[:5])
        dots = ", …" if len(result) > 5 else ""
        are = "is" if len(result) == 1 else "are"
        number = counted(len(result), "time")
        _LOG.warning("%s with missing fields %s left out of every window: %s%s", number, are, first, dots)
    return result


def _provenance(store: FieldStore, data: DataSection) -> dict[str, Any]:
    return {
        "title": "Statistics of training data",
        "Conventions": "CF-1.11",
        "training_period": _text_of(data.train),
        "scanned_periods": "; ".join(_text_of(p) for p in (data.train, data.valid, data.test)),
        "timestep": str(data.timestep),
        "calendar": store.calendar,
        "first_time": store.start,
        "source": "; ".join(source.model_dump_json(exclude_defaults=True) for source in data.source),
        "history": f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ} credit_like {credit_like.__version__}",
    }


def _text_of(periods: Periods) -> str:
    return ", ".join(map(str, periods))
