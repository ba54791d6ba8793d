"""Mean absolute error.

mean over the area of |f − o|.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields


def per_time(fields: Fields) -> dict[str, Array]:
    """Per lead, level and region."""
    return {"mae": fields.mean(np.abs(fields.error))}


def finish(means: dict[str, Array]) -> Array:
    """Of the mean over initial times."""
    return means["mae"]
