"""Spread-skill ratio: 1 for a reliable ensemble of any size.

sqrt(mean ensemble variance) / sqrt(mean debiased squared error of the ensemble mean), both averaged over time and area
first. The variance uses ddof = 1. The squared error is debiased for the noise of a mean of M members: (X̄ − Y)² − var /
M.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"members"})


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    variance = fields.forecast.var(0, ddof=1)
    return {
        "variance": fields.mean(variance),
        "debiased_mse": fields.mean(fields.error**2 - variance / len(fields.forecast)),
    }


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    error = means["debiased_mse"]
    ratio = np.divide(means["variance"], error, out=np.full_like(error, np.nan), where=error > 0)
    return np.sqrt(ratio)
