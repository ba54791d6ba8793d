"""Layers as single functions for the CPU: channels last, few passes over memory, backward from as little as it needs.

Each equals its plain composition to rounding. What is cheap to make again from what is kept (normalised values, attention
probabilities, activations) is made again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from credit_like.nn import fourier

Pair = tuple[int, int]
aten = torch.ops.aten


class _Nothing:
    """What a function's forward is given where no backward will follow."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def call(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """The function of the arguments; without gradients its forward alone, for autograd's part takes time even then."""
    y: Tensor = function.apply(*arguments) if torch.is_grad_enabled() else function.forward(_Nothing(), *arguments)
    return y


def channels_first(x_BHWC: Tensor) -> Tensor:
    """(B, H, W, C) seen as (B, C, H, W)."""
    return x_BHWC.permute(0, 3, 1, 2)


def channels_last(x_BCHW: Tensor) -> Tensor:
    """(B, C, H, W) seen as (B, H, W, C)."""
    return x_BCHW.permute(0, 2, 3, 1)


def in_order(x_BHWC: Tensor) -> Tensor:
    """The same image, contiguous. An image at a time, for a transposition of two dimensions is quicker than one of four."""
    if x_BHWC.is_contiguous():
        return x_BHWC
    return torch.stack([image.flatten(0, 1).contiguous().view(image.shape) for image in x_BHWC.unbind(0)])


class _PixelShuffle(torch.autograd.Function):
    """One strided copy for each offset, forth and back."""

    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, factor: int) -> Tensor:
        batch, height, width, channels = x_BHWC.shape
        y = x_BHWC.new_empty(batch, height, factor, width, factor, channels // factor**2)
        x = x_BHWC.unflatten(-1, (-1, factor, factor))
        for i in range(factor):
            for j in range(factor):
                y[:, :, i, :, j] = x[..., i, j]
        ctx.factor = factor
        return y.view(batch, height * factor, width * factor, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWC: Tensor) -> tuple[Tensor, None]:
        batch, height, width, channels = g_BHWC.shape
        factor = ctx.factor
        g = g_BHWC.unflatten(2, (-1, factor)).unflatten(1, (-1, factor))
        dx = g_BHWC.new_empty(batch, height // factor, width // factor, channels, factor, factor)
        for i in range(factor):
            for j in range(factor):
                dx[..., i, j] = g[:, :, i, :, j]
        return dx.flatten(3), None


def pixel_shuffle(x_BHWC: Tensor, factor: int) -> Tensor:
    """See `kernels.pixel_shuffle`."""
    return call(_PixelShuffle, x_BHWC, factor)


class _NormSilu(torch.autograd.Function):
    """SiLU(GroupNorm(x)); keeps x, its means and deviations."""

    @staticmethod
    def forward(ctx: Any, x_BHWC: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        x_BHWC = x_BHWC.contiguous()
        x_BCHW = channels_first(x_BHWC)
        batch, channels, height, width = x_BCHW.shape
        sizes = (batch, channels, height * width, groups)
        normed, mean, rstd = torch.native_group_norm(x_BCHW, weight, bias, *sizes, eps)
        ctx.save_for_backward(x_BHWC, weight, bias, mean, rstd)
        ctx.sizes = sizes
        return channels_last(aten.silu_(normed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWC: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x_BHWC, weight, bias, mean, rstd = ctx.saved_tensors
        groups = mean.shape[1]
        scale_BC = (rstd[..., None] * weight.view(groups, -1)).flatten(1)
        shift_BC = bias - (mean[..., None] * scale_BC.unflatten(1, (groups, -1))).flatten(1)
        normed = torch.addcmul(shift_BC[:, None, None], x_BHWC, scale_BC[:, None, None])
        # The kernel takes it for granted that both have one order in memory.
        g = channels_first(aten.silu_backward(g_BHWC.contiguous(), normed))
        x_BCHW = channels_first(x_BHWC)
        dx, dw, db = aten.native_group_norm_backward(g, x_BCHW, mean, rstd, weight, *ctx.sizes, (True, True, True))
        return channels_last(dx), dw, db, None, None


def norm_silu(x_BHWC: Tensor, norm: tuple[Tensor, Tensor, float], groups: int) -> Tensor:
    """See `kernels.norm_silu`."""
    weight, bias, eps = norm
    return call(_NormSilu, x_BHWC, weight, bias, groups, eps)


class _Conv(torch.autograd.Function):
    """A convolution in channels-last order, whose weight gradient is a matrix product per tap.

    The library's own weight gradient runs at half the speed of its forward in this order, and much less with few channels.
    Where there are fewer points than outputs it is cheaper to reorder the points than the weights: then forward and both
    gradients are one matrix product each of the columns (every point's neighbourhood) and the weights as they are stored.
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
            y_NO = _widen(_columns(x_BHWC, weight, stride, pad_rows, pad_cols).t(), weight.flatten(1), bias)
            return y_NO.contiguous().view(-1, rows, columns, weight.shape[0])
        return direct_conv(x_BHWC, weight, bias, stride, pad_rows, pad_cols)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_BHWO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x_BHWC, weight = ctx.saved_tensors
        g_BHWO = g_BHWO.contiguous()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            gradient = _input_gradient_by_columns if ctx.by_columns else direct_input_gradient
            dx = gradient(g_BHWO, x_BHWC, weight, *ctx.geometry)
        if ctx.needs_input_grad[1]:
            if ctx.by_columns:
                columns = _columns(x_BHWC, weight, *ctx.geometry)
                dw = _matrix_gradient(g_BHWO, columns.t()).view(weight.shape)
            else:
                dw = _weight_gradient(g_BHWO, x_BHWC, weight, *ctx.geometry)
        if ctx.needs_input_grad[2]:
            db = g_BHWO.sum((0, 1, 2))
        return dx, dw, db, None, None, None


def _output_size(x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Pair:
    kernel = weight.shape[-1]
    rows = (x_BHWC.shape[1] + sum(pad_rows) - kernel) // stride + 1
    return rows, (x_BHWC.shape[2] + sum(pad_cols) - kernel) // stride + 1


def _columns(x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """Every output point's neighbourhood, a column: (C k k, B h w), rows in the order of the weights."""
    padded = channels_first(functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows)))
    return functional.unfold(padded, weight.shape[-1], stride=stride).transpose(0, 1).flatten(1)


def _input_gradient_by_columns(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    batch, height, width, _ = x_BHWC.shape
    columns = (weight.flatten(1).t() @ g_BHWO.view(-1, weight.shape[0]).t()).unflatten(1, (batch, -1)).transpose(0, 1)
    size = (height + sum(pad_rows), width + sum(pad_cols))
    padded = channels_last(functional.fold(columns, size, weight.shape[-1], stride=stride))
    return functional.pad(padded, (0, 0, -pad_cols[0], -pad_cols[1], -pad_rows[0], -pad_rows[1])).contiguous()


def _zero_pad(x_BHWC: Tensor, pad_rows: Pair, pad_cols: Pair) -> tuple[Tensor, Pair]:
    """(B, C, H, W) and the symmetric padding that is left to the convolution."""
    if min(*pad_rows, *pad_cols) >= 0 and pad_rows[0] == pad_rows[1] and pad_cols[0] == pad_cols[1]:
        return channels_first(x_BHWC), (pad_rows[0], pad_cols[0])
    return channels_first(functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows))), (0, 0)


def direct_conv(
    x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """The library's convolution, without its derivative."""
    padded, padding = _zero_pad(x_BHWC, pad_rows, pad_cols)
    return channels_last(torch.convolution(padded, weight, bias, (stride, stride), padding, (1, 1), False, (0, 0), 1))


def direct_input_gradient(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """The library's gradient of the input x, of which only the size matters."""
    padded, padding = _zero_pad(x_BHWC, pad_rows, pad_cols)
    dx_BCHW = aten.convolution_backward(
        channels_first(g_BHWO),
        padded,
        weight,
        None,
        (stride, stride),
        padding,
        (1, 1),
        False,
        (0, 0),
        1,
        (True, False, False),
    )[0]
    dx = channels_last(dx_BCHW)
    if dx.shape != x_BHWC.shape:  # the zero rows and columns were explicit: take them off
        dx = functional.pad(dx, (0, 0, -pad_cols[0], -pad_cols[1], -pad_rows[0], -pad_rows[1]))
    return dx.contiguous()


def _weight_gradient(
    g_BHWO: Tensor, x_BHWC: Tensor, weight: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair
) -> Tensor:
    """dw[a, b] = sum over outputs of x[s i + a, s j + b] g[i, j], one matrix product for a row of taps of each phase.

    With the rows of the phase image laid end to end and g widened by zero columns to the same length of row, a tap is one
    contiguous range of points; g beside itself, once for each tap of a row and shifted by it, meets the same range.
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
    half = stride * channels  # of a phase row: the columns of one kernel row are contiguous
    dw = x.new_empty(taps, stride, taps, outputs, half)
    for a in range(taps):
        for p in range(stride):
            out, points = dw[a, p].flatten(0, 1), slice(a * wide, (a + rows) * wide)
            torch.mm(g[0].t(), x[0, points, p * half : (p + 1) * half], out=out)
            for item in range(1, batch):
                out.addmm_(g[item].t(), x[item, points, p * half : (p + 1) * half])
    size = taps * stride
    dw = dw.permute(3, 0, 1, 2, 4).reshape(outputs, size, size, channels)
    return dw[:, :kernel, :kernel].permute(0, 3, 1, 2).contiguous()


def conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """A convolution after adding zero rows (before, after) and columns; negative numbers crop. weight (out, in, k, k)."""
    return call(_Conv, x_BHWC, weight, bias, stride, pad_rows, pad_cols)


Shape = tuple[int, int, int, int, int, int, int]  # B, four sizes of rows and columns, heads, channels of a head


def window_shape(shape: torch.Size, window: int, dim_head: int, dilated: bool) -> Shape:
    """(B, H, W, h 3 d) seen as (B, rows, rows, columns, columns, h, d): windows x tokens, or `dilated` tokens x windows."""
    batch, height, width, channels = shape
    down, right = height // window, width // window
    rows, columns = ((window, down), (window, right)) if dilated else ((down, window), (right, window))
    return (batch, *rows, *columns, channels // (3 * dim_head), dim_head)


def split_windows(qkv_BHWC: Tensor, shape: Shape, dilated: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, each (windows, heads, tokens, d)."""
    *image, heads, dim_head = shape
    qkv = qkv_BHWC.reshape(*image, heads, 3, dim_head)
    order = (6, 0, 2, 4, 5, 1, 3, 7) if dilated else (6, 0, 1, 3, 5, 2, 4, 7)
    qkv = qkv.permute(order)
    tokens = qkv.shape[5] * qkv.shape[6]
    q, k, v = qkv.reshape(3, -1, heads, tokens, dim_head).contiguous().unbind(0)
    return q, k, v


def join_windows(y_NhLd: Tensor, shape: Shape, dilated: bool) -> Tensor:
    """The inverse for one of them: (windows, heads, tokens, d) to (B, H, W, h d)."""
    batch, r0, r1, c0, c1, heads, dim_head = shape
    order = (0, 4, 1, 5, 2, 3, 6) if dilated else (0, 1, 4, 2, 5, 3, 6)
    sizes = (batch, r1, c1, heads, r0, c0, dim_head) if dilated else (batch, r0, c0, heads, r1, c1, dim_head)
    return y_NhLd.reshape(sizes).permute(order).reshape(batch, r0 * r1, c0 * c1, heads * dim_head)


def _join_one(part_NhLd: Tensor, shape: Shape, dilated: bool, out: Tensor) -> None:
    """(windows, heads, tokens, d) of q, k or v to (B, rows, rows, columns, columns, h, d)."""
    batch, r0, r1, c0, c1, heads, dim_head = shape
    sizes = (batch, r1, c1, heads, r0, c0, dim_head) if dilated else (batch, r0, c0, heads, r1, c1, dim_head)
    order = (0, 4, 1, 5, 2, 3, 6) if dilated else (0, 1, 4, 2, 5, 3, 6)
    out.copy_(part_NhLd.view(sizes).permute(order))


def _probabilities(q: Tensor, k: Tensor, bias_LL: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias): (windows x heads, tokens, tokens)."""
    windows, heads, tokens, dim_head = q.shape
    scores = torch.baddbmm(
        bias_LL.expand(windows * heads, tokens, tokens),
        q.reshape(-1, tokens, dim_head),
        k.reshape(-1, tokens, dim_head).transpose(1, 2),
        alpha=dim_head**-0.5,
    )
    return torch.softmax(scores, dim=-1, out=scores)


class _AttentionBlock(torch.autograd.Function):
    """x + out(attention(qkv(norm(x)))), a band of windows at a time; keeps x, and with `keep` also q, k, v."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        b: Tensor,
        w_qkv: Tensor,
        w_out: Tensor,
        factor: float,
        b_out: Tensor,
        bias_LL: Tensor,
        eps: float,
        window: int,
        dim_head: int,
        dilated: bool,
        keep: bool,
    ) -> Tensor:
        x, y, kept = x.contiguous(), None, []
        widest = x.numel() // x.shape[-1] * max(w_qkv.shape[0], w_qkv.shape[0] // (3 * dim_head) * window**2)
        places = _bands(x.shape[1] // window, widest)
        for place in places:
            x_NHWC = _band(x, window, dilated, place)
            normed = torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)[0]
            qkv = functional.linear(normed, w_qkv)
            del normed
            shape = window_shape(qkv.shape, window, dim_head, dilated)
            q, k, v = split_windows(qkv, shape, dilated)
            if keep:
                kept.append(qkv)
            del qkv
            p = _probabilities(q, k, bias_LL)
            del q, k
            attended = torch.bmm(p, v.reshape(p.shape[0], -1, dim_head)).view(v.shape)
            out = _linear(join_windows(attended, shape, dilated), w_out, factor, b_out, x_NHWC)
            y = _put_band(y, x, window, dilated, place, out)
        ctx.save_for_backward(x, g, b, w_qkv, w_out, bias_LL, *kept)
        ctx.options = (eps, window, dim_head, dilated, factor, places)
        assert y is not None  # there is a band
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, b, w_qkv, w_out, bias_LL, *kept = ctx.saved_tensors
        eps, window, dim_head, dilated, factor, places = ctx.options
        dy, dx, totals = dy.contiguous(), None, None
        for i, place in enumerate(places):
            x_NHWC, dy_NHWC = _band(x, window, dilated, place), _band(dy, window, dilated, place)
            d_out = _times(dy_NHWC, factor)
            normed, mean, rstd = torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)
            qkv = kept[i] if kept else functional.linear(normed, w_qkv)
            shape = window_shape(qkv.shape, window, dim_head, dilated)
            q, k, v = split_windows(qkv, shape, dilated)
            del normed, qkv  # the normalised values are soon made again
            flat = (-1, *q.shape[2:])
            p = _probabilities(q, k, bias_LL)
            attended = join_windows(torch.bmm(p, v.reshape(flat)).view(v.shape), shape, dilated)
            dw_out = _matrix_gradient(d_out, attended)
            d_attended = (d_out.view(-1, d_out.shape[-1]) @ w_out).view(attended.shape)
            del attended, d_out
            d_attended = _split_one(d_attended, shape, dilated).reshape(flat)
            dqkv = x.new_empty(*shape[:6], 3, dim_head)
            _join_one(torch.bmm(p.transpose(1, 2), d_attended), shape, dilated, dqkv[..., 2, :])
            dp = torch.bmm(d_attended, v.reshape(flat).transpose(1, 2))
            ds = aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)
            del p
            d_bias = ds.sum(0)
            scaled = {"beta": 0, "alpha": dim_head**-0.5}
            d_attended.baddbmm_(ds, k.reshape(flat), **scaled)
            _join_one(d_attended, shape, dilated, dqkv[..., 0, :])
            d_attended.baddbmm_(ds.transpose(1, 2), q.reshape(flat), **scaled)
            _join_one(d_attended, shape, dilated, dqkv[..., 1, :])
            del dp, ds, d_attended, q, k, v
            dqkv_NC = dqkv.view(-1, w_qkv.shape[0])
            dw_qkv = _matrix_gradient(dqkv_NC, torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)[0])
            d_normed = (dqkv_NC @ w_qkv).view(x_NHWC.shape)
            del dqkv, dqkv_NC
            some, dg, db = aten.native_layer_norm_backward(
                d_normed, x_NHWC, g.shape, mean, rstd, g, b, (True, True, True)
            )
            dx = _put_band(dx, x, window, dilated, place, some.add_(dy_NHWC))
            found = (dg, db, dw_qkv, dw_out, d_bias)
            totals = found if totals is None else tuple(t.add_(f) for t, f in zip(totals, found, strict=True))
        assert totals is not None  # there is a band
        dg, db, dw_qkv, dw_out, d_bias = totals
        return dx, dg, db, dw_qkv, dw_out, None, dy.sum((0, 1, 2)), d_bias, None, None, None, None, None


BAND = 2**20  # values of the widest tensor of an attention that are worked on at a time


def _bands(rows: int, values: int) -> list[slice]:
    """Rows of windows (dilated: the first rows of their windows), some at a time, of about the same number."""
    size = -(-rows // max(1, min(rows, -(-values // BAND))))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _band_view(x_BHWC: Tensor, window: int, dilated: bool, place: slice) -> Tensor:
    """The band's part of an image: (B, windows, rows, W, C), dilated (B, rows, windows, W, C)."""
    if dilated:
        return x_BHWC.unflatten(1, (window, -1))[:, :, place]
    return x_BHWC.unflatten(1, (-1, window))[:, place]


def _band(x_BHWC: Tensor, window: int, dilated: bool, place: slice) -> Tensor:
    """The windows of a band as an image of their own: (B, fewer rows, W, C), contiguous."""
    return _band_view(x_BHWC, window, dilated, place).flatten(1, 2).contiguous()


def _put_band(image: Tensor | None, like: Tensor, window: int, dilated: bool, place: slice, band: Tensor) -> Tensor:
    """The image with the band in its place: a new one if there is none yet, the band itself if that is all there is."""
    if band.shape == like.shape:
        return band
    image = torch.empty_like(like) if image is None else image
    view = _band_view(image, window, dilated, place)
    view.copy_(band.view(view.shape))
    return image


def _split_one(x_BHWC: Tensor, shape: Shape, dilated: bool) -> Tensor:
    """(B, H, W, h d) to (windows, heads, tokens, d)."""
    *image, heads, dim_head = shape
    order = (0, 2, 4, 5, 1, 3, 6) if dilated else (0, 1, 3, 5, 2, 4, 6)
    x = x_BHWC.view(*image, heads, dim_head).permute(order)
    return x.reshape(-1, heads, x.shape[4] * x.shape[5], dim_head)


def _linear(x: Tensor, weight: Tensor, factor: float, bias: Tensor, residual: Tensor) -> Tensor:
    """residual + factor x W^T + b."""
    y = residual + bias
    y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t(), alpha=factor)
    return y


def _widen(x_NC: Tensor, weight_OC: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b; of few points for the outputs as the transpose of W x^T, which the library shares better between threads."""
    if 2 * x_NC.shape[0] > weight_OC.shape[0]:
        return functional.linear(x_NC, weight_OC, bias)
    y_ON = weight_OC @ x_NC.t() if bias is None else torch.addmm(bias[:, None], weight_OC, x_NC.t())
    return y_ON.t()


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _matrix_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of W in y = x W^T."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def attention_block(
    x_BHWC: Tensor,
    norm: tuple[Tensor, Tensor, float],
    w_qkv: Tensor,
    out: tuple[Tensor, float, Tensor],
    bias_LL: Tensor,
    window: int,
    dim_head: int,
    dilated: bool,
    keep: bool,
) -> Tensor:
    """See `kernels.attention_block`."""
    g, b, eps = norm
    return call(_AttentionBlock, x_BHWC, g, b, w_qkv, *out, bias_LL, eps, window, dim_head, dilated, keep)


class _FeedForwardBlock(torch.autograd.Function):
    """x + contract(GELU(expand(norm(x)))); keeps x, its mean and deviation, and the expanded values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        b: Tensor,
        w_up: Tensor,
        b_up: Tensor,
        w_down: Tensor,
        factor: float,
        b_down: Tensor,
        eps: float,
    ) -> Tensor:
        x = x.contiguous()
        normed, mean, rstd = torch.native_layer_norm(x, g.shape, g, b, eps)
        expanded = _widen(normed.view(-1, x.shape[-1]), w_up, b_up)
        ctx.save_for_backward(x, g, b, w_up, w_down, mean, rstd, expanded)
        ctx.options = (eps, factor)
        return _linear(functional.gelu(expanded), w_down, factor, b_down, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, b, w_up, w_down, mean, rstd, expanded = ctx.saved_tensors
        eps, factor = ctx.options
        dy = dy.contiguous()
        d_out = _times(dy, factor)
        dw_down = _matrix_gradient(d_out, functional.gelu(expanded))
        db_down = dy.sum((0, 1, 2))
        d_expanded = aten.gelu_backward(_widen(d_out.view(-1, dy.shape[-1]), w_down.t()), expanded)
        del d_out
        normed = torch.native_layer_norm(x, g.shape, g, b, eps)[0]
        dw_up = _matrix_gradient(d_expanded, normed)
        db_up = d_expanded.sum(0)
        d_normed = (d_expanded @ w_up).view(x.shape)
        dx, dg, db = aten.native_layer_norm_backward(d_normed, x, g.shape, mean, rstd, g, b, (True, True, True))
        return dx.add_(dy), dg, db, dw_up, db_up, dw_down, None, db_down, None


class _LeanFeedForwardBlock(torch.autograd.Function):
    """The same, but x alone is kept, and a few points at a time are taken through all of it while they are in the cache."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        g: Tensor,
        b: Tensor,
        w_up: Tensor,
        b_up: Tensor,
        w_down: Tensor,
        factor: float,
        b_down: Tensor,
        eps: float,
    ) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, g, b, w_up, b_up, w_down)
        ctx.options = (eps, factor)
        y = torch.empty_like(x)
        for part, x_NC in _portions(x, w_up.shape[0]):
            expanded = _widen(torch.native_layer_norm(x_NC, g.shape, g, b, eps)[0], w_up, b_up)
            out = torch.add(x_NC, b_down, out=y.view(-1, x.shape[-1])[part])
            out.addmm_(aten.gelu_(expanded), w_down.t(), alpha=factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, b, w_up, b_up, w_down = ctx.saved_tensors
        eps, factor = ctx.options
        dy_NC = dy.reshape(-1, x.shape[-1])
        dx = torch.empty_like(x)
        dg, db, dw_up, db_up, dw_down = (torch.zeros_like(w) for w in (g, b, w_up, b_up, w_down))
        for part, x_NC in _portions(x, w_up.shape[0]):
            normed, mean, rstd = torch.native_layer_norm(x_NC, g.shape, g, b, eps)
            expanded = _widen(normed, w_up, b_up)
            d_out = _times(dy_NC[part], factor)
            dw_down.addmm_(d_out.t(), functional.gelu(expanded))
            d_expanded = aten.gelu_backward(_widen(d_out, w_down.t()), expanded)
            dw_up.addmm_(d_expanded.t(), normed)
            db_up += d_expanded.sum(0)
            some = aten.native_layer_norm_backward(
                d_expanded @ w_up, x_NC, g.shape, mean, rstd, g, b, (True, True, True)
            )
            torch.add(some[0], dy_NC[part], out=dx.view(-1, x.shape[-1])[part])
            dg += some[1]
            db += some[2]
        return dx, dg, db, dw_up, db_up, dw_down, None, dy_NC.sum(0), None


PORTION = 2**20  # values of the widest tensor that are worked on at a time
FEWEST = 512  # points of a portion: the weights are read again for each


def _portions(x: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Points (N, C) of x, some at a time, of about the same number."""
    x_NC = x.view(-1, x.shape[-1])
    count = max(1, -(-x_NC.shape[0] * width // PORTION))
    size = max(FEWEST, -(-x_NC.shape[0] // count))
    for start in range(0, x_NC.shape[0], size):
        part = slice(start, start + size)
        yield part, x_NC[part]


def feed_forward_block(
    x_BHWC: Tensor,
    norm: tuple[Tensor, Tensor, float],
    expand: tuple[Tensor, Tensor],
    contract: tuple[Tensor, float, Tensor],
    keep: bool,
) -> Tensor:
    """See `kernels.feed_forward_block`."""
    g, b, eps = norm
    block = _FeedForwardBlock if keep else _LeanFeedForwardBlock
    return call(block, x_BHWC, g, b, *expand, *contract, eps)
