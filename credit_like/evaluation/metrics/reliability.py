"""Reliability diagram of the events that the thresholds of `evaluation.thresholds` are exceeded.

Forecasts fall into eleven bins of probability centred on 0, 0.1, …, 1. Of each bin there are, along the last dimension,
the fraction of the forecasts in it (weighted by area), their mean probability, and the frequency of the event, which
equals that probability in a reliable ensemble. Source: Bröcker and Smith (2007), Weather Forecast. 22, 651-661, who
recommend the mean probability rather than the centre of the bin.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields
from credit_like.evaluation.metrics._ensemble import probability

NEEDS: frozenset[str] = frozenset({"members", "thresholds"})
EXTRA: tuple[str, ...] | None = ("threshold", "probability_bin", "reliability_part")
BINS = 11
LABELS = {
    "probability_bin": [number / (BINS - 1) for number in range(BINS)],
    "reliability_part": ["fraction", "probability", "frequency"],
}
"""Coordinates of the last two dimensions."""


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    of_events = []
    for number in range(fields.n_events):
        forecast, occurred = probability(fields, number)
        # A probability half-way between two centres belongs to the upper bin; the sum guards against its rounding.
        at = np.floor(forecast * (BINS - 1) + 0.5 + 1e-9)
        inside = [np.where(np.isnan(forecast), np.nan, at == bin_) for bin_ in range(BINS)]
        sums = [np.stack([fields.mean(x) for x in (there, there * forecast, there * occurred)], -1) for there in inside]
        of_events.append(np.stack(sums, -2))
    return {"reliability": np.stack(of_events, -3)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    share, probability, frequency = np.moveaxis(means["reliability"], -1, 0)
    nothing = np.full_like(share, np.nan)
    ratios = [np.divide(x, share, out=nothing.copy(), where=share > 0) for x in (probability, frequency)]
    return np.stack([share, *ratios], -1)
