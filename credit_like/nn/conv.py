"""Convolutions of the decoder, optionally divided by their spectral norm. Tensors are (B, H, W, C)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn import initial_values
from credit_like.nn.spectral_norm import NormalisedLayer, SpectralNorm


@ops.fusible
class Conv2d(NormalisedLayer):
    """A 3 x 3 convolution with stride 1 and one row and column of zeros around the image; weight (out, in, 3, 3).

    subpixel > 1: a pixel shuffle of that factor follows, and the initial values (ICNR, zero bias) avoid a checkerboard.
    """

    def __init__(self, in_channels: int, out_channels: int, *, subpixel: int = 1, spectral_norm: bool = False) -> None:
        super().__init__()
        self.subpixel = subpixel
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 3, 3))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.spectral = SpectralNorm(tuple(self.weight.shape)) if spectral_norm else None

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, in) to (B, H, W, out)."""
        return ops.conv3x3(x_BHWC, self.effective_weight(), self.bias, layer=self)

    def initial(self, leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw uniformly within 1/sqrt(fan in); before a pixel shuffle use ICNR and a zero bias."""
        fan_in = self.weight.shape[1:].numel()
        if self.subpixel == 1:
            return initial_values.uniform(shape, fan_in, generator)
        return initial_values.icnr(shape, self.subpixel, fan_in, generator) if leaf == "weight" else torch.zeros(shape)


class ConvTranspose2d(NormalisedLayer):
    """A transposed convolution; weight (in, out, k, k).

    Input row i contributes to output row r through kernel row r + padding - i stride. The output has (H - 1) stride - 2
    padding + k rows.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 2,
        padding: int = 0,
        spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.spectral = SpectralNorm(tuple(self.weight.shape), output_dim=1) if spectral_norm else None

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, in) to (B, stride H + k - stride - 2 padding, …, out)."""
        crop = (self.padding, self.padding)
        return ops.conv_transpose(
            x_BHWC, self.effective_weight(), self.bias, self.stride, crop_rows=crop, crop_cols=crop
        )

    def initial(self, _leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw uniformly within 1/sqrt(out k^2)."""
        return initial_values.uniform(shape, self.weight.shape[1:].numel(), generator)
