"""Ensemble spread.

sqrt of the mean over time and area of the variance of the members (ddof = 1).
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"members"})


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"variance": fields.mean(fields.forecast.var(0, ddof=1))}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return np.sqrt(means["variance"])
