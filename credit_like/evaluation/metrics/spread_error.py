"""Ratio of the ensemble spread to the error of the ensemble mean: 1 for a reliable ensemble of any size.

sqrt((M + 1) / M · mean ensemble variance / mean squared error of the ensemble mean), both averaged over time and area
first; the variance uses ddof = 1. The factor accounts for the error of a mean of M members. Source: Fortin et al.
(2014), J. Hydrometeorol. 15, 1708-1713. Unlike `spread-skill` it needs no debiased error, which may be
negative in a small sample.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"members"})
LABEL = "spread / error"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    members = len(fields.forecast)
    return {
        "inflated_variance": (members + 1) / members * fields.mean(fields.forecast.var(0, ddof=1)),
        "mse": fields.mean(fields.error**2),
    }


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    error = means["mse"]
    ratio = np.divide(means["inflated_variance"], error, out=np.full_like(error, np.nan), where=error > 0)
    return np.sqrt(ratio)
