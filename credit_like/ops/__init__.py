"""Operations on images: one function each, in a plain form in torch and faster ones for CPUs (`ops.cpu`).

A layer on the whole image and its parallel version on a band of rows call the same function. Padding is always
explicit: the parallel version supplies halo rows and therefore requests no zero rows there. Tensors are (B, H, W, C)
unless a name says otherwise; their strides in memory are arbitrary. The CPU form equals the plain form up to rounding;
`cpu.policy` decides when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from credit_like.ops import cpu, wide
from credit_like.ops.cpu import blocks, convolution, policy, weight_cache
from credit_like.ops.cpu.policy import is_checkpointed, recompute_in_block, saves_activations
from credit_like.ops.protocols import ChannelNorm, GroupNorm, Linear, fusible, is_fusible, may_be_fusible
from credit_like.ops.windows import (
    Pair,
    channels_first,
    channels_last,
    join_windows,
    split_one,
    split_windows,
    window_shape,
)

__all__ = [
    "add_outer",
    "attention_block",
    "channels_first",
    "channels_last",
    "conv3x3",
    "conv_transpose",
    "cpu",
    "cross_embed",
    "feed_forward_block",
    "fusible",
    "is_checkpointed",
    "keeps_of_weights",
    "norm_silu",
    "of_weights",
    "pixel_shuffle",
    "recompute_in_block",
    "recomputed",
    "recomputes_itself",
    "saves_activations",
    "stacked",
    "uses_fused_kernel",
    "window_attention",
]


def uses_fused_kernel(x: Tensor, *layers: object) -> bool:
    """Return whether an operation on x with these layers is one kernel, which selects what to save for backward."""
    return policy.applies(x) and all(is_fusible(layer) for layer in layers)


def recomputes_itself(block: nn.Module, x: Tensor) -> bool:
    """Return whether all fusible layers of the block use their fused kernels and so honour `recompute_in_block`."""
    return policy.applies(x) and all(is_fusible(layer) for layer in block.modules() if may_be_fusible(layer))


def recomputed(function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    """Return function(*arguments), of which only the arguments are kept for backward, which computes the rest again.

    Within activation checkpointing, which does that for a larger part of the model, nothing changes. The function must not
    depend on a generator of random numbers.
    """
    if not torch.is_grad_enabled() or is_checkpointed():
        return function(*arguments)
    y: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return y


def attention_block(
    x_BHWC: Tensor,
    norm: ChannelNorm,
    qkv: Linear,
    out: Linear,
    bias_LL: Tensor,
    window: int,
    dim_head: int,
    *,
    dilated: bool,
    mask_BHWC: Tensor | None = None,
    gain: float = 1.0,
) -> Tensor:
    """Return x + out(window_attention(qkv(norm(x)))), (B, H, W, C) to (B, H, W, C).

    bias_LL: added to the scores of each query and key, (w^2, w^2). Rows of the weight of `qkv` are ordered (head, q | k
    | v, d). mask_BHWC, gain: as for `window_attention`; with a mask there is no fused kernel.
    """
    if mask_BHWC is None and uses_fused_kernel(x_BHWC, qkv, out):
        return blocks.attention_block(x_BHWC, norm, qkv, out, bias_LL, window, dim_head, dilated)
    attended = window_attention(
        qkv(norm(x_BHWC)), bias_LL, window, dim_head, dilated=dilated, mask_BHWC=mask_BHWC, gain=gain
    )
    return x_BHWC + out(attended)


def window_attention(
    qkv_BHWC: Tensor,
    bias_LL: Tensor,
    window: int,
    dim_head: int,
    *,
    dilated: bool,
    mask_BHWC: Tensor | None = None,
    gain: float = 1.0,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v in each window and head; (B, H, W, h 3 d) to (B, H, W, h d).

    A window is w x w neighbouring points, or with `dilated` the w x w points that lie H/w rows and W/w columns apart.
    mask_BHWC: factors (B, H, W, h w^2), 0 or 1, of the probabilities that each query has for the keys of its window, which are
    multiplied by `gain` too.
    """
    shape = window_shape(qkv_BHWC.shape, window, dim_head, dilated)
    q, k, v = split_windows(qkv_BHWC, shape, dilated)
    if mask_BHWC is not None:
        scores = q @ k.transpose(-1, -2) * dim_head**-0.5 + bias_LL.to(q.dtype)
        factors = split_one(mask_BHWC, (*shape[:-1], window**2), dilated)
        probabilities = scores.softmax(-1)
        return join_windows((probabilities * factors * gain).to(v.dtype) @ v, shape, dilated)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_LL.to(q.dtype))
    return join_windows(attended, shape, dilated)


def feed_forward_block(x_BHWC: Tensor, norm: ChannelNorm, expand: Linear, contract: Linear) -> Tensor:
    """Return x + contract(GELU(expand(norm(x)))), (B, H, W, C) to (B, H, W, C)."""
    if uses_fused_kernel(x_BHWC, expand, contract):
        return blocks.feed_forward_block(x_BHWC, norm, expand, contract)
    return x_BHWC + contract(functional.gelu(expand(norm(x_BHWC))))


def norm_silu(x_BHWC: Tensor, norm: GroupNorm) -> Tensor:
    """Return SiLU(norm(x)), (B, H, W, C) to (B, H, W, C)."""
    if uses_fused_kernel(x_BHWC, norm):
        return blocks.norm_silu(x_BHWC, norm)
    return functional.silu(norm(x_BHWC))


def pixel_shuffle(x_BHWC: Tensor, factor: int) -> Tensor:
    """Return (B, H, W, C f^2) as (B, f H, f W, C); channel c f^2 + f i + j goes to row offset i, column offset j."""
    if policy.applies(x_BHWC):
        return blocks.pixel_shuffle(x_BHWC, factor)
    batch, height, width, channels = x_BHWC.shape
    x = x_BHWC.unflatten(-1, (channels // factor**2, factor, factor)).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, height * factor, width * factor, channels // factor**2)


def conv3x3(
    x_BHWC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    pad_rows: Pair = (1, 1),
    pad_cols: Pair = (1, 1),
    layer: nn.Module | None = None,
) -> Tensor:
    """Return a 3 x 3 convolution, stride 1, after adding zero rows (before, after) and columns.

    weight: (out, in, 3, 3). layer: the owner of the weights, with which tensors derived from them may be cached.
    """
    if policy.applies(x_BHWC):
        return convolution.conv3x3(x_BHWC, weight, bias, pad_rows, pad_cols, layer)
    if pad_rows == (1, 1) and pad_cols == (1, 1):
        return channels_last(functional.conv2d(channels_first(x_BHWC), weight, bias, padding=1))
    padded = functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows))
    return channels_last(functional.conv2d(channels_first(padded), weight, bias))


def conv_transpose(
    x_BHWC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    *,
    crop_rows: Pair = (0, 0),
    crop_cols: Pair = (0, 0),
) -> Tensor:
    """Return a transposed convolution, cropped by `crop_rows` (before, after) and `crop_cols`.

    The full output has (H - 1) stride + k rows. weight: (in, out, k, k).
    """
    y_BCHW = functional.conv_transpose2d(channels_first(x_BHWC), weight, bias, stride=stride)
    height, width = y_BCHW.shape[-2:]
    y_BCHW = y_BCHW[..., crop_rows[0] : height - crop_rows[1], crop_cols[0] : width - crop_cols[1]]
    return channels_last(y_BCHW)


def cross_embed(
    x_BHWC: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    stride: int,
    *,
    pad_rows: Pair,
    pad_cols: Pair,
    layer: nn.Module | None = None,
) -> Tensor:
    """Return convolutions of one stride and several kernels over one image, concatenated along channels.

    weights: (out, in, k, k), narrowest first. pad_rows, pad_cols: zero rows (columns) before and after, counted for the
    widest kernel K (the last). With v the image so padded, output i of a kernel k is sum_j v[i s + o_k + j] w[j],
    o_k = floor((K - s)/2) - floor((k - s)/2); there are (rows of v - K) // s + 1 of them. layer: as for `conv3x3`.
    """
    widest = weights[-1].shape[-1]
    rows = (x_BHWC.shape[1] + sum(pad_rows) - widest) // stride + 1
    columns = (x_BHWC.shape[2] + sum(pad_cols) - widest) // stride + 1
    kernels = [weight.shape[-1] for weight in weights]
    shifts = [(widest - stride) // 2 - (kernel - stride) // 2 for kernel in kernels]
    pads = [
        (
            _pads(x_BHWC.shape[1], pad_rows[0] - shift, rows, kernel, stride),
            _pads(x_BHWC.shape[2], pad_cols[0] - shift, columns, kernel, stride),
        )
        for kernel, shift in zip(kernels, shifts, strict=True)
    ]
    if policy.applies(x_BHWC):
        size, before = (rows, columns), (pad_rows[0], pad_cols[0])
        return convolution.cross_embed(x_BHWC, weights, biases, stride, pads, shifts, size, before, layer)
    if wide.applies(x_BHWC, weights, stride):
        before = pad_rows[0], pad_cols[0]
        branches = wide.cross_embed(x_BHWC, weights, biases, stride, before, (rows, columns), shifts)
    else:
        # cuDNN convolves with channels last and would rearrange the model's input, which has them first, for every branch.
        x_BHWC = x_BHWC.contiguous()
        branches = [
            _strided_conv(x_BHWC, weight, bias, stride, *pad)
            for weight, bias, pad in zip(weights, biases, pads, strict=True)
        ]
    return torch.cat(branches, dim=-1) if len(branches) > 1 else branches[0]


def _strided_conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """Return torch's convolution; backward saves x itself unless zeros must be padded explicitly first.

    Halos that a narrower kernel does not read are left out as a view, so that all kernels save one image.
    """
    for dim, pads in ((1, pad_rows), (2, pad_cols)):
        before, after = (max(-pad, 0) for pad in pads)
        if before or after:  # the gradient of a view is a copy, also of a view of the whole
            x_BHWC = x_BHWC.narrow(dim, before, x_BHWC.shape[dim] - before - after)
    rows, columns = ((max(before, 0), max(after, 0)) for before, after in (pad_rows, pad_cols))
    x_BCHW, padding = channels_first(x_BHWC), (rows[0], columns[0])
    if padding != (rows[1], columns[1]):
        x_BCHW, padding = functional.pad(x_BCHW, (*columns, *rows)), (0, 0)
    return channels_last(functional.conv2d(x_BCHW, weight, bias, stride=stride, padding=padding))


def _pads(size: int, before: int, outputs: int, kernel: int, stride: int) -> Pair:
    """Return (before, after) such that a valid convolution gives exactly `outputs`; negative numbers crop."""
    return before, (outputs - 1) * stride + kernel - size - before


def add_outer(matrix: Tensor, scale: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return scale M + a b^T; M (rows, columns), scale (), a (rows,), b (columns,)."""
    if policy.reads_values(matrix):
        return torch.addr(matrix, a, b, beta=float(scale))
    wide = torch.promote_types(matrix.dtype, scale.dtype)
    return torch.addr(matrix.to(wide) * scale, a.to(wide), b.to(wide)).to(matrix.dtype)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return small tensors of one shape as one, (tensors, ...); compiled, a pair is computed where it is used.

    The compiler makes a copy of each tensor for `torch.stack`. A selection by index becomes part of the operations that
    follow, and the gradients are views.
    """
    if torch.compiler.is_compiling() and len(tensors) == 2:
        pair: Tensor = _Pair.apply(tensors[0], tensors[1])
        return pair
    return torch.stack(list(tensors))


class _Pair(torch.autograd.Function):
    """torch.stack of two tensors by selection."""

    @staticmethod
    def forward(_ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        number = torch.arange(2, device=first.device).view(2, *[1] * first.ndim)
        return torch.where(number == 0, first[None], second[None])

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad = grad.contiguous()
        return grad[0], grad[1]


def of_weights(layer: nn.Module, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, possibly cached; it must depend only on the parameters and buffers of `layer`."""
    return weight_cache.cached(layer, make, chain(layer.parameters(), layer.buffers()))


def keeps_of_weights(layer: nn.Module) -> bool:
    """Return whether `of_weights` caches what it returns for the layer."""
    return weight_cache.keeps(chain(layer.parameters(), layer.buffers()))
