"""Zonal energy spectrum of the forecast, averaged over the area of the rows.

F = rfft(x) / N along longitude; S_0 = C |F_0|², S_k = 2 C |F_k|² with C the circumference times cos φ, as in
WeatherBench2. Rows with missing points do not count; of several members, the mean of their spectra. In a region that is
bounded in longitude, the spectrum is that of the whole circles of its latitudes.
"""

from __future__ import annotations

import numpy as np

from credit_like.evaluation.fields import Array, Fields
from credit_like.grid import Grid

NEEDS: frozenset[str] = frozenset({"circles"})
EXTRA: str | None = "zonal_wavenumber"


EARTH_RADIUS = 6.371e6
"""m; the value that WeatherBench2 uses."""


def per_time(fields: Fields) -> dict[str, Array]:
    """Return the statistics of one initial time, per lead, level and region."""
    return {"spectrum": mean_over_rows(zonal_energy(fields.forecast, fields.grid), fields).mean(0)}


def finish(means: dict[str, Array]) -> Array:
    """Return the score from the means of the statistics over initial times."""
    return means["spectrum"]


def zonal_energy(x: Array, grid: Grid) -> Array:
    """Transform (…, H, W) to (…, H, W // 2 + 1): energy per zonal wavenumber and row, in units of x² m."""
    power = np.abs(np.fft.rfft(x, axis=-1) / grid.width) ** 2
    power[..., 1:] *= 2
    circumference = 2 * np.pi * EARTH_RADIUS * np.cos(np.deg2rad(grid.latitude))
    return np.asarray(circumference[:, None] * power)


def mean_over_rows(energy: Array, fields: Fields) -> Array:
    """Reduce (…, H, wavenumber) to (…, R, wavenumber): weighted means over each region's complete rows."""
    weights = fields.regions.weights.sum(-1)  # (R, H)
    whole = np.isfinite(energy[..., 0])
    total = np.einsum("rh,...hk->...rk", weights, np.where(whole[..., None], energy, 0))
    weight = (whole @ weights.T)[..., None]
    return np.divide(total, weight, out=np.full_like(total, np.nan), where=weight > 0)
