"""Root mean squared error: the root is taken after the mean over initial times.

sqrt(mean over time of mean over area of (f − o)²).
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

LABEL = "RMSE"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"mse": fields.mean(fields.error**2)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return np.sqrt(means["mse"])
