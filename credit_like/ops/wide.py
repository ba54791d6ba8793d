"""Convolutions with wide kernels and few outputs, in the form that suits the matrix units of a GPU.

A convolution is a matrix product with one column for each output channel, which a GPU computes in tiles of 64 to 256 columns.
The first embedding of a WXFormer has kernels up to 32 × 32 with 16 outputs, and most of each tile is wasted: on an H200
cuDNN reached 6 to 10 % of the peak, and these convolutions took 39 % of a training step at 0.25°. Here each column of the
kernel has output channels of its own, and the partial results are added, each shifted by its column. That is the same number
of operations in a product with 64 to 256 columns, and one more image that is written and read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from credit_like.ops.windows import Pair, channels_first, channels_last

FEW = 64  # outputs, the narrowest tile
WIDE = 4  # strides: narrower kernels do not fill a tile this way either
_ALIGNED = 4  # channels of float32 that a matrix unit reads at once


def applies(x: Tensor, weights: list[Tensor], stride: int) -> bool:
    """Return whether the image is on a GPU, and this form suits the kernels."""
    return x.device.type == "cuda" and suits(weights, stride)


def suits(weights: list[Tensor], stride: int) -> bool:
    """Return whether one of the kernels is wide and has few outputs."""
    return any(w.shape[0] < FEW and w.shape[-1] >= WIDE * stride for w in weights)


def cross_embed(
    x_BHWC: Tensor, weights: list[Tensor], biases: list[Tensor], stride: int, pads: Pair, size: Pair, shifts: list[int]
) -> list[Tensor]:
    """Return the branches of a cross embedding, each (B, rows, columns, out); backward saves one image for all.

    weights: (out, in, k, k), narrowest first. pads: zero rows and columns before the image. size: rows and columns of the
    result. shifts: first row and column of the padded image that each kernel reads.
    """
    (rows, columns), widest = size, weights[-1].shape[-1]
    height, groups = (rows - 1) * stride + widest, columns - 1 + _groups(widest, stride)
    channels = _groups(x_BHWC.shape[3], _ALIGNED) * _ALIGNED
    after = (height - x_BHWC.shape[1] - pads[0], groups * stride - x_BHWC.shape[2] - pads[1])
    zeros = (0, channels - x_BHWC.shape[3], pads[1], after[1], pads[0], after[0])
    # Columns in groups of a stride, whose channels lie one after the other.
    x_BHMG = functional.pad(x_BHWC, zeros).reshape(x_BHWC.shape[0], height, groups, stride * channels)
    branches = []
    for weight, bias, shift in zip(weights, biases, shifts, strict=True):
        kernel = weight.shape[-1]
        first, before = divmod(shift, stride)
        taps = _groups(before + kernel, stride)
        weight = functional.pad(
            weight, (before, taps * stride - before - kernel, 0, 0, 0, channels - weight.shape[1])
        ).unflatten(3, (taps, stride))
        weight = weight.permute(3, 0, 4, 1, 2).reshape(-1, stride * channels, kernel, 1)
        read = x_BHMG.narrow(1, shift, (rows - 1) * stride + kernel)
        partial = channels_last(functional.conv2d(channels_first(read), weight, stride=(stride, 1)))
        y: Tensor = _SumOfTaps.apply(partial, taps, first, columns)
        branches.append(y + bias.to(y.dtype))
    return branches


def _groups(number: int, size: int) -> int:
    """Return how many groups of a size hold this number."""
    return -(-number // size)


class _SumOfTaps(torch.autograd.Function):
    """(B, H, W, taps · out) to (B, H, columns, out): y[w] = sum_j x[first + w + j, j]. The sum is in float32 or wider.

    Automatic differentiation would make an image of zeros for each tap.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: int, first: int, columns: int) -> Tensor:
        ctx.taps, ctx.first, ctx.width = taps, first, x.shape[2]
        parts = x.unflatten(3, (taps, -1)).unbind(3)
        total = parts[0].narrow(2, first, columns).to(torch.promote_types(x.dtype, torch.float32))
        for j, part in enumerate(parts[1:], 1):
            total = total + part.narrow(2, first + j, columns)
        return total.to(x.dtype) if total.dtype != x.dtype else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        after = ctx.width - grad.shape[2] - ctx.first
        shifted = [functional.pad(grad, (0, 0, ctx.first + j, after - j)) for j in range(ctx.taps)]
        return torch.stack(shifted, 3).flatten(3), None, None, None
