"""Climatological inputs of precipitation scores: how often a place is dry, and the local threshold of heavy rain."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from credit_like.data.aliases import find
from credit_like.data.declared import per_step
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.variables import Variable

DRY_MM = 0.25
"""A step with less than this is dry (Rodwell et al. 2010; WeatherBench2 uses it for 6 h and 24 h alike)."""
_BLOCK_BYTES = 128 * 2**20


def is_precipitation(variable: Variable, store: FieldStore) -> bool:
    """Return whether a variable is precipitation at the surface, by standard name, name or alias."""
    standard = str(store.attrs(variable).get("standard_name", ""))
    return not variable.levels and (
        "precipitation" in standard
        or re.search("precip(?!itable)", variable.name) is not None
        or find(variable.name, ["total_precipitation"]) is not None
    )


def dry_limit(variable: Variable, store: FieldStore) -> float:
    """Return the limit below which a step is dry, in the variable's units: an amount in a step, or a rate.

    Unknown units count as mm in a step.
    """
    try:
        found = per_step(store.attrs(variable).get("units", ""), "kg m-2", "kg m-2 s-1", store.step_seconds)
    except UserError:  # those of something else
        found = None
    return DRY_MM if found is None else DRY_MM / found[0]


def seeps_thresholds(
    store: FieldStore, variable: Variable, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (dry probability, threshold between light and heavy), each (H, W), over the training period.

    Light rain is two thirds of the wet cases. NaN if it never rained or there are no data. The whole period is used at
    once, not by season: a training period of months has too few wet cases for that.
    """
    grid = store.grid
    limit_of_dry = dry_limit(variable, store)
    dry, heavy = np.full((grid.height, grid.width), np.nan), np.full((grid.height, grid.width), np.nan)
    at_once = max(1, _BLOCK_BYTES // (8 * len(positions) * grid.width))
    for first in range(0, grid.height, at_once):
        rows = slice(first, min(first + at_once, grid.height))
        values = store.read([variable], positions, rows)[:, 0].astype(np.float64)
        values = values.reshape(len(values), -1)
        wet = values > limit_of_dry
        count = np.isfinite(values).sum(0)
        probability = np.divide(count - wet.sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)
        limit = np.full(count.shape, np.nan)
        rains = wet.any(0)
        if rains.any():
            limit[rains] = np.nanquantile(np.where(wet, values, np.nan)[:, rains], 2 / 3, axis=0)
        dry[rows], heavy[rows] = probability.reshape(-1, grid.width), limit.reshape(-1, grid.width)
    return dry, heavy
