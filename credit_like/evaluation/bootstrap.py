"""Means over initial times and their confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Finish = Callable[[dict[str, Array]], Array]


def finished(statistics: Mapping[str, Array], finish: Finish) -> Array:
    """Return the score of statistics (I, …): `finish` of their mean over the initial times with data."""
    ones = np.ones((1, len(next(iter(statistics.values())))))
    return finish({name: _means(ones, values)[0] for name, values in statistics.items()})


def bounds(statistics: Mapping[str, Array], finish: Finish, samples: int, seed: int) -> tuple[Array, Array]:
    """Return the 2.5 and 97.5 percentiles of the score over resamples of the initial times with replacement.

    Initial times are treated as independent. The interval is too narrow if they are closer together than the
    correlation time of the weather.
    """
    n = len(next(iter(statistics.values())))
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=samples).astype(np.float64)
    scores = finish({name: _means(counts, values) for name, values in statistics.items()})
    empty = ~np.isfinite(scores).any(0)
    filled = np.where(empty, 0, scores)
    low, high = np.nanquantile(filled, [0.025, 0.975], axis=0)
    return np.where(empty, np.nan, low), np.where(empty, np.nan, high)


def _means(counts_SI: Array, values: Array) -> Array:
    """Return (S, …): weighted means over the first axis that ignore NaN."""
    valid = np.isfinite(values)
    total = np.tensordot(counts_SI, np.where(valid, values, 0), 1)
    weight = np.tensordot(counts_SI, valid.astype(np.float64), 1)
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
