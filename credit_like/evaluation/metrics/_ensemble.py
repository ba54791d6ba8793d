"""Functions that several ensemble scores share: the two terms of the CRPS, and probabilities of events."""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields


def skill(fields: Fields) -> Array:
    """Return (L, K, H, W): mean_m |X_m − Y|."""
    return np.asarray(np.abs(fields.forecast - fields.truth).mean(0))


def fair_spread(fields: Fields) -> Array:
    """Return (L, K, H, W): mean over pairs of different members of |X_m − X_n|, from the sorted members.

    2 · mean_m[(2 rank_m − M − 1) X_m] / (M − 1), ranks from 1; 0 if there is one member, as in WeatherBench2.
    """
    members = len(fields.forecast)
    if members == 1:
        return np.zeros_like(fields.truth)
    ranks = np.arange(1, members + 1)
    weights = (2 * ranks - members - 1) / members
    return 2 * np.einsum("m,m...->...", weights, np.sort(fields.forecast, axis=0)) / (members - 1)


def probability(fields: Fields, number: int) -> tuple[Array, Array]:
    """Return (probability, occurrence) of the event that threshold `number` is exceeded, each (L, K, H, W).

    The probability is the fraction of the members above the threshold, the occurrence 1 or 0; both are NaN where any
    value or the threshold is missing.
    """
    assert fields.events is not None, "only variables with thresholds have events"
    threshold = fields.events[number]
    known = fields.valid & np.isfinite(threshold)
    forecast = (fields.forecast > threshold).mean(0)
    return np.where(known, forecast, np.nan), np.where(known, fields.truth > threshold, np.nan)
