"""Mean squared error of the forecast (of the ensemble mean where there are members).

mean over the area of (f − o)².
"""

from __future__ import annotations

from credit_like.evaluation.fields import Array, Fields


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"mse": fields.mean(fields.error**2)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["mse"]
