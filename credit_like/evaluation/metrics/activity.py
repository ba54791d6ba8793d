"""Activity: the amplitude of a forecast's anomalies, which smoothing reduces.

sqrt of the mean over the area of f′², f′ = f − climatology of the valid time; per time, then averaged over time.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"climatology"})


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"activity": np.sqrt(fields.mean(fields.anomaly(fields.ensemble_mean) ** 2))}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["activity"]
