"""The arithmetic behind the layers, as functions of plain tensors: padding is always given explicitly.

A layer on the whole image and its domain layer on a band of rows call the same function; the latter brings halo rows and asks
for no zero rows there. Tensors are (B, H, W, C) unless a name says otherwise; strides in memory are free.

Which way a function takes is decided here, by `use_fused` (device, dtype), and `by_fourier`, `by_winograd` and `keeps` (shape):
everywhere the plain operations, on the CPU in fp32 and fp64 the functions of `fused.py`, `fourier.py` and `winograd.py`, which
do the same sums in fewer passes over memory or with fewer multiplications.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

from credit_like.nn import fourier, fused, winograd
from credit_like.nn.derived import Derived
from credit_like.nn.fused import Pair, channels_first, channels_last

__all__ = [
    "channels_first",
    "channels_last",
    "conv3x3",
    "conv_transpose",
    "cross_embed",
    "pixel_shuffle",
    "window_attention",
]

# oneDNN's convolutions in bfloat16 for AMX, as torch 2.13 has them, are plainly wrong for some shapes (10 input channels and
# kernels of 16, for example). It asks for this at its first operation; fp32 does not use AMX.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

FOURIER_FROM = 16  # kernels at least this wide are candidates for the Fourier transform
DIRECT_SLOWDOWN = 4.0  # how much slower per operation the direct convolution with wide kernels is than matrix products

WINOGRAD_POINTS = 1000
# Where transformed weights are kept: the fewest points that pay, the most that pay for the memory.
WINOGRAD_KEPT = (256, 4000)
WINOGRAD_FORTH, WINOGRAD_BACK = 100, 36

KEEP_FROM = 256  # channels from which a block keeps its widest values for backward
KEEP_UP_TO = 2  # points for each channel up to which these are no more values than its weights have

_LEAN = ContextVar("lean", default=False)


def use_fused(x: Tensor) -> bool:
    """Whether the CPU's own functions apply: fp32 or fp64, no autocast, not being traced by the compiler."""
    return (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def keeps(x: Tensor) -> bool:
    """Whether a block keeps its widest values for backward, or makes them again from its input.

    To make one value again takes as many operations as there are channels: with few it costs next to nothing, and these are
    the large images. Where memory is short (`lean`), they are kept only if they are no more than the block's weights. Where
    someone else decides what is kept (activation checkpointing drops it all, and backward follows at once when it is made
    again), nothing is made a third time.
    """
    if not torch.is_grad_enabled():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    channels = x.shape[-1]
    if _LEAN.get():
        return x.numel() <= KEEP_UP_TO * channels**2
    return channels >= KEEP_FROM


@contextmanager
def lean() -> Iterator[None]:
    """Within, a block keeps little more than its input for backward and makes the rest again by itself.

    This is what activation checkpointing is for, but a block that knows what backward needs makes no more than that again.
    """
    token = _LEAN.set(True)
    try:
        yield
    finally:
        _LEAN.reset(token)


def by_fourier(rows: int, columns: int, kernel: int, stride: int, channels: int, outputs: int) -> bool:
    """Whether a strided convolution with this many outputs is cheaper through the Fourier transform."""
    if kernel < FOURIER_FROM or kernel < 2 * stride:
        return False
    taps, inputs = -(-kernel // stride), stride * stride * channels
    tile = fourier.tile_size(rows, columns, taps, inputs, outputs)
    direct = 2.0 * rows * columns * kernel * kernel * channels * outputs
    return fourier.cost(rows, columns, taps, inputs, outputs, tile) < DIRECT_SLOWDOWN * direct


def by_winograd(points: int, channels: int, outputs: int, *, kept: bool = False) -> tuple[bool, bool]:
    """Whether Winograd's form is quicker for output and gradient of the input, and for that of the weights, of a 3 x 3 convolution.

    It transforms every value of image and weights to save multiplications, which are channels x outputs for each point: it needs
    many points for a weight (fewer where the transformed weights are `kept`) and many channels for a point. The library's own
    gradient of the weights is slower than the rest.
    """
    least, enough = min(channels, outputs), points >= (WINOGRAD_KEPT[0] if kept else WINOGRAD_POINTS)
    return enough and least >= WINOGRAD_FORTH, enough and least >= WINOGRAD_BACK


def conv3x3(
    x_BHWC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    pad_rows: Pair = (1, 1),
    pad_cols: Pair = (1, 1),
    transformed: Derived | None = None,
) -> Tensor:
    """A 3 x 3 convolution, stride 1, after adding zero rows (before, after) and columns; weight (out, in, 3, 3).

    transformed: where the transforms of the weights are kept between forwards without gradients.
    """
    if use_fused(x_BHWC):
        derived, points = transformed or Derived(), math.prod(x_BHWC.shape[:3])
        kept = transformed is not None and not torch.is_grad_enabled() and points <= WINOGRAD_KEPT[1]
        forth, back = by_winograd(points, weight.shape[1], weight.shape[0], kept=kept)
        if kept and forth:
            taps = derived(lambda: winograd.transform_weights(weight), [weight])
            return winograd.correlate_transformed(x_BHWC, taps, weight.shape[0], bias, pad_rows, pad_cols)
        derived.forget()
        if back:
            return winograd.conv3x3(x_BHWC, weight, bias, pad_rows, pad_cols, forth=forth)
        return fused.conv(x_BHWC, weight, bias, 1, pad_rows, pad_cols)
    padded = functional.pad(x_BHWC, (0, 0, *pad_cols, *pad_rows)) if pad_rows != (1, 1) or pad_cols != (1, 1) else None
    if padded is None:
        return channels_last(functional.conv2d(channels_first(x_BHWC), weight, bias, padding=1))
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
    """A transposed convolution whose full output, (H - 1) stride + k rows, loses rows (before, after) and columns.

    weight (in, out, k, k).
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
    transformed: Derived | None = None,
) -> Tensor:
    """Convolutions of one stride and several kernels over one image, concatenated along channels.

    pad_rows, pad_cols: zero rows (columns) before and after, counted for the widest kernel K (the last). With v the image
    so padded, output i of a kernel k is sum_j v[i s + o_k + j] w[j], o_k = floor((K - s)/2) - floor((k - s)/2); there are
    (rows of v - K) // s + 1 of them. transformed: where the transforms of wide kernels are kept between forwards.
    """
    widest = weights[-1].shape[-1]
    rows = (x_BHWC.shape[1] + sum(pad_rows) - widest) // stride + 1
    columns = (x_BHWC.shape[2] + sum(pad_cols) - widest) // stride + 1
    shifts = [(widest - stride) // 2 - (weight.shape[-1] - stride) // 2 for weight in weights]
    quick = use_fused(x_BHWC)
    if quick:
        x_BHWC = fused.in_order(x_BHWC)
    channels = x_BHWC.shape[-1]
    wide = [
        i
        for i, weight in enumerate(weights)
        if quick and by_fourier(rows, columns, weight.shape[-1], stride, channels, weight.shape[0])
    ]
    branches = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if i in wide:
            continue
        kernel = weight.shape[-1]
        row_pads = _pads(x_BHWC.shape[1], pad_rows[0] - shifts[i], rows, kernel, stride)
        column_pads = _pads(x_BHWC.shape[2], pad_cols[0] - shifts[i], columns, kernel, stride)
        if quick:
            branches.append(fused.conv(x_BHWC, weight, bias, stride, row_pads, column_pads))
        else:
            branches.append(_strided_conv(x_BHWC, weight, bias, stride, row_pads, column_pads))
    if wide:  # the widest kernels come last
        kernels, offsets, taps = [weights[i] for i in wide], [shifts[i] for i in wide], -(-widest // stride)
        outputs = sum(kernel.shape[0] for kernel in kernels)
        tile = fourier.tile_size(rows, columns, taps, stride * stride * channels, outputs)
        geometry = (stride, rows + taps - 1, columns + taps - 1, (pad_rows[0], pad_cols[0]))
        derived = transformed or Derived()
        if torch.is_grad_enabled():
            derived.forget()
            y = fourier.correlate(x_BHWC, fourier.frame(kernels, offsets, taps, stride), tile, geometry)
        else:
            w = derived(
                lambda: fourier.transform_weights(fourier.frame(kernels, offsets, taps, stride), tile),
                kernels,
                (tile, taps, stride, tuple(offsets)),
            )
            y = fourier.correlate_transformed(x_BHWC, w, taps, tile, geometry)
        branches.append(y + torch.cat([biases[i] for i in wide]))
    return torch.cat(branches, dim=-1) if len(branches) > 1 else branches[0]


def _strided_conv(x_BHWC: Tensor, weight: Tensor, bias: Tensor, stride: int, pad_rows: Pair, pad_cols: Pair) -> Tensor:
    """The library's convolution; backward keeps x itself unless zeros must be laid around it first."""
    x_BCHW = channels_first(x_BHWC)
    padding = (pad_rows[0], pad_cols[0])
    if min(padding) < 0 or padding != (pad_rows[1], pad_cols[1]):
        x_BCHW, padding = functional.pad(x_BCHW, (*pad_cols, *pad_rows)), (0, 0)
    return channels_last(functional.conv2d(x_BCHW, weight, bias, stride=stride, padding=padding))


def _pads(size: int, before: int, outputs: int, kernel: int, stride: int) -> Pair:
    """(before, after) such that a valid convolution gives exactly `outputs`; negative numbers crop."""
    return before, (outputs - 1) * stride + kernel - size - before


def window_attention(qkv_BHWC: Tensor, bias_LL: Tensor, window: int, dim_head: int, *, dilated: bool) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v in each window and head; (B, H, W, h 3 d) to (B, H, W, h d).

    A window is w x w neighbouring points, or with `dilated` the w x w points that lie H/w rows and W/w columns apart.
    """
    shape = fused.window_shape(qkv_BHWC.shape, window, dim_head, dilated)
    q, k, v = fused.split_windows(qkv_BHWC, shape, dilated)
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias_LL.to(q.dtype))
    return fused.join_windows(attended, shape, dilated)


def attention_block(
    x_BHWC: Tensor,
    norm: tuple[Tensor, Tensor, float],
    qkv: Tensor,
    out: tuple[Tensor, float, Tensor],
    bias_LL: Tensor,
    window: int,
    dim_head: int,
    *,
    dilated: bool,
) -> Tensor:
    """x + out(window_attention(qkv(norm(x)))); backward from x, and from q, k, v where it `keeps` them; see `use_fused`.

    out: a matrix, a number that multiplies it, and a bias.
    """
    return fused.attention_block(x_BHWC, norm, qkv, out, bias_LL, window, dim_head, dilated, keeps(x_BHWC))


def feed_forward_block(
    x_BHWC: Tensor,
    norm: tuple[Tensor, Tensor, float],
    expand: tuple[Tensor, Tensor],
    contract: tuple[Tensor, float, Tensor],
) -> Tensor:
    """x + contract(GELU(expand(norm(x)))); backward from x, and from the expanded values where it `keeps` them; see `use_fused`.

    contract: a matrix, a number that multiplies it, and a bias.
    """
    return fused.feed_forward_block(x_BHWC, norm, expand, contract, keeps(x_BHWC))


def norm_silu(x_BHWC: Tensor, norm: tuple[Tensor, Tensor, float], groups: int) -> Tensor:
    """SiLU(GroupNorm(x)); backward from x; see `use_fused`."""
    return fused.norm_silu(x_BHWC, norm, groups)


def pixel_shuffle(x_BHWC: Tensor, factor: int) -> Tensor:
    """(B, H, W, C f^2) to (B, f H, f W, C); channel c f^2 + f i + j goes to row offset i, column offset j."""
    if use_fused(x_BHWC):
        return fused.pixel_shuffle(x_BHWC, factor)
    batch, height, width, channels = x_BHWC.shape
    x = x_BHWC.unflatten(-1, (channels // factor**2, factor, factor)).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, height * factor, width * factor, channels // factor**2)
