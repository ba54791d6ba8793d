"""The two terms of the CRPS."""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields


def skill(fields: Fields) -> Array:
    """Return (L, K, H, W): mean_m |X_m − Y|."""
    return np.asarray(np.abs(fields.forecast - fields.truth).mean(0))


def fair_spread(fields: Fields) -> Array:
    """Return (L, K, H, W): mean over pairs of different members of |X_m − X_n|, from the sorted members.

    2 · mean_m[(2 rank_m − M − 1) X_m] / (M − 1), ranks from 1.
    """
    members = len(fields.forecast)
    ranks = np.arange(1, members + 1)
    weights = (2 * ranks - members - 1) / members
    return 2 * np.einsum("m,m...->...", weights, np.sort(fields.forecast, axis=0)) / (members - 1)
