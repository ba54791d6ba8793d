"""The climatology of the training period, computed during the pass over it.

The raw material is the mean and the number of values at every point for every slot, a day of the year and an hour. A
pass in the order of days of the year, covering all years of a few days at a time, completes a slot within one piece.
Therefore only those few days are in memory, and repeating a piece writes the same values. A weighted mean over a window
of days then gives the climatology, as in WeatherBench2. A day or hour that the period lacks takes the values of the
nearest available one.

Dimensions of the result: (hour, dayofyear, level, latitude, longitude), as in WeatherBench2.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from credit_like.data.locate import ORIGIN
from credit_like.data.store import Fields, FieldStore
from credit_like.data.times import seconds, to_text
from credit_like.outputs import begins_with, check_own, process_name
from credit_like.variables import Variable, Variables

Slot = tuple[int, int]
"""Day of the year from 1, second of the day."""
DAY = 86400
CLIMATOLOGY = "climatology.zarr"
_BAND_BYTES = 128 * 2**20
_DAYS = "window_days"


def slots_of(times: NDArray[Any]) -> list[Slot]:
    """Return the slot of every time."""
    if times.dtype.kind == "M":
        since = times.astype("datetime64[s]")
        days = since.astype("datetime64[D]")
        day = (days - since.astype("datetime64[Y]").astype("datetime64[D]")).astype(int) + 1
        second = (since - days).astype(int)
    else:
        day = np.array([time.dayofyr for time in times])
        second = seconds(times) % DAY
    return list(zip(day.tolist(), np.asarray(second).tolist(), strict=True))


def year_days(calendar: str) -> int:
    """Return the days of the longest year of a calendar."""
    return {"360_day": 360, "noleap": 365, "365_day": 365}.get(calendar, 366)


def window_weights(
    seen: Sequence[Slot], asked: Sequence[Slot], window_days: int, calendar: str = "standard"
) -> NDArray[np.float64]:
    """Return (asked, seen) weights of training slots in the mean of each requested slot.

    The weights fall linearly from 1 on the day itself to 0 at half a window, among the slots of the nearest hour.
    """
    day, second = np.array(seen).T
    result = np.zeros((len(asked), len(seen)))
    for i, (wanted_day, wanted_second) in enumerate(asked):
        off = np.abs(second - wanted_second)
        hour = np.minimum(off, DAY - off)
        same_hour = hour == hour.min()
        there = day[same_hour]
        distance = _apart(day, int(there[nearest_day(wanted_day, there, calendar)]), calendar)
        result[i] = same_hour * np.clip(1 - distance / max(1, window_days // 2), 0, 1)
    return result


def _apart(day: NDArray[np.int64], other: int, calendar: str) -> NDArray[np.int64]:
    """Return the days between days of the year, the shorter way around."""
    distance = np.abs(day - other)
    return np.minimum(distance, year_days(calendar) - distance)


def nearest_day(wanted: int, days: NDArray[np.int64], calendar: str = "standard") -> int:
    """Return the position of the day of the climatology that is nearest to a day of the year.

    Of two that are as near it is the earlier one: 31 December, not 1 January, for day 366 of data without leap years.
    """
    before = (wanted - days) % year_days(calendar)
    return int(np.lexsort((before, _apart(days, wanted, calendar)))[0])


class SlotMeans:
    """Mean and count per slot and point of some slots; `add` updates them with the fields of one time.

    They are in memory, or, given a `stem`, in draft files beside those of `save`, whose pages the system writes out as needed:
    a day of a fine grid takes gigabytes.
    """

    def __init__(self, slots: Sequence[Slot], channels: int, height: int, width: int, stem: Path | None = None) -> None:
        self.at = {slot: i for i, slot in enumerate(slots)}
        self._drafts: dict[str, Path] = {}
        shape = (len(slots), channels, height, width)
        self.mean: NDArray[np.float32] = self._zeros("mean", shape, np.float32, stem)
        self.count: NDArray[np.uint16] = self._zeros("count", shape, np.uint16, stem)

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: Any, stem: Path | None) -> NDArray[Any]:
        if stem is None:
            return np.zeros(shape, dtype)
        self._drafts[name] = stem.with_suffix(f".{name}.{process_name()}.draft")
        return np.lib.format.open_memmap(self._drafts[name], "w+", dtype, shape)

    @staticmethod
    def bytes_per_slot(channels: int, height: int, width: int) -> int:
        return 6 * channels * height * width

    def add(self, slot: Slot, field_CHW: Fields) -> None:
        """Update m ← m + (x − m) / n where x is not missing; exact to the rounding of float32."""
        i = self.at[slot]
        for mean, count, field in zip(
            self.mean[i], self.count[i], field_CHW, strict=True
        ):  # by channel, to take little memory
            there = np.isfinite(field)
            count += there
            np.add(mean, (field - mean) / np.maximum(count, 1).astype(np.float32), out=mean, where=there)

    def save(self, stem: Path) -> None:
        """Write `<stem>.mean.npy` and `<stem>.count.npy`, overwriting those of an unfinished pass."""
        for name, values in (("mean", self.mean), ("count", self.count)):
            final = stem.with_suffix(f".{name}.npy")
            if isinstance(values, np.memmap):
                values.flush()
                self._drafts[name].replace(final)
            else:
                np.save(final, values)


def check_climatology(path: Path) -> None:
    """Raise UserError if another store or anything else is where a climatology is to be written."""
    mark = begins_with(f'"{_DAYS}"')
    check_own("--climatology", path, "a climatology of this command", lambda store: mark(store / "zarr.json"))


def write_climatology(
    store: FieldStore,
    variables: Sequence[Variable],
    parts: Sequence[tuple[Path, Sequence[Slot]]],
    path: Path,
    period: str,
    window_days: int,
) -> None:
    """Write the zarr store `path` from the pieces that `SlotMeans.save` wrote, given as (stem, slots).

    Channels are ordered as in `variables`. Each variable has the origin of its data as an attribute, by which a climatology
    of other data is recognised. Streams over rows and holds at most 128 MiB of them.
    """
    slots = [slot for _, some in parts for slot in some]
    days, hours = (np.unique([slot[k] for slot in slots]) for k in (0, 1))
    asked = [(int(day), int(hour)) for hour in hours for day in days]
    weights = window_weights(slots, asked, window_days, store.calendar)
    maps = [[np.load(stem.with_suffix(f".{n}.npy"), mmap_mode="r") for n in ("mean", "count")] for stem, _ in parts]
    draft, former = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "former"))
    for left in (draft, former):
        shutil.rmtree(left, ignore_errors=True)
    attrs = {"title": "Climatology", "Conventions": "CF-1.11", "period": period, _DAYS: window_days}
    group = zarr.create_group(draft, attributes=attrs)
    _coordinates(group, store, variables, days, hours)
    height, width = store.grid.height, store.grid.width
    rows_at_once = max(1, _BAND_BYTES // (24 * len(slots) * width))
    work = path.with_name(f".{path.name}.work.npy")
    for variable, channels in ((v, Variables.slices(variables)[v.name]) for v in variables):
        shape = (len(asked), len(variable), height, width)
        whole = np.lib.format.open_memmap(work, "w+", np.float32, shape)
        for c in range(len(variable)):
            for first in range(0, height, rows_at_once):
                rows = slice(first, min(first + rows_at_once, height))
                piece = (slice(None), channels.start + c, rows)
                count = np.concatenate([n[piece] for _, n in maps]).astype(np.float64)
                total = np.concatenate([m[piece] for m, _ in maps]) * count
                with np.errstate(invalid="ignore"):  # a point that never has data is 0 / 0 and stays missing
                    whole[:, c, rows] = np.tensordot(weights, total, 1) / np.tensordot(weights, count, 1)
        attrs_of = {**store.attrs(variable), ORIGIN: store.origin(variable)}
        _write(group, variable, whole.reshape(len(hours), len(days), *shape[1:]), attrs_of)
        del whole
        work.unlink()
    if path.exists():  # not removed piece by piece: half a store would be no climatology
        path.rename(former)
    draft.rename(path)
    shutil.rmtree(former, ignore_errors=True)


def _coordinates(
    group: zarr.Group,
    store: FieldStore,
    variables: Sequence[Variable],
    days: NDArray[np.int64],
    hours: NDArray[np.int64],
) -> None:
    values: dict[str, tuple[NDArray[Any], dict[str, str]]] = {
        "hour": (hours / 3600, {"long_name": "hour of the day, UTC"}),
        "dayofyear": (days, {"long_name": "day of the year, from 1"}),
        "latitude": (store.grid.latitude, {"units": "degrees_north", "standard_name": "latitude"}),
        "longitude": (store.grid.longitude, {"units": "degrees_east", "standard_name": "longitude"}),
    }
    for variable in variables:
        if variable.levels:
            attrs = {**store.level_attrs(variable), "axis": "Z"}
            values[_level_dim(variable, variables)] = (np.array(variable.levels, np.float64), attrs)
    for name, (array, attributes) in values.items():
        made = group.create_array(name, data=array, chunks=array.shape, dimension_names=[name])
        made.attrs.update(attributes)


def _level_dim(variable: Variable, variables: Sequence[Variable]) -> str:
    """Return `level`, unless variables have different levels."""
    same = len({v.levels for v in variables if v.levels}) == 1
    return "level" if same else f"level_{variable.name}"


def _write(group: zarr.Group, variable: Variable, fields: NDArray[np.float32], attrs: dict[str, str]) -> None:
    """Write (hour, day, level, H, W), one chunk per day."""
    dims = ["hour", "dayofyear", "level", "latitude", "longitude"]
    if not variable.levels:
        fields, dims = fields[:, :, 0], [dim for dim in dims if dim != "level"]
    elif "level" not in group:
        dims[2] = f"level_{variable.name}"
    array = group.create_array(
        variable.name,
        shape=fields.shape,
        chunks=(fields.shape[0], 1, *fields.shape[2:]),
        dtype="float32",
        fill_value=np.nan,
        dimension_names=dims,
    )
    array.attrs.update(attrs)
    for day in range(fields.shape[1]):
        array[:, day : day + 1] = fields[:, day : day + 1]


def period_text(store: FieldStore, positions: NDArray[np.int64]) -> str:
    """Return a text that describes the times of which a climatology is the mean."""
    return f"{len(positions)} times from {to_text(store.times[positions[0]])} to {to_text(store.times[positions[-1]])}"
