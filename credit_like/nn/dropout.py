"""Dropout and stochastic depth whose masks are functions of their place alone.

A mask depends on the key of the sample (seed, optimiser step, initial time, member and lead; see `nn.noise`) and of the
layer, on the site in the layer, and on the position in the image. It is therefore the same on any number of ranks, when a layer is
recomputed and after a restart. Without keys nothing is dropped.

References: dropout, Srivastava et al., J. Mach. Learn. Res. 15, 1929 (2014); stochastic depth, Huang et al., ECCV 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor

from credit_like.nn.layer import Layer
from credit_like.nn.noise import GAMMA, absorb, mix
from credit_like.nn.place import WHOLE, Place, points

FIRST_SITE = 256
"""The first number from which a model derives the keys of its layers. Smaller ones are the levels of `nn.noise.Noise`."""

_STEPS = 1 << 16  # a rate is rounded to a multiple of 1 / _STEPS


def _dropped(rate: float) -> int:
    return min(round(rate * _STEPS), _STEPS - 1)


def gain(rate: float) -> float:
    """Return 1 / (1 - rate), by which the remaining values are multiplied.

    It is no part of a mask, because in bfloat16 it would be rounded by up to 0.4 %, the same for all values.
    """
    return _STEPS / (_STEPS - _dropped(rate))


def mask(
    key_B: Tensor,
    site: int,
    rate: float,
    shape: tuple[int, int],
    places: tuple[Place, Place],
    channels: range,
    dtype: torch.dtype,
) -> Tensor:
    """Return factors (B, H, W, channels), 0 with the probability `rate` and 1 else.

    shape: (H, W). places: of these rows and columns in the whole image. channels: their numbers in the whole layer. Each
    hash decides four channels.
    """
    device = key_B.device
    groups = torch.arange(channels.start // 4, -(-channels.stop // 4), device=device)
    bits = mix(
        (absorb(key_B, site)[:, None, None, None] ^ ((points(places, shape, device)[..., None] << 20) + groups)) * GAMMA
    )
    parts = torch.stack([(bits >> shift) & (_STEPS - 1) for shift in (0, 16, 32, 48)], -1).flatten(-2)
    first = channels.start % 4
    return (parts[..., first : first + len(channels)] >= _dropped(rate)).to(dtype)


def path_factors(key_B: Tensor, site: int, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the factor (B, 1, 1, 1) of a residual branch: 0 with the probability `rate` and 1 else."""
    return ((mix(absorb(key_B, site)) & (_STEPS - 1)) >= _dropped(rate)).to(dtype)[:, None, None, None]


class Dropout(Layer):
    """Set values to zero with the probability `rate` and multiply the others by 1 / (1 - rate)."""

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        self.rate, self.site = rate, site
        self.places = WHOLE
        """The rows and columns that the input has, in the whole image."""

    def forward(self, x_BHWC: Tensor, key_B: Tensor | None = None, first_channel: int = 0) -> Tensor:
        """Drop values of (B, H, W, C) by the key of each sample, int64; without keys return the input.

        `first_channel` is the number of the input's first channel in the whole layer.
        """
        if key_B is None:
            return x_BHWC
        _, height, width, count = x_BHWC.shape
        channels = range(first_channel, first_channel + count)
        kept = mask(key_B, self.site, self.rate, (height, width), self.places, channels, x_BHWC.dtype)
        return x_BHWC * kept * gain(self.rate)
