"""Fields on rows and columns from spherical harmonics, as ECMWF stores them.

X(λ, μ) = Σ_m Σ_n X_nm P_nm(μ) e^{imλ} for |m| ≤ n ≤ T, where ½ ∫ P_nm² dμ = 1, without a factor (−1)^m, and X_n,−m is the
conjugate of X_nm (https://confluence.ecmwf.int/display/UDOC, "How to access the data values of a spherical harmonic field in
GRIB"). A message holds the real and imaginary parts for m = 0 … T, and n = m … T within m.

ducc0 computes the sums (Reinecke and Seljebotn 2013, doi:10.1051/0004-6361/201321494). Its harmonics are orthonormal and have
the factor (−1)^m.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from credit_like.errors import UserError

Field = NDArray[np.float64]
_EARTH_RADIUS = 6_371_229.0
"""In m, of the sphere of ECMWF's model, in which vorticity and divergence are computed (GRIB 2, shape of the earth 6)."""


def library() -> ModuleType:
    """Return the module of ducc0. Raises UserError if it is not installed."""
    try:
        import ducc0
    except ImportError as error:
        raise UserError(
            f"expected the package ducc0 for spectral coefficients in GRIB, got none ({error}); install 'credit-like[grib]'"
        ) from error
    return ducc0


def size(truncation: int) -> int:
    """Return the number of values of a message with triangular truncation."""
    return (truncation + 1) * (truncation + 2)


def gaussian_grid(truncation: int) -> tuple[Field, Field]:
    """Return latitudes and longitudes of the regular Gaussian grid that holds a truncated field exactly (the linear one).

    It has T + 1 rows, rounded up to an even number, from north to south, and twice as many columns.
    """
    rows = truncation + 1 + (truncation + 1) % 2
    sines, _ = np.polynomial.legendre.leggauss(rows)
    return np.rad2deg(np.arcsin(sines[::-1])), np.arange(2 * rows) * 180.0 / rows


@dataclass(frozen=True, eq=False)
class Synthesis:
    """Evaluation of spherical harmonics of one truncation at the points of a grid. Calling it returns (H, W).

    Raises UserError for columns that are not evenly spaced by a part of the circle.
    """

    truncation: int
    latitude: Field
    longitude: Field

    def __post_init__(self) -> None:
        library()
        even = self.longitude[0] + 360.0 / self._around * np.arange(len(self.longitude))
        if np.abs(even - self.longitude).max() > 2e-3:
            raise UserError(
                "expected columns evenly spaced around the globe for spectral coefficients, got "
                f"{len(self.longitude)} from {self.longitude[0]:g} to {self.longitude[-1]:g}; leave the coefficients out with "
                "data.source.select.gridType"
            )

    def __call__(self, values: Field) -> Field:
        return self._on_grid(self._coefficients(values), "STANDARD")[0]

    def wind(self, vorticity: Field, divergence: Field) -> tuple[Field, Field]:
        """Return eastward and northward wind of the values of two messages.

        V = k × ∇ψ + ∇χ with ∇²ψ = ζ and ∇²χ = δ; of the spherical harmonic of degree n, ∇² is −n (n + 1) / a².
        """
        degree = _degrees(self.truncation).astype(float)
        inverse = np.divide(-(_EARTH_RADIUS**2), degree * (degree + 1), where=degree > 0, out=np.zeros_like(degree))
        (psi_south, psi_east), (chi_south, chi_east) = (
            self._on_grid(self._coefficients(x) * inverse, "DERIV1") / _EARTH_RADIUS for x in (vorticity, divergence)
        )
        return psi_south + chi_east, psi_east - chi_south

    @property
    def _around(self) -> int:
        """Return the number of columns around the globe."""
        return round(360.0 / float(np.diff(self.longitude).mean())) if len(self.longitude) > 1 else 1

    def _coefficients(self, values: Field) -> NDArray[np.complex128]:
        order = np.repeat(np.arange(self.truncation + 1), np.arange(self.truncation + 1, 0, -1))
        return (values[0::2] + 1j * values[1::2]) * np.sqrt(4 * np.pi) * (1.0 - 2 * (order % 2))

    def _on_grid(self, coefficients: NDArray[np.complex128], mode: str) -> Field:
        """Return (1, H, W), or the derivatives (2, H, W) to the south and to the east on the unit sphere."""
        height, around = len(self.latitude), self._around
        fields: Field = library().sht.synthesis(
            alm=coefficients[None],
            theta=np.deg2rad(90.0 - self.latitude),
            lmax=self.truncation,
            mmax=self.truncation,
            nphi=np.full(height, around, np.uintp),
            phi0=np.full(height, np.deg2rad(self.longitude[0])),
            ringstart=np.arange(height, dtype=np.uintp) * around,
            spin=0 if mode == "STANDARD" else 1,
            mode=mode,
        )
        return fields.reshape(-1, height, around)[:, :, : len(self.longitude)]


@lru_cache(maxsize=8)
def _degrees(truncation: int) -> NDArray[np.int64]:
    """Return the degree n of each coefficient in its order."""
    return np.concatenate([np.arange(m, truncation + 1) for m in range(truncation + 1)])
