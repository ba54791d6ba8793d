"""Where a CPU takes its own kernels rather than the plain operations, and how much these save for backward.

The constants were measured on two x86 CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from credit_like.ops.cpu import fourier

FOURIER_FROM = 16  # kernels at least this wide are candidates for the Fourier transform
DIRECT_SLOWDOWN = 4.0  # how much slower per operation the direct convolution with wide kernels is than matrix products

WINOGRAD_POINTS = 1000  # fewest points of an image for which transforming the weights pays
WINOGRAD_CACHED = (256, 4000)  # points between which caching the transformed weights is worth its memory
WINOGRAD_FORWARD, WINOGRAD_BACKWARD = 100, 36  # fewest channels

SAVE_FROM = 256  # channels from which a block saves its widest activations for backward
SAVE_UP_TO = 2  # points per channel up to which these are no more values than the block's weights have

_enabled = True
_recomputing = ContextVar("recompute_in_block", default=False)


def configure() -> None:
    """Keep oneDNN off its bfloat16 convolutions for AMX; call it before the first operation of the process.

    As torch 2.13 has them, they are wrong for some shapes (10 input channels and kernels of 16, for example). oneDNN reads
    the variable at its first operation. A value that is already set stays; fp32 does not use AMX.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def set_enabled(enabled: bool) -> None:
    """Switch the CPU kernels on or off for this process; they are on by default."""
    global _enabled
    _enabled = enabled


@contextmanager
def disabled() -> Iterator[None]:
    """Take the plain form of every operation, as on a GPU."""
    before = _enabled
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(before)


def applies(x: Tensor) -> bool:
    """Return whether the CPU kernels apply: fp32 or fp64, no autocast, not being traced by the compiler."""
    return (
        _enabled
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def reads_values(x: Tensor) -> bool:
    """Return whether reading a number of the tensor costs nothing; on an accelerator it would synchronise."""
    return _enabled and x.device.type == "cpu" and not torch.compiler.is_compiling()


def saves_activations(x: Tensor) -> bool:
    """Return whether a block saves its widest activations for backward rather than recomputing them from its input.

    Recomputing a value costs as many operations as there are channels, so it pays for few channels, which are the large
    images. Within `recompute_in_block`, a block saves only what is no larger than its weights. Under activation
    checkpointing it saves everything: the block is already being recomputed, and backward follows at once.
    """
    if not torch.is_grad_enabled():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return True
    channels = x.shape[-1]
    if _recomputing.get():
        return x.numel() <= SAVE_UP_TO * channels**2
    return channels >= SAVE_FROM


@contextmanager
def recompute_in_block() -> Iterator[None]:
    """Let blocks save little more than their input, and recompute what their own backward needs.

    This is activation checkpointing from within: a block that knows its backward recomputes less than a whole forward.
    """
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def by_fourier(rows: int, columns: int, kernel: int, stride: int, channels: int, outputs: int) -> bool:
    """Return whether a strided convolution with this many outputs is cheaper through the Fourier transform."""
    if kernel < FOURIER_FROM or kernel < 2 * stride:
        return False
    taps, inputs = -(-kernel // stride), stride * stride * channels
    tile = fourier.tile_size(rows, columns, taps, inputs, outputs)
    direct = 2.0 * rows * columns * kernel * kernel * channels * outputs
    return fourier.cost(rows, columns, taps, inputs, outputs, tile) < DIRECT_SLOWDOWN * direct


def by_winograd(points: int, channels: int, outputs: int, *, cached: bool = False) -> tuple[bool, bool]:
    """Return whether Winograd's form is faster for output and input gradient of a 3 x 3 convolution, and for its weight gradient.

    It transforms every value of image and weights to save multiplications, which are channels x outputs for each point: it
    needs many points for a weight (fewer where the transformed weights are cached) and many channels for a point. The
    weight gradient pays earlier, because the library's own is slower than the rest.
    """
    least, enough = min(channels, outputs), points >= (WINOGRAD_CACHED[0] if cached else WINOGRAD_POINTS)
    return enough and least >= WINOGRAD_FORWARD, enough and least >= WINOGRAD_BACKWARD
