"""Errors of the amplitude and the phase of every zonal wavenumber, row by row.

The mean square error of a forecast that cannot know the phase of small waves is smallest if it has none of them. Here the
amplitude is judged apart from the phase, so that a forecast keeps the truth's energy at every wavenumber. The form of the
terms follows Subich et al. (2025, arXiv:2501.19374), who take the coefficients of spherical harmonics instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from torch import Tensor

_SMALL = 0.01
"""Below this amplitude relative to the truth's, the phase of a prediction counts less and less, so that its gradient stays
finite; the larger of two energies is rounded off where they differ by less."""
_ABSENT = 1e-6
"""Amplitude, relative to that of all waves of the row, below which a wave of the truth has an amplitude but no phase."""


takes_valid = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["spectral"] = "spectral"
    phase_weight: float = Field(default=1.0, ge=0)
    """Weight of the error in phase relative to that in amplitude."""


def rowwise(config: Config, error: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return Σ_k n_k [(|p_k| − |t_k|)² + 2 φ max(|p_k|², |t_k|²)(1 − cos Δ_k)] + (p_0 − t_0)² of each row, at its points.

    p_k and t_k are the Fourier coefficients of prediction and target along a whole circle of longitude, n_k = 2 (1 for the
    highest wavenumber of an even number of points), Δ_k their difference in phase, and φ the `phase_weight`. Were the
    maximum |p_k||t_k| and φ = 1, this would be the mean square error of the row (Parseval). The maximum m is smooth:
    2m = |p|² + |t|² + √((|p|² − |t|²)² + 10⁻⁴(|p|² + |t|²)²).

    In a row of which some points have no data (`valid`), the waves are those of the difference from the truth's mean over the
    others, 0 where there are no data, and the sum is divided by the share of points that have data.
    """
    import torch

    width = error.shape[-1]
    # The mean over the row changes no wavenumber above 0, and its size would only cost accuracy.
    if valid is None:
        target = target - target.mean(-1, keepdim=True)
    else:
        share = valid.to(target.dtype).mean(-1, keepdim=True).clamp_min(1 / width)
        target = torch.where(valid, target - target.mean(-1, keepdim=True) / share, 0)
    difference, truth = (
        torch.fft.rfft(x.to(torch.promote_types(x.dtype, torch.float32)), norm="forward") for x in (error, target)
    )
    mean, difference, truth = difference[..., 0].real.square(), difference[..., 1:], truth[..., 1:]
    counts = torch.full((difference.shape[-1],), 2.0, dtype=mean.dtype, device=mean.device)
    if width % 2 == 0:
        counts[-1] = 1.0
    guess = truth + difference
    energy, true_energy = _energy(guess), _energy(truth)
    tiny = torch.finfo(mean.dtype).tiny
    size = (torch.maximum(energy, _SMALL**2 * true_energy) + tiny).sqrt()
    true_size = (true_energy + tiny).sqrt()
    cosine = (guess.real * truth.real + guess.imag * truth.imag) / (size * true_size)
    amplitude = ((energy + tiny).sqrt() - true_size).square()
    # A wave of the truth that consists of rounding errors has no meaningful phase.
    certain = true_energy / (true_energy + _ABSENT**2 * true_energy.sum(-1, keepdim=True) + tiny)
    both = energy + true_energy
    larger = (both + ((energy - true_energy).square() + (_SMALL * both).square() + tiny).sqrt()) / 2
    phase = 2.0 * larger * (1.0 - cosine) * certain
    rows = mean + ((amplitude + config.phase_weight * phase) * counts).sum(-1)
    return (rows[..., None] if valid is None else rows[..., None] / share).expand(error.shape)


def _energy(coefficients: Tensor) -> Tensor:
    return coefficients.real.square() + coefficients.imag.square()
