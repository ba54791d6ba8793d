"""The arithmetic behind the layers, as functions of plain tensors: padding is always given explicitly.

A layer on the whole image and its twin on a band of rows call the same function; the twin brings its halo rows and asks
for no zero rows there. Tensors are (B, H, W, C) unless a name says otherwise; strides in memory are free.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Pair = tuple[int, int]


def channels_first(x_BHWC: Tensor) -> Tensor:
    """(B, H, W, C) seen as (B, C, H, W)."""
    return x_BHWC.permute(0, 3, 1, 2)


def channels_last(x_BCHW: Tensor) -> Tensor:
    """(B, C, H, W) seen as (B, H, W, C)."""
    return x_BCHW.permute(0, 2, 3, 1)


def conv3x3(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, *, pad_rows: Pair = (1, 1), pad_cols: Pair = (1, 1)
) -> Tensor:
    """A 3 x 3 convolution, stride 1, after adding zero rows (before, after) and columns; weight (out, in, 3, 3)."""
    x_BCHW = channels_first(x_BHWC)
    if pad_rows[0] == pad_rows[1] and pad_cols[0] == pad_cols[1]:
        return channels_last(functional.conv2d(x_BCHW, weight, bias, padding=(pad_rows[0], pad_cols[0])))
    return channels_last(functional.conv2d(functional.pad(x_BCHW, (*pad_cols, *pad_rows)), weight, bias))


def conv_transpose(
    x_BHWC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    *,
    crop_rows: Pair = (0, 0),
    crop_cols: Pair = (0, 0),
) -> Tensor:
    """A transposed convolution whose full output, (H - 1) stride + k rows, loses rows (before, after) and columns.

    weight (in, out, k, k).
    """
    y_BCHW = functional.conv_transpose2d(channels_first(x_BHWC), weight, bias, stride=stride)
    height, width = y_BCHW.shape[-2:]
    y_BCHW = y_BCHW[..., crop_rows[0] : height - crop_rows[1], crop_cols[0] : width - crop_cols[1]]
    return channels_last(y_BCHW)


def cross_embed(
    x_BHWC: Tensor, weights: list[Tensor], biases: list[Tensor], stride: int, *, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """Convolutions of one stride and several kernels over one image, concatenated along channels.

    pad_rows, pad_cols: zero rows (columns) before and after, counted for the widest kernel K (the last). With v the image
    so padded, output i of a kernel k is sum_j v[i stride + o_k + j] w[j], o_k = floor((K - s)/2) - floor((k - s)/2); there are
    (rows of v - K) // stride + 1 of them.
    """
    widest = weights[-1].shape[-1]
    height = (x_BHWC.shape[1] + sum(pad_rows) - widest) // stride + 1
    width = (x_BHWC.shape[2] + sum(pad_cols) - widest) // stride + 1
    x_BCHW = channels_first(x_BHWC)
    branches = []
    for weight, bias in zip(weights, biases, strict=True):
        kernel = weight.shape[-1]
        shift = (widest - stride) // 2 - (kernel - stride) // 2
        rows = _pads(x_BHWC.shape[1], pad_rows[0] - shift, height, kernel, stride)
        cols = _pads(x_BHWC.shape[2], pad_cols[0] - shift, width, kernel, stride)
        branches.append(functional.conv2d(functional.pad(x_BCHW, (*cols, *rows)), weight, bias, stride=stride))
    return channels_last(torch.cat(branches, dim=1))


def _pads(size: int, before: int, outputs: int, kernel: int, stride: int) -> Pair:
    """(before, after) such that a valid convolution gives exactly `outputs`; negative numbers crop."""
    return before, (outputs - 1) * stride + kernel - size - before


def window_attention(qkv_NLC: Tensor, bias_LL: Tensor, dim_head: int) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v in each window and head; (N, L, h 3 d) to (N, L, h d)."""
    windows, length, _ = qkv_NLC.shape
    q, k, v = qkv_NLC.view(windows, length, -1, 3, dim_head).permute(3, 0, 2, 1, 4)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_LL.to(q.dtype))
    return attended.transpose(1, 2).flatten(2)


def pixel_shuffle(x_BHWC: Tensor, factor: int) -> Tensor:
    """(B, H, W, C f^2) to (B, f H, f W, C); channel c f^2 + f i + j goes to row offset i, column offset j."""
    batch, height, width, channels = x_BHWC.shape
    x = x_BHWC.unflatten(-1, (channels // factor**2, factor, factor)).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, height * factor, width * factor, channels // factor**2)
