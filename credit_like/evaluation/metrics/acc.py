"""Anomaly correlation, uncentred, per time; then averaged over time.

⟨f′o′⟩ / sqrt(⟨f′²⟩⟨o′²⟩) with f′ = f − climatology of the valid time; NaN where an anomaly is zero everywhere.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"climatology"})
LABEL = "ACC"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    forecast, truth = fields.anomaly(fields.ensemble_mean), fields.anomaly(fields.truth)
    size = np.sqrt(fields.mean(forecast**2) * fields.mean(truth**2))
    product = fields.mean(forecast * truth)
    return {"acc": np.divide(product, size, out=np.full_like(product, np.nan), where=size > 0)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["acc"]
