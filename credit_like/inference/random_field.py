"""Gaussian random fields on the sphere.

A field of unit variance and correlation length L is

    f(λ, μ) = Σ_n Σ_m σ_n a_nm Y_nm(λ, μ),   a_nm independent standard normal,   σ_n² ∝ exp(−n(n + 1) L² / (2 a²)),

with real orthonormal spherical harmonics Y and a the Earth's radius; Σ_n (2n + 1) σ_n² / 4π = 1 makes the variance
one at every point (addition theorem), and the covariance at angle γ is Σ_n (2n + 1) σ_n² P_n(cos γ) / 4π, which for L
≪ a is exp(−a²γ² / 2L²). The global mean (n = 0) is left out, so that a perturbation adds no mass. Source: Weaver and
Courtier (2001), Q. J. R. Meteorol. Soc. 127, 1815-1846 (diffusion operators as correlation models).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError
from credit_like.grid import Grid

EARTH_RADIUS_KM = 6371.22
_SMALLEST = 1e-6  # degrees with a smaller share of the variance are omitted
_LARGEST_BYTES = 4 << 30


class SphericalRandomField:
    """Sampler of fields (H, W) of zero mean and unit variance on a grid."""

    def __init__(self, grid: Grid, length_scale_km: float) -> None:
        self.scale = deviations(grid, length_scale_km)
        self.top = top = len(self.scale) - 1
        self.legendre = normalised_legendre(np.sin(np.deg2rad(grid.latitude)), top)
        angle = np.outer(np.arange(top + 1), np.deg2rad(grid.longitude))
        self.cos, self.sin = np.cos(angle), np.sin(angle)

    def draw(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw a field (H, W)."""
        coefficients = rng.standard_normal((2, self.top + 1, self.top + 1)) * self.scale[:, None]  # (cos | sin, n, m)
        # Real harmonics: √2 P_nm cos mλ and √2 P_nm sin mλ for m > 0; P_n0 alone for m = 0.
        coefficients[:, :, 1:] *= np.sqrt(2)
        coefficients[1, :, 0] = 0
        by_order = np.einsum("cnm,nmh->chm", coefficients, self.legendre)
        return by_order[0] @ self.cos + by_order[1] @ self.sin


def deviations(grid: Grid, length_scale_km: float) -> NDArray[np.float64]:
    """Return the standard deviation σ_n of each degree n = 0, 1, … that counts.

    Raises UserError where the harmonics of these degrees would take too much memory.
    """
    degree = np.arange(resolved_degree(grid) + 1, dtype=np.float64)
    power = np.exp(-degree * (degree + 1) * (length_scale_km / EARTH_RADIUS_KM) ** 2 / 2)
    power[0] = 0
    share = (2 * degree + 1) * power
    top = max(1, int(np.flatnonzero(share > _SMALLEST * share.max())[-1]))
    if (size := 8 * (top + 1) ** 2 * grid.height) > _LARGEST_BYTES:
        raise UserError(
            f"inference.ensemble.length_scale_km: expected a length whose fields take at most {_LARGEST_BYTES >> 30} GiB, "
            f"got {length_scale_km:g}, for which spherical harmonics to degree {top} at {grid.height} latitudes take "
            f"{size / 2**30:.1f} GiB; change it to a longer one"
        )
    power = power[: top + 1]
    power *= 4 * np.pi / ((2 * degree[: top + 1] + 1) * power).sum()
    return np.sqrt(power)


def normalised_legendre(mu: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    """Return (n, m, H): associated Legendre functions P_nm(μ), P_nm e^{imλ} being orthonormal on the sphere.

    Stable upward recursion in degree (Holmes and Featherstone 2002, J. Geodesy 76, 279-299); zero for m > n.
    """
    p = np.zeros((top + 1, top + 1, len(mu)))
    p[0, 0] = np.sqrt(1 / (4 * np.pi))
    cosine = np.sqrt(1 - mu**2)
    for m in range(1, top + 1):
        p[m, m] = np.sqrt((2 * m + 1) / (2 * m)) * cosine * p[m - 1, m - 1]
    for m in range(top):
        p[m + 1, m] = np.sqrt(2 * m + 3) * mu * p[m, m]
        for n in range(m + 2, top + 1):
            a = np.sqrt((4 * n**2 - 1) / (n**2 - m**2))
            b = np.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1))
            p[n, m] = a * (mu * p[n - 1, m] - b * p[n - 2, m])
    return p


def resolved_degree(grid: Grid) -> int:
    """Return the highest degree that a grid resolves: two rows for each half wave along a meridian."""
    if grid.is_global or grid.height < 2:
        return max(1, grid.height // 2)
    return max(1, int(90 / np.abs(np.diff(grid.latitude)).max()))
