"""Direct convolutions in channels-last order, with weight gradients as matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from credit_like.ops.cpu import fourier, matrix, policy
from credit_like.ops.cpu.function import apply_function
from credit_like.ops.windows import Pair, channels_first, channels_last

aten = torch.ops.aten


class _Conv(torch.autograd.Function):
    """A convolution in channels-last order, whose weight gradient is a matrix product per tap.

    torch's own weight gradient runs at half the speed of its forward in this order, and much slower with few channels.
    If there are fewer points than outputs, it is cheaper to reorder the points than the weights: forward and both
    gradients are then one matrix product each of the columns (every point's neighbourhood) and the weights as stored.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad_rows: Pair, pad_cols: Pair
    ) -> Tensor:
        x_BHWC = x_BHWC.contiguous()
        ctx.save_for_backward(x_BHWC, weight)
        ctx.geometry = (stride, pad_rows, pad_cols)
        rows, columns = _output_size(x_BHWC, weight, stride, pad_rows, pad_cols)
        ctx.by_columns = x_BHWC.shape[0] * rows * columns <= weight.shape[0]
        if ctx.by_columns:
            y_NO = matrix.widen(_columns(x_BHWC, weight, stride, pad_rows, pad_cols).t(), weight.flatten(1), bias)
            return y_NO.contiguous().view(-1, rows, columns, weight.shape[0])
        return convolve(x_BHWC, weight, bias, stride, pad_rows, pad_cols)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_BHWC, weight = ctx.saved_tensors
        g_BHWO = g_BHWO.contiguous()
        dx = dw = db = None
        if all(ctx.needs_input_grad[:2]) and not ctx.by_columns and policy.prefers_onednn(x_BHWC):
            # One call, because torch converts the weights to the order of the image in each.
            stride, pad_rows, pad_cols = ctx.geometry
            dx, dw, _ = _gradients(g_BHWO, x_BHWC, weight, stride, pad_rows, pad_cols, (True, True, False))
            dx = _cropped(dx, pad_rows, pad_cols)
        elif ctx.needs_input_grad[0]:
            gradient = _input_gradient_by_columns if ctx.by_columns else input_gradient
            dx = gradient(g_BHWO, x_BHWC, weight, *ctx.geometry)
        if ctx.needs_input_grad[1] and dw is None:
            if ctx.by_columns:
                columns = _columns(x_BHWC, weight, *ctx.geometry)
                dw = matrix.gradient(g_BHWO, columns.t()).view(weight.shape)
            else:
                by_torch = policy.prefers_onednn(x_BHWC)
                dw = (weight_gradient if by_torch else _weight_gradient_by_taps)(g_BHWO, x_BHWC, weight, *ctx.geometry)
        if ctx.needs_input_grad[2]:
            db = g_BHWO.sum((0, 1, 2))
        return dx, dw, db, None, None, None


def _output_size(x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Pair:
    kernel = weight.shape[-1]
    rows = (x_BHWC.shape[1] + sum(pad_rows) - kernel) // stride + 1
    return rows, (x_BHWC.shape[2] + sum(pad_cols) - kernel) // stride + 1


def _columns(x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """Return the neighbourhood of every output point as columns, (C k k, B h w), rows in the order of the weights."""
    padded = channels_first(functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows)))
    return functional.unfold(padded, weight.shape[-1], stride=stride).transpose(0, 1).flatten(1)


def _input_gradient_by_columns(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    batch, height, width, _ = x_BHWC.shape
    columns = matrix.product(g_BHWO.view(-1, weight.shape[0]), weight.flatten(1)).t()
    columns = columns.unflatten(1, (batch, -1)).transpose(0, 1)
    size = (height + sum(pad_rows), width + sum(pad_cols))
    padded = channels_last(functional.fold(columns, size, weight.shape[-1], stride=stride))
    return functional.pad(padded, (0, 0, -pad_cols[0], -pad_cols[1], -pad_rows[0], -pad_rows[1])).contiguous()


def _is_symmetric(pad_rows: Pair, pad_cols: Pair) -> bool:
    """Return whether torch's convolution can add the zero rows and columns itself, so that they are not explicit."""
    return min(*pad_rows, *pad_cols) >= 0 and pad_rows[0] == pad_rows[1] and pad_cols[0] == pad_cols[1]


def _zero_pad(x_BHWC: Tensor, pad_rows: Pair, pad_cols: Pair) -> tuple[Tensor, Pair]:
    """Return the image (B, C, H, W) with explicit zeros, and the symmetric padding left to the convolution."""
    if _is_symmetric(pad_rows, pad_cols):
        return channels_first(x_BHWC), (pad_rows[0], pad_cols[0])
    return channels_first(functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows))), (0, 0)


def convolve(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """Return torch's convolution, without a derivative."""
    padded, padding = _zero_pad(x_BHWC, pad_rows, pad_cols)
    return channels_last(torch.convolution(padded, weight, bias, (stride, stride), padding, (1, 1), False, (0, 0), 1))


def _gradients(
    g_BHWO: Tensor,
    x_BHWC: Tensor,
    weight: Tensor,
    stride: int,
    pad_rows: Pair,
    pad_cols: Pair,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return torch's gradients of the padded input, the weights and the biases, as far as they are wanted."""
    padded, padding = _zero_pad(x_BHWC, pad_rows, pad_cols)
    g_BOHW, strides = channels_first(g_BHWO), (stride, stride)
    found: tuple[Tensor, Tensor, Tensor] = aten.convolution_backward(
        g_BOHW, padded, weight, None, strides, padding, (1, 1), False, (0, 0), 1, wanted
    )
    return found


def weight_gradient(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """Return torch's gradient of the weights, of which only the shape matters."""
    return _gradients(g_BHWO, x_BHWC, weight, stride, pad_rows, pad_cols, (False, True, False))[1]


def input_gradient(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """Return torch's gradient with respect to the input x, of which only the shape matters."""
    dx_BCHW = _gradients(g_BHWO, x_BHWC, weight, stride, pad_rows, pad_cols, (True, False, False))[0]
    return _cropped(dx_BCHW, pad_rows, pad_cols)


def _cropped(dx_BCHW: Tensor, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """Return torch's gradient of the padded input as that of x."""
    dx = channels_last(dx_BCHW)
    # Explicit rows and columns are removed again. Their number does not show it: one may be added before and one cropped after.
    if not _is_symmetric(pad_rows, pad_cols):
        dx = functional.pad(dx, (0, 0, -pad_cols[0], -pad_cols[1], -pad_rows[0], -pad_rows[1]))
    return dx.contiguous()


def _weight_gradient_by_taps(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """Return dw[a, b] = sum over i, j of x[s i + a, s j + b] g[i, j], by one matrix product per row of taps and phase.

    With the rows of the phase image laid end to end, and g padded with zero columns to the same row length, each tap is
    one contiguous range of points. Shifted copies of g, one for each tap of a row, side by side align all taps of the
    row with one range.
    """
    batch, rows, columns, outputs = g_BHWO.shape
    kernel, channels = weight.shape[-1], x_BHWC.shape[-1]
    taps = -(-kernel // stride)
    wide = columns + taps - 1
    x = fourier.phases(x_BHWC, stride, rows + taps - 1, wide, (pad_rows[0], pad_cols[0])).flatten(1, 2)
    beside = g_BHWO.new_zeros(batch, rows, wide, taps, outputs)
    for b in range(taps):
        beside[:, :, b : b + columns, b] = g_BHWO
    g = beside.view(batch, rows * wide, taps * outputs)
    half = stride * channels  # channels of one row phase, in which a kernel row is contiguous
    dw = x.new_empty(taps, stride, taps, outputs, half)
    for a in range(taps):
        for p in range(stride):
            out, points = dw[a, p].flatten(0, 1), slice(a * wide, (a + rows) * wide)
            for item in range(batch):
                matrix.add_product(out, g[item].t(), x[item, points, p * half : (p + 1) * half], keep=item > 0)
    size = taps * stride
    dw = dw.permute(3, 0, 1, 2, 4).reshape(outputs, size, size, channels)
    return dw[:, :kernel, :kernel].permute(0, 3, 1, 2).contiguous()


def conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """Return a convolution after adding zero rows (before, after) and columns; negative numbers crop.

    weight: (out, in, k, k).
    """
    return apply_function(_Conv, x_BHWC, weight, bias, stride, pad_rows, pad_cols)
