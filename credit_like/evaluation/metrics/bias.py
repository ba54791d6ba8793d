"""Mean error.

mean over the area of f − o.
"""

from __future__ import annotations

from credit_like.evaluation.fields import Array, Fields

LABEL = "bias"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"bias": fields.mean(fields.error)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["bias"]
