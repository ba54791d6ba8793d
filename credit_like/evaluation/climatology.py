"""Climatology: the mean of the training period by day of year and hour.

As in WeatherBench2, the value of a day is the mean of the training days within half a window around it, at the same
hour, with weights that fall linearly from 1 on the day itself to 0 at half a window. A day of the year on which the
training period has no data takes the climatology of the nearest day that has, and an hour that of the nearest hour: a
training period shorter than a year cannot know more. (A harmonic fit to part of a year is worse out of season than
that; it extrapolates noise.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from credit_like.data import times as calendar
from credit_like.data.store import FieldStore
from credit_like.variables import Variable

DAY, YEAR_DAYS = 86400, 366
_BLOCK_BYTES = 128 * 2**20


@dataclass
class Climatology:
    """Fields for the days of year and hours that were asked for.

    `slots`: (day of year, second of day) → position; `fields`: variable → (slots, levels, H, W) float32.
    """

    slots: dict[tuple[int, int], int]
    fields: dict[str, NDArray[np.float32]]
    provenance: str

    def at(self, variable: str, times: NDArray[Any], levels: Sequence[int] = ()) -> NDArray[np.float32]:
        """(T, K, H, W) at times that were asked for; `levels` are positions among the variable's (all if empty)."""
        positions = [self.slots[slot] for slot in slots_of(times)]
        values = self.fields[variable][positions]
        return values[:, list(levels)] if levels else values


def slots_of(times: NDArray[Any]) -> list[tuple[int, int]]:
    """(day of year from 1, second of the day) of every time."""
    if times.dtype.kind == "M":
        seconds = times.astype("datetime64[s]")
        day = (seconds.astype("datetime64[D]") - seconds.astype("datetime64[Y]").astype("datetime64[D]")).astype(
            int
        ) + 1
        second = (seconds - seconds.astype("datetime64[D]")).astype(int)
    else:
        day = np.array([time.dayofyr for time in times])
        second = calendar.seconds(times) % DAY
    return list(zip(day.tolist(), np.asarray(second).tolist(), strict=True))


def fit_climatology(
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    wanted: NDArray[Any],
    window_days: int = 61,
) -> Climatology:
    """The climatology of the times at `positions` (the training period), for the days and hours of `wanted`.

    Streams over the training times; holds the result and at most 128 MiB of sums. Missing points do not count.
    Raises ValueError where there is no training time.
    """
    if not len(positions):
        raise ValueError(
            "evaluation.climatology_period: expected a period with data, got none, change it or leave it out"
        )
    trained = slots_of(store.times[positions])
    seen = sorted(set(trained))
    asked = sorted(set(slots_of(wanted)))
    weights = _weights(seen, asked, window_days)  # (asked, seen)
    of_slot = np.array([seen.index(slot) for slot in trained])
    fields = {}
    for variable in variables:
        result = np.full((len(asked), len(variable), store.grid.height, store.grid.width), np.nan, np.float32)
        row_bytes = 16 * len(seen) * len(variable) * store.grid.width
        rows_at_once = max(1, _BLOCK_BYTES // row_bytes)
        for first in range(0, store.grid.height, rows_at_once):
            rows = slice(first, min(first + rows_at_once, store.grid.height))
            total, count = _sums(store, variable, positions, of_slot, len(seen), rows)
            with np.errstate(invalid="ignore"):  # a point without data anywhere is 0 / 0, and stays without
                mean = np.tensordot(weights, total, 1) / np.tensordot(weights, count, 1)
            result[:, :, rows] = mean
        fields[variable.name] = result
    start, end = (calendar.to_text(store.times[positions[i]]) for i in (0, -1))
    provenance = (
        f"mean by day of year and hour of {len(positions)} times from {start} to {end}, window {window_days} days"
    )
    return Climatology({slot: i for i, slot in enumerate(asked)}, fields, provenance)


def _sums(
    store: FieldStore,
    variable: Variable,
    positions: NDArray[np.int64],
    of_slot: NDArray[np.int64],
    n_slots: int,
    rows: slice,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and count per slot, each (slots, C, rows, W)."""
    height = rows.stop - rows.start
    total = np.zeros((n_slots, len(variable), height, store.grid.width))
    count = np.zeros_like(total)
    at_once = max(1, _BLOCK_BYTES // (8 * len(variable) * height * store.grid.width))
    for first in range(0, len(positions), at_once):
        some = slice(first, first + at_once)
        values = store.read([variable], positions[some], rows)
        valid = np.isfinite(values)
        for slot, value, there in zip(of_slot[some], values, valid, strict=True):
            total[slot] += np.where(there, value, 0)
            count[slot] += there
    return total, count


def _weights(
    seen: Sequence[tuple[int, int]], asked: Sequence[tuple[int, int]], window_days: int
) -> NDArray[np.float64]:
    """(asked, seen): weight of a training day and hour in the mean of a wanted one."""
    day, second = np.array(seen).T
    result = np.zeros((len(asked), len(seen)))
    for i, (wanted_day, wanted_second) in enumerate(asked):
        off = np.abs(second - wanted_second)
        hour = np.minimum(off, DAY - off)
        same_hour = hour == hour.min()
        nearest = day[same_hour][np.argmin(_apart(day[same_hour], wanted_day))]
        distance = _apart(day, int(nearest))
        result[i] = same_hour * np.clip(1 - distance / max(1, window_days // 2), 0, 1)
    return result


def _apart(day: NDArray[np.int64], other: int) -> NDArray[np.int64]:
    """Days between days of the year, the short way round."""
    distance = np.abs(day - other)
    return np.minimum(distance, YEAR_DAYS - distance)
