"""Convolutions by the fastest of three algorithms: direct, Winograd or Fourier."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from credit_like.ops.cpu import direct, fourier, policy, weight_cache, winograd
from credit_like.ops.cpu.function import contiguous
from credit_like.ops.windows import Pair


def conv3x3(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, pad_rows: Pair, pad_cols: Pair, layer: nn.Module | None
) -> Tensor:
    """Compute `ops.conv3x3`, directly or with Winograd's algorithm, of which the products are MKL's."""
    if policy.prefers_onednn(x_BHWC):
        return direct.conv(x_BHWC, weight, bias, 1, pad_rows, pad_cols)
    points = math.prod(x_BHWC.shape[:3])
    cached = layer is not None and not torch.is_grad_enabled() and points <= policy.WINOGRAD_CACHED[1]
    forward, backward = policy.by_winograd(points, weight.shape[1], weight.shape[0], cached=cached)
    if cached and forward:
        taps = weight_cache.cached(layer, lambda: winograd.transform_weights(weight), [weight])
        return winograd.correlate_transformed(x_BHWC, taps, weight.shape[0], bias, pad_rows, pad_cols)
    weight_cache.forget(layer)
    if backward:
        return winograd.conv3x3(x_BHWC, weight, bias, pad_rows, pad_cols, forward=forward)
    return direct.conv(x_BHWC, weight, bias, 1, pad_rows, pad_cols)


def cross_embed(
    x_BHWC: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    pads: list[tuple[Pair, Pair]],
    shifts: list[int],
    size: Pair,
    before: Pair,
    layer: nn.Module | None,
) -> Tensor:
    """Compute `ops.cross_embed`; wide kernels, which come last, go through the Fourier transform together.

    pads: rows and columns of zeros for each kernel; shifts: o_k; size: rows and columns of the output; before: rows and
    columns of zeros before the widest kernel.
    """
    x_BHWC = contiguous(x_BHWC)
    channels = x_BHWC.shape[-1]
    narrow = sum(not policy.by_fourier(*size, w.shape[-1], stride, channels, w.shape[0]) for w in weights)
    branches = [
        direct.conv(x_BHWC, weight, bias, stride, *pad)
        for weight, bias, pad in zip(weights[:narrow], biases[:narrow], pads[:narrow], strict=True)
    ]
    if narrow < len(weights):
        y = _through_fourier(x_BHWC, weights[narrow:], shifts[narrow:], stride, size, before, layer)
        branches.append(y + torch.cat(biases[narrow:]))
    return torch.cat(branches, dim=-1) if len(branches) > 1 else branches[0]


def _through_fourier(
    x_BHWC: Tensor,
    weights: list[Tensor],
    shifts: list[int],
    stride: int,
    size: Pair,
    before: Pair,
    layer: nn.Module | None,
) -> Tensor:
    """Return the convolutions with these kernels, concatenated, without their biases."""
    taps, outputs = -(-weights[-1].shape[-1] // stride), sum(weight.shape[0] for weight in weights)
    tile = fourier.tile_size(*size, taps, stride * stride * x_BHWC.shape[-1], outputs)
    geometry = (stride, size[0] + taps - 1, size[1] + taps - 1, before)

    def framed() -> Tensor:
        return fourier.frame(weights, shifts, taps, stride)

    if torch.is_grad_enabled():
        weight_cache.forget(layer)
        return fourier.correlate(x_BHWC, framed(), tile, geometry)
    key = (tile, taps, stride, tuple(shifts))
    transformed = weight_cache.cached(layer, lambda: fourier.transform_weights(framed(), tile), weights, key)
    return fourier.correlate_transformed(x_BHWC, transformed, taps, tile, geometry)
