"""The largest error anywhere: max |f − o|, averaged over initial times; only over the whole grid."""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

LABEL = "worst"


def per_time(fields: Fields) -> dict[str, Array]:
    """(leads, levels, regions), the same for every region."""
    worst = np.abs(fields.error).max((-2, -1))
    return {"worst": np.repeat(worst[..., None], len(fields.regions.names), -1)}


def finish(means: dict[str, Array]) -> Array:
    """The mean over initial times."""
    return means["worst"]
