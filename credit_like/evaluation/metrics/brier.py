"""Brier score of the events that the thresholds of `evaluation.thresholds` are exceeded.

mean over time and area of (p − o)², p the fraction of the members above the threshold and o 1 or 0. This is
WeatherBench2's `EnsembleBrierScore`; of one member it is the frequency of a wrong forecast.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields
from credit_like.evaluation.metrics._ensemble import probability

NEEDS: frozenset[str] = frozenset({"thresholds"})
EXTRA: str | None = "threshold"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    scores = []
    for number in range(fields.n_events):
        forecast, occurred = probability(fields, number)
        scores.append(fields.mean((forecast - occurred) ** 2))
    return {"brier": np.stack(scores, -1)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["brier"]
