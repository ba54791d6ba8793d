"""Fair Brier score: the expected Brier score of an infinite ensemble of such members.

(p − o)² − p (1 − p) / (M − 1) in place of (p − o)², which is WeatherBench2's `DebiasedEnsembleBrierScore`. Source: Ferro
(2014), Q. J. R. Meteorol. Soc. 140, 1917-1923. Of a source with one member it is the Brier score.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields
from credit_like.evaluation.metrics._ensemble import probability

NEEDS: frozenset[str] = frozenset({"ensemble", "thresholds"})
EXTRA: str | None = "threshold"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    scores = []
    others = max(1, len(fields.forecast) - 1)
    for number in range(fields.n_events):
        forecast, occurred = probability(fields, number)
        scores.append(fields.mean((forecast - occurred) ** 2 - forecast * (1 - forecast) / others))
    return {"fair-brier": np.stack(scores, -1)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["fair-brier"]
