"""Rank histogram: how often the truth lies below, between and above the sorted members.

Frequency of each rank 0 … M, weighted by area; flat for a reliable ensemble. A truth equal to members takes every rank
between them with equal weight.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"members"})
EXTRA: str | None = "rank"


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    members, truth = fields.forecast, fields.truth
    below, equal = (members < truth).sum(0), (members == truth).sum(0)
    frequency = []
    for rank in range(len(members) + 1):
        share = np.where((below <= rank) & (rank <= below + equal), 1 / (equal + 1), 0.0)
        frequency.append(fields.mean(np.where(fields.valid, share, np.nan)))
    return {"rank-histogram": np.stack(frequency, -1)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["rank-histogram"]
