"""The cross-embedding layer: parallel strided convolutions with several kernel sizes. Tensors are (B, H, W, C)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from credit_like import ops
from credit_like.nn import initial_values
from credit_like.nn.layer import Layer
from credit_like.nn.spectral_norm import NormalisedLayer, SpectralNorm


def branch_widths(dim: int, branches: int) -> list[int]:
    """Return the channels of each branch: dim/2, dim/4, …; the last branch takes the remainder."""
    widths = [dim // 2**i for i in range(1, branches)]
    return [*widths, dim - sum(widths)]


def zero_padding(kernel: int, stride: int) -> tuple[int, int]:
    """Return the zero rows (columns) before and after, such that every branch gives floor(size / stride) outputs.

    They are kernel - stride in total.
    """
    before = (kernel - stride) // 2
    return before, kernel - stride - before


class Branch(NormalisedLayer):
    """The weights of one branch's convolution: weight (out, in, k, k), bias (out,)."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, *, spectral_norm: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, kernel, kernel))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.spectral = SpectralNorm(tuple(self.weight.shape)) if spectral_norm else None

    def initial(self, _leaf: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return values uniform within 1/sqrt(fan in)."""
        return initial_values.uniform(shape, self.weight.shape[1:].numel(), generator)


class CrossEmbed(Layer):
    """Convolutions with kernels k_0 < k_1 < … and one stride s, concatenated along channels.

    Output row r of a kernel k reads input rows r s - p_k … r s - p_k + k - 1, p_k = floor((k - s)/2), zeros outside.
    """

    shard_unit = True
    recompute = "never"  # backward needs nothing but the input

    def __init__(
        self, in_channels: int, dim: int, kernel_sizes: tuple[int, ...], stride: int, *, spectral_norm: bool = False
    ) -> None:
        super().__init__()
        self.kernel_sizes, self.stride = tuple(sorted(kernel_sizes)), stride
        widths = branch_widths(dim, len(self.kernel_sizes))
        self.convs = nn.ModuleList(
            Branch(in_channels, width, kernel, spectral_norm=spectral_norm)
            for width, kernel in zip(widths, self.kernel_sizes, strict=True)
        )

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the effective weights and the biases of all branches, narrowest kernel first."""
        return [c.effective_weight() for c in self.convs], [c.bias for c in self.convs]  # type: ignore[operator, misc]

    def forward(self, x_BHWC: Tensor) -> Tensor:
        """Map (B, H, W, C) to (B, floor(H/s), floor(W/s), dim)."""
        padding = zero_padding(self.kernel_sizes[-1], self.stride)
        weights, biases = self.weights()
        return ops.cross_embed(x_BHWC, weights, biases, self.stride, pad_rows=padding, pad_cols=padding, layer=self)
