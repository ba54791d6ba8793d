"""SEEPS, the stable equitable error in probability space, of precipitation: 0 perfect, 1 for any constant forecast.

Forecast and truth are assigned to three categories (dry, light, heavy) by the climate of each point; light covers two
thirds of the wet cases. The error depends on both categories and on the dry probability p, and is averaged over the area
where 0.1 ≤ p ≤ 0.85. Source: Rodwell et al. (2010), Q. J. R. Meteorol. Soc. 136, 1344-1363.

The error of forecast category i where j was observed is

    ½ ⎡ 0                1/(1−p)    4/(1−p) ⎤
      ⎢ 1/p              0          3/(1−p) ⎥
      ⎣ 1/p + 3/(2+p)    3/(2+p)    0       ⎦
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields

NEEDS: frozenset[str] = frozenset({"precipitation"})
LOWEST, HIGHEST = 0.1, 0.85


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    assert fields.thresholds is not None, "only precipitation is scored with SEEPS"
    dry, heavy = fields.thresholds
    p = np.where((dry >= LOWEST) & (dry <= HIGHEST), dry, np.nan)
    zero = np.zeros_like(p)
    matrix = 0.5 * np.stack(
        [
            np.stack([zero, 1 / (1 - p), 4 / (1 - p)]),
            np.stack([1 / p, zero, 3 / (1 - p)]),
            np.stack([1 / p + 3 / (2 + p), 3 / (2 + p), zero]),
        ]
    )
    forecast, truth = (_category(x, fields.dry_limit, heavy) for x in (fields.ensemble_mean, fields.truth))
    error = np.zeros_like(fields.truth)
    for i in range(3):
        for j in range(3):
            error += np.where((forecast == i) & (truth == j), matrix[i, j], 0)
    known = fields.valid & np.isfinite(p) & np.isfinite(heavy)
    return {"seeps": fields.mean(np.where(known, error, np.nan))}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["seeps"]


def _category(x: Array, dry_limit: float, heavy: Array) -> Array:
    """Return the category of each point: 0 dry, 1 light, 2 heavy."""
    return (x > dry_limit).astype(np.float64) + ((x > heavy) & (x > dry_limit))
