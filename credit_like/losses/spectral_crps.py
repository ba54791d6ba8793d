"""CRPS of the zonal Fourier coefficients of the members of an ensemble, beside that of their values at the points.

The CRPS at each point judges every point by itself. That of the coefficients gives each zonal wavenumber the right spread,
so members keep the energy of small waves. Bonev et al. (2025, arXiv:2507.12144) train on both terms, with spherical
harmonics in place of the coefficients of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


takes_valid = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["spectral-crps"] = "spectral-crps"
    alpha: float = Field(default=0.95, ge=0, le=1)
    """1 = fair, 0 = the CRPS of the empirical distribution; values just below 1 are almost fair."""
    point_weight: float = Field(default=1.0, ge=0)
    """Weight of the CRPS at the points relative to that of the coefficients."""


def of_members(
    config: Config, error_BKCHW: Tensor, others: Iterable[Tensor] = (), valid: Tensor | None = None
) -> Tensor:
    """Return values (B, C, h, W) whose mean along a row is mean_m CRPS_m + point_weight · mean_i CRPS_i.

    CRPS_m is that of a coefficient m = 1, …, W of an orthonormal basis: of the mean, and of the cosine and sine of every
    wavenumber. i counts the points that have data (`valid`); at the others the error has to be 0. The coefficients of a row with
    such points are divided by the root of the share of points that have data, so that they have the variance of the errors there.
    """
    import torch

    from credit_like.losses._pairs import pair_score

    def both(x: Tensor) -> Tensor:
        return torch.cat([coefficients(x), x], 2)

    score = pair_score(config.alpha, both(error_BKCHW), map(both, others), torch.sign)
    of_coefficients, of_points = score.chunk(2, 1)
    of_rows = of_coefficients.mean(-1, keepdim=True)
    if valid is not None:
        of_rows = of_rows / valid.to(score.dtype).mean(-1, keepdim=True).clamp_min(1 / valid.shape[-1]).sqrt()
    return of_rows + config.point_weight * of_points


def coefficients(x: Tensor) -> Tensor:
    """Return the coefficients (…, W) of rows (…, W) in an orthonormal basis: mean, cosines and sines."""
    import torch

    width = x.shape[-1]
    found = torch.fft.rfft(x.to(torch.promote_types(x.dtype, torch.float32)), norm="ortho") * 2**0.5
    cosines, sines = found.real, found.imag[..., 1 : (width + 1) // 2]
    scale = torch.ones(cosines.shape[-1], dtype=cosines.dtype, device=x.device)
    scale[0] = 0.5**0.5
    if width % 2 == 0:
        scale[-1] = 0.5**0.5
    return torch.cat([cosines * scale, sines], -1)
