"""Fair continuous ranked probability score: the expected CRPS of an infinite ensemble of such members.

skill − spread / 2 with skill = mean_m |X_m − Y| and the fair spread 2 · mean_m[(2 rank_m − M − 1) X_m] / (M − 1).
Of a source with one member it is the absolute error, so that an ensemble is compared with deterministic forecasts.
"""

from __future__ import annotations

from credit_like.evaluation.fields import Array, Fields
from credit_like.evaluation.metrics._ensemble import fair_spread, skill

NEEDS: frozenset[str] = frozenset({"ensemble"})
LABEL = "fair CRPS"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"fair-crps": fields.mean(skill(fields) - fair_spread(fields) / 2)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["fair-crps"]
