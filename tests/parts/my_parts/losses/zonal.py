"""The squared error of each circle of latitude, its wavenumbers weighted.

L(h) = Σ_k w_k |ê_k|² / W², with ê the Fourier transform of the row's error of W points, k and −k counted both, and
w_k = 1 + sharpness · k / (W / 2). By Parseval's theorem it is the mean squared error of the row where sharpness is 0.
Every row has its own number, so bands of rows need nothing of each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


class Config(LossConfig):
    type: Literal["zonal"] = "zonal"
    sharpness: float = 1.0
    """How much more the shortest wave counts than the mean."""


def pointwise(config: Config, error: Tensor) -> Tensor:
    """(…, H, W) to (…, H, W): each row's loss at each of its points."""
    import torch

    width = error.shape[-1]
    k = torch.arange(width // 2 + 1, dtype=error.dtype, device=error.device)
    twice = torch.where((k == 0) | (2 * k == width), 1.0, 2.0)
    power = torch.fft.rfft(error).abs().square() * twice * (1 + config.sharpness * 2 * k / width)
    return (power.sum(-1, keepdim=True) / width**2).expand_as(error)
