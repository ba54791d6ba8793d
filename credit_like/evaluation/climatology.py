"""Climatology: the mean of the training period by day of year and hour.

As in WeatherBench2, the value of a day is the mean of the training days within half a window around it, at the same
hour, with weights that fall linearly from 1 on the day itself to 0 at half a window. A day of the year without training
data takes the climatology of the nearest day with data, and a missing hour that of the nearest hour. This is a
limitation of training periods shorter than a year. (A harmonic fit to part of a year is worse out of season, because it
extrapolates noise.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from credit_like.data import units
from credit_like.data.locate import ORIGIN
from credit_like.data.store import FieldStore
from credit_like.data.tools.climatology import Slot, nearest_day, period_text, slots_of, window_weights
from credit_like.errors import UNREADABLE, UserError
from credit_like.outputs import folder_identity
from credit_like.schema.experiment import Experiment
from credit_like.variables import Variable

_BLOCK_BYTES = 128 * 2**20
_LOG = logging.getLogger(__name__)


@dataclass
class Climatology:
    """Fields for the requested days of year and hours.

    `slots`: (day of year, second of day) → position; `fields`: variable → (slots, levels, H, W) float32.
    """

    slots: dict[tuple[int, int], int]
    fields: dict[str, NDArray[np.float32]]
    provenance: str

    def at(self, variable: str, times: NDArray[Any], levels: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return (T, K, H, W) at times among `wanted`; `levels` are positions among the variable's (empty for all)."""
        positions = [self.slots[slot] for slot in slots_of(times)]
        values = self.fields[variable][positions]
        return values[:, list(levels)] if levels else values


def climatology_times(store: FieldStore, experiment: Experiment) -> NDArray[np.int64]:
    """Return the positions of the times of the climatology. Raises UserError if there are none."""
    positions = store.period(experiment.evaluation.climatology_period or experiment.data.train)
    if not len(positions):
        raise UserError(
            "evaluation.climatology_period: expected a period with data, got none, change it or leave it out"
        )
    return positions


def fit_climatology(
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    wanted: NDArray[Any],
    window_days: int = 61,
) -> Climatology:
    """Return the climatology of the times at `positions` (the training period), for the days and hours of `wanted`.

    Streams over the training times; holds the result and at most 128 MiB of sums. Missing points do not count.
    """
    trained = slots_of(store.times[positions])
    seen = sorted(set(trained))
    asked = sorted(set(slots_of(wanted)))
    weights = window_weights(seen, asked, window_days, store.calendar)  # (asked, seen)
    of_slot = np.array([seen.index(slot) for slot in trained])
    fields = {}
    for variable in variables:
        result = np.full((len(asked), len(variable), store.grid.height, store.grid.width), np.nan, np.float32)
        row_bytes = 16 * len(seen) * len(variable) * store.grid.width
        rows_at_once = max(1, _BLOCK_BYTES // row_bytes)
        for first in range(0, store.grid.height, rows_at_once):
            rows = slice(first, min(first + rows_at_once, store.grid.height))
            total, count = _sums(store, variable, positions, of_slot, len(seen), rows)
            with np.errstate(invalid="ignore"):  # a point that never has data is 0 / 0 and stays missing
                mean = np.tensordot(weights, total, 1) / np.tensordot(weights, count, 1)
            result[:, :, rows] = mean
        fields[variable.name] = result
    provenance = _provenance(period_text(store, positions), window_days)
    return Climatology({slot: i for i, slot in enumerate(asked)}, fields, provenance)


def _provenance(period: str, window_days: int) -> str:
    return f"mean by day of year and hour of {period}, window {window_days} days"


def load_climatology(
    path: Path,
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    wanted: NDArray[Any],
    window_days: int = 61,
) -> Climatology | None:
    """Load the result of `fit_climatology` from the store that `credit-like preprocess --climatology` wrote.

    Where it is replaced meanwhile, the new one is loaded: zarr reads chunks that are gone as missing values. Returns None if there
    is no store, and, with a line in the log, if it is of another period, window or grid, if a variable
    is of other data or in other units, or if it lacks a variable, a level or an hour. Stores of earlier releases do not say
    of which data they are; only the units of their variables are compared.
    """
    while (folder := folder_identity(path)) is not None:
        try:
            loaded = _load(path, store, variables, positions, wanted, window_days)
        except UNREADABLE:
            if folder_identity(path) == folder:
                raise
            continue
        if folder_identity(path) == folder:
            return loaded
    return None


def _load(
    path: Path,
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    wanted: NDArray[Any],
    window_days: int,
) -> Climatology | None:
    """Load a store that is there, or return None with a line in the log if it is not that of these data."""
    with xr.open_zarr(path, consolidated=False, chunks=None) as opened:
        asked = sorted(set(slots_of(wanted)))
        if reason := _unfit(opened, store, variables, positions, asked, window_days):
            _LOG.info("%s is not used, and the climatology is computed from the data: %s", path, reason)
            return None
        days, hours = opened["dayofyear"].values, _seconds(opened)
        at = [(nearest_day(day, days, store.calendar), int(np.searchsorted(hours, second))) for day, second in asked]
        fields: dict[str, NDArray[np.float32]] = {}
        for variable in variables:
            stored, level = opened[variable.name], _level_dim(opened[variable.name])
            if level is not None:
                stored = stored.sel({level: list(variable.levels)})
            chosen: NDArray[np.float32] = np.stack(
                [stored[{"hour": hour, "dayofyear": day}].values for day, hour in at]
            )
            fields[variable.name] = chosen if variable.levels else chosen[:, None]
    provenance = _provenance(period_text(store, positions), window_days)
    return Climatology({slot: i for i, slot in enumerate(asked)}, fields, provenance)


def _unfit(
    opened: xr.Dataset,
    store: FieldStore,
    variables: Sequence[Variable],
    positions: NDArray[np.int64],
    asked: Sequence[Slot],
    window_days: int,
) -> str:
    """Return why a stored climatology is not that of these data, empty if it is."""
    expected = {"period": period_text(store, positions), "window_days": window_days}
    for key, value in expected.items():
        if (found := opened.attrs.get(key)) != value:
            return f"expected {key} {value}, got {found}"
    for name, values in (("latitude", store.grid.latitude), ("longitude", store.grid.longitude)):
        if not np.array_equal(opened[name].values, values):
            return f"expected the {name}s of the data, got others"
    if absent := [variable.name for variable in variables if variable.name not in opened]:
        return f"expected {', '.join(absent)}, got a store without"
    for variable in variables:
        stored = opened[variable.name]
        if stored.attrs.get(ORIGIN, store.origin(variable)) != store.origin(variable):
            return f"expected {variable.name} of the experiment's data, got that of another source or name"
        mine, theirs = store.attrs(variable).get("units", ""), str(stored.attrs.get("units", ""))
        if not units.same(theirs, mine):
            return f"expected {variable.name} in {mine!r}, got {theirs!r}"
        level = _level_dim(stored)
        if variable.levels and (level is None or not np.isin(variable.levels, stored[level].values).all()):
            return f"expected {variable.name} at {variable.levels_text}, got other levels"
    if not np.isin([second for _, second in asked], _seconds(opened)).all():
        return "expected the hours of the forecasts, got others"
    return ""


def _level_dim(stored: xr.DataArray) -> str | None:
    return next((str(dim) for dim in stored.dims if str(dim).startswith("level")), None)


def _seconds(opened: xr.Dataset) -> NDArray[np.int64]:
    """Return the hours of a stored climatology as seconds of the day."""
    return np.asarray(np.rint(opened["hour"].values * 3600), np.int64)


def _sums(
    store: FieldStore,
    variable: Variable,
    positions: NDArray[np.int64],
    of_slot: NDArray[np.int64],
    n_slots: int,
    rows: slice,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sum and count per slot, each (slots, C, rows, W)."""
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
