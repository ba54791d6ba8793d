"""Mean absolute error.

mean over the area of |f − o|.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"mae": fields.mean(np.abs(fields.error))}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["mae"]
