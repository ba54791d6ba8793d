"""Thresholds of events, whose probabilities are scored: values, and quantiles of the climatology at each point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from credit_like.data.store import FieldStore
from credit_like.schema.inference import Thresholds
from credit_like.variables import Variable

_BLOCK_BYTES = 128 * 2**20


def event_labels(section: Thresholds, variable: str) -> list[str]:
    """Return the names of the events of a variable, such as `above 300` and `above quantile 0.9`."""
    values = [f"above {value:.12g}" for value in section.values.get(variable, ())]
    return values + [f"above quantile {quantile:.12g}" for quantile in section.quantiles]


def event_thresholds(
    section: Thresholds,
    store: FieldStore,
    variable: Variable,
    levels: Sequence[int],
    positions: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return (T, K, H, W): the thresholds of a variable's events, in the order of `event_labels`.

    A quantile is that of all times at `positions` (the period of the climatology) at each point and level, linear
    between the order statistics; NaN if the point has no data. `levels` are positions among the variable's own.
    """
    shape = (len(levels), store.grid.height, store.grid.width)
    values = [np.full(shape, value) for value in section.values.get(variable.name, ())]
    return np.stack([*values, *_quantiles(store, variable, levels, positions, section.quantiles)])


def _quantiles(
    store: FieldStore,
    variable: Variable,
    levels: Sequence[int],
    positions: NDArray[np.int64],
    quantiles: Sequence[float],
) -> NDArray[np.float64]:
    """Return (quantiles, K, H, W), reading as many rows at a time as fit into 128 MiB."""
    grid = store.grid
    result = np.full((len(quantiles), len(levels), grid.height, grid.width), np.nan)
    if not quantiles:
        return result
    at_once = max(1, _BLOCK_BYTES // (8 * max(1, len(positions)) * len(variable) * grid.width))
    for first in range(0, grid.height, at_once):
        rows = slice(first, min(first + at_once, grid.height))
        values = store.read([variable], positions, rows)[:, list(levels)].astype(np.float64)
        there = np.isfinite(values).any(0)
        if there.all() and np.isfinite(values).all():
            result[:, :, rows] = np.quantile(values, quantiles, axis=0)
        elif there.any():
            result[:, :, rows][:, there] = np.nanquantile(values[:, there], quantiles, axis=0)
    return result
