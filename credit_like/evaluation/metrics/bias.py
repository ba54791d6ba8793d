"""Mean error.

mean over the area of f − o.
"""

from __future__ import annotations

from credit_like.evaluation.fields import Array, Fields

LABEL = "bias"


def per_time(fields: Fields) -> dict[str, Array]:
    """Per lead, level and region."""
    return {"bias": fields.mean(fields.error)}


def finish(means: dict[str, Array]) -> Array:
    """Of the mean over initial times."""
    return means["bias"]
