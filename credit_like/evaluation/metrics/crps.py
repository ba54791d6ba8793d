"""Continuous ranked probability score of the ensemble, without correction for its size.

skill − spread / 2 with skill = mean_m |X_m − Y| and spread = mean_mn |X_m − X_n|; with one member, the absolute error.
"""

from __future__ import annotations

from credit_like.evaluation.fields import Array, Fields
from credit_like.evaluation.metrics._ensemble import fair_spread, skill


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    members = len(fields.forecast)
    # The fair spread averages over pairs of different members, this one over all pairs.
    spread = (members - 1) / members * fair_spread(fields)
    return {"crps": fields.mean(skill(fields) - spread / 2)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["crps"]
