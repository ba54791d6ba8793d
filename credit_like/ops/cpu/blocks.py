"""Fused blocks of layers: channels last, few passes over memory, and few tensors saved for backward.

Each equals its plain composition up to rounding. Cheap intermediates (normalised values, attention probabilities,
activations) are recomputed in backward rather than saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from credit_like.ops import protocols
from credit_like.ops.cpu import matrix, policy
from credit_like.ops.cpu.function import apply_function
from credit_like.ops.windows import (
    channels_first,
    channels_last,
    join_one,
    join_windows,
    split_one,
    split_windows,
    window_shape,
)

aten = torch.ops.aten


class _PixelShuffle(torch.autograd.Function):
    """Pixel shuffle with one strided copy for each offset, forward and backward."""

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
    """Compute `ops.pixel_shuffle`."""
    return apply_function(_PixelShuffle, x_BHWC, factor)


class _NormSilu(torch.autograd.Function):
    """SiLU(GroupNorm(x)); saves x, its means and deviations."""

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
        # The kernel assumes that both have the same memory order.
        g = channels_first(aten.silu_backward(g_BHWC.contiguous(), normed))
        x_BCHW = channels_first(x_BHWC)
        dx, dw, db = aten.native_group_norm_backward(g, x_BCHW, mean, rstd, weight, *ctx.sizes, (True, True, True))
        return channels_last(dx), dw, db, None, None


def norm_silu(x_BHWC: Tensor, norm: protocols.GroupNorm) -> Tensor:
    """Compute `ops.norm_silu`; backward saves only x and its statistics."""
    return apply_function(_NormSilu, x_BHWC, norm.weight, norm.bias, norm.groups, norm.eps)


def _probabilities(q: Tensor, k: Tensor, bias_LL: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias), (windows x heads, tokens, tokens)."""
    windows, heads, tokens, dim_head = q.shape
    scores = torch.baddbmm(
        bias_LL.expand(windows * heads, tokens, tokens),
        q.reshape(-1, tokens, dim_head),
        k.reshape(-1, tokens, dim_head).transpose(1, 2),
        alpha=dim_head**-0.5,
    )
    return torch.softmax(scores, dim=-1, out=scores)


class _AttentionBlock(torch.autograd.Function):
    """x + out(attention(qkv(norm(x)))), one band of windows at a time; saves x, and with `save` also q, k, v."""

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
        save: bool,
    ) -> Tensor:
        x, y, saved = x.contiguous(), None, []
        widest = x.numel() // x.shape[-1] * max(w_qkv.shape[0], w_qkv.shape[0] // (3 * dim_head) * window**2)
        places = _bands(x.shape[1] // window, widest)
        for place in places:
            x_NHWC = _band(x, window, dilated, place)
            normed = torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)[0]
            qkv = _channels(normed, w_qkv.t())
            del normed
            shape = window_shape(qkv.shape, window, dim_head, dilated)
            q, k, v = split_windows(qkv, shape, dilated)
            if save:
                saved.append(qkv)
            del qkv
            p = _probabilities(q, k, bias_LL)
            del q, k
            attended = torch.bmm(p, v.reshape(p.shape[0], -1, dim_head)).view(v.shape)
            out = _linear(join_windows(attended, shape, dilated), w_out, factor, b_out, x_NHWC)
            y = _put_band(y, x, window, dilated, place, out)
        ctx.save_for_backward(x, g, b, w_qkv, w_out, bias_LL, *saved)
        ctx.options = (eps, window, dim_head, dilated, factor, places)
        assert y is not None  # there is at least one band
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, b, w_qkv, w_out, bias_LL, *saved = ctx.saved_tensors
        eps, window, dim_head, dilated, factor, places = ctx.options
        dy, dx, totals = dy.contiguous(), None, None
        for i, place in enumerate(places):
            x_NHWC, dy_NHWC = _band(x, window, dilated, place), _band(dy, window, dilated, place)
            d_out = _times(dy_NHWC, factor)
            normed, mean, rstd = torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)
            qkv = saved[i] if saved else _channels(normed, w_qkv.t())
            shape = window_shape(qkv.shape, window, dim_head, dilated)
            q, k, v = split_windows(qkv, shape, dilated)
            del normed, qkv  # the normalised values are recomputed below
            flat = (-1, *q.shape[2:])
            p = _probabilities(q, k, bias_LL)
            attended = join_windows(torch.bmm(p, v.reshape(flat)).view(v.shape), shape, dilated)
            dw_out = matrix.gradient(d_out, attended)
            d_attended = _channels(d_out, w_out).view(attended.shape)
            del attended, d_out
            d_attended = split_one(d_attended, shape, dilated).reshape(flat)
            dqkv = x.new_empty(*shape[:6], 3, dim_head)
            dqkv[..., 2, :].copy_(join_one(torch.bmm(p.transpose(1, 2), d_attended), shape, dilated))
            dp = torch.bmm(d_attended, v.reshape(flat).transpose(1, 2))
            ds = aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)
            del p
            d_bias = ds.sum(0)
            scaled = {"beta": 0, "alpha": dim_head**-0.5}
            d_attended.baddbmm_(ds, k.reshape(flat), **scaled)
            dqkv[..., 0, :].copy_(join_one(d_attended, shape, dilated))
            d_attended.baddbmm_(ds.transpose(1, 2), q.reshape(flat), **scaled)
            dqkv[..., 1, :].copy_(join_one(d_attended, shape, dilated))
            del dp, ds, d_attended, q, k, v
            dqkv_NC = dqkv.view(-1, w_qkv.shape[0])
            dw_qkv = matrix.gradient(dqkv_NC, torch.native_layer_norm(x_NHWC, g.shape, g, b, eps)[0])
            d_normed = matrix.product(dqkv_NC, w_qkv).view(x_NHWC.shape)
            del dqkv, dqkv_NC
            dx_norm, dg, db = aten.native_layer_norm_backward(
                d_normed, x_NHWC, g.shape, mean, rstd, g, b, (True, True, True)
            )
            dx = _put_band(dx, x, window, dilated, place, dx_norm.add_(dy_NHWC))
            parts = (dg, db, dw_qkv, dw_out, d_bias)
            totals = parts if totals is None else tuple(t.add_(p) for t, p in zip(totals, parts, strict=True))
        assert totals is not None  # there is at least one band
        dg, db, dw_qkv, dw_out, d_bias = totals
        return dx, dg, db, dw_qkv, dw_out, None, dy.sum((0, 1, 2)), d_bias, None, None, None, None, None


BAND = 2**20  # values of the widest attention tensor that are processed at a time


def _bands(rows: int, values: int) -> list[slice]:
    """Return slices of window rows (dilated: of the first rows of windows) of about equal length."""
    size = -(-rows // max(1, min(rows, -(-values // BAND))))
    return [slice(start, start + size) for start in range(0, rows, size)]


def _band_view(x_BHWC: Tensor, window: int, dilated: bool, place: slice) -> Tensor:
    """Return a view of the band's part of an image: (B, windows, rows, W, C), dilated (B, rows, windows, W, C)."""
    if dilated:
        return x_BHWC.unflatten(1, (window, -1))[:, :, place]
    return x_BHWC.unflatten(1, (-1, window))[:, place]


def _band(x_BHWC: Tensor, window: int, dilated: bool, place: slice) -> Tensor:
    """Return the windows of a band as a contiguous image of their own: (B, fewer rows, W, C)."""
    return _band_view(x_BHWC, window, dilated, place).flatten(1, 2).contiguous()


def _put_band(image: Tensor | None, like: Tensor, window: int, dilated: bool, place: slice, band: Tensor) -> Tensor:
    """Write the band into its place in the image and return the image.

    The image is allocated if it is None; a band that covers the whole image is returned itself.
    """
    if band.shape == like.shape:
        return band
    image = torch.empty_like(like) if image is None else image
    view = _band_view(image, window, dilated, place)
    view.copy_(band.view(view.shape))
    return image


def _channels(x: Tensor, b_KM: Tensor) -> Tensor:
    """Return the product over the last dimension."""
    return matrix.product(x.view(-1, x.shape[-1]), b_KM).view(*x.shape[:-1], -1)


def _linear(x: Tensor, weight: Tensor, factor: float, bias: Tensor, residual: Tensor) -> Tensor:
    """Return residual + factor x W^T + b."""
    y = residual + bias
    matrix.add_product(y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]), weight.t(), factor)
    return y


def _weight_and_scale(linear: protocols.Linear) -> tuple[Tensor, float]:
    """Return W and its scalar factor: 1, or 1/sigma of its spectral norm. With a low-rank change, W is what is applied."""
    if linear.lora is not None:
        return linear.effective_weight(), 1.0
    return (linear.weight, 1.0) if linear.spectral is None else linear.spectral.weight_and_scale(linear.weight)


def _scaled(norm: protocols.ChannelNorm, factor: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the norm multiplied by a number."""
    return (norm.weight, norm.bias) if factor == 1.0 else (norm.weight * factor, norm.bias * factor)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def attention_block(
    x_BHWC: Tensor,
    norm: protocols.ChannelNorm,
    qkv: protocols.Linear,
    out: protocols.Linear,
    bias_LL: Tensor,
    window: int,
    dim_head: int,
    dilated: bool,
) -> Tensor:
    """Compute `ops.attention_block`; backward starts from x, and from q, k, v if the policy saves them."""
    w_qkv, scale = _weight_and_scale(qkv)
    w_out, factor = _weight_and_scale(out)
    g, b = _scaled(norm, scale)
    options = (norm.eps, window, dim_head, dilated, policy.saves_activations(x_BHWC))
    return apply_function(_AttentionBlock, x_BHWC, g, b, w_qkv, w_out, factor, out.bias, bias_LL, *options)


class _FeedForwardBlock(torch.autograd.Function):
    """x + contract(GELU(expand(norm(x)))); saves x, its mean and deviation, and the expanded values if `save`.

    Without `save` only x is saved, and a few points at a time go through all of the block while they are in the CPU
    cache.
    """

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
        save: bool,
    ) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        saved: tuple[Tensor, ...] = ()
        for part, x_NC in _portions(x, w_up.shape[0], whole=save):
            normed, mean, rstd = torch.native_layer_norm(x_NC, g.shape, g, b, eps)
            expanded = matrix.widen(normed, w_up, b_up)
            saved = (mean, rstd, expanded) if save else ()
            out = torch.add(x_NC, b_down, out=y.view(-1, x.shape[-1])[part])
            active = functional.gelu(expanded) if save else aten.gelu_(expanded)
            matrix.add_product(out, active, w_down.t(), factor)
            del active
        ctx.save_for_backward(x, g, b, w_up, b_up, w_down, *saved)
        ctx.options = (eps, factor)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, g, b, w_up, b_up, w_down, *saved = ctx.saved_tensors
        eps, factor = ctx.options
        dy_NC = dy.reshape(-1, x.shape[-1])
        dx = torch.empty_like(x)
        dg, db, dw_up, db_up, dw_down = (torch.zeros_like(w) for w in (g, b, w_up, b_up, w_down))
        for i, (part, x_NC) in enumerate(_portions(x, w_up.shape[0], whole=bool(saved))):
            if saved:
                mean, rstd, expanded = saved
            else:
                normed, mean, rstd = torch.native_layer_norm(x_NC, g.shape, g, b, eps)
                expanded = matrix.widen(normed, w_up, b_up)
            d_out = _times(dy_NC[part], factor)
            matrix.gradient(d_out, functional.gelu(expanded), dw_down, keep=i > 0)
            d_expanded = aten.gelu_backward(matrix.widen(d_out, w_down.t()), expanded)
            del d_out
            if saved:  # recomputed as late as possible, to limit peak memory
                normed = torch.native_layer_norm(x_NC, g.shape, g, b, eps)[0]
            matrix.gradient(d_expanded, normed, dw_up, keep=i > 0)
            db_up += d_expanded.sum(0)
            d_normed = matrix.product(d_expanded, w_up)
            dx_norm, dg_part, db_part = aten.native_layer_norm_backward(
                d_normed, x_NC, g.shape, mean, rstd, g, b, (True, True, True)
            )
            torch.add(dx_norm, dy_NC[part], out=dx.view(-1, x.shape[-1])[part])
            dg += dg_part
            db += db_part
        return dx, dg, db, dw_up, db_up, dw_down, None, dy_NC.sum(0), None, None


PORTION = 2**20  # values of the widest tensor that are processed at a time
FEWEST = 512  # fewest points of a portion: the weights are read again for each portion


def _portions(x: Tensor, width: int, *, whole: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield portions (N, C) of the points of x, of about equal size; all points at once if `whole`."""
    x_NC = x.view(-1, x.shape[-1])
    count = 1 if whole else max(1, -(-x_NC.shape[0] * width // PORTION))
    size = max(FEWEST, -(-x_NC.shape[0] // count))
    for start in range(0, x_NC.shape[0], size):
        part = slice(start, start + size)
        yield part, x_NC[part]


def feed_forward_block(
    x_BHWC: Tensor, norm: protocols.ChannelNorm, expand: protocols.Linear, contract: protocols.Linear
) -> Tensor:
    """Compute `ops.feed_forward_block`; backward starts from x, and from the expanded values if these are saved."""
    w_up, scale = _weight_and_scale(expand)
    w_down, factor = _weight_and_scale(contract)
    g, b = _scaled(norm, scale)
    save = policy.saves_activations(x_BHWC)
    return apply_function(
        _FeedForwardBlock, x_BHWC, g, b, w_up, expand.bias, w_down, factor, contract.bias, norm.eps, save
    )
