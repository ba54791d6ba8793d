"""Rules for when a CPU uses its own kernels rather than the plain operations, and how much these save for backward.

The constants were measured on three x86 CPUs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from credit_like.ops.cpu import fourier

FOURIER_FROM = 16  # narrowest kernels for which the Fourier transform is considered
DIRECT_SLOWDOWN = 4.0  # cost per operation of direct convolution with wide kernels, relative to matrix products

WINOGRAD_POINTS = 1000  # fewest points of an image for which transforming the weights pays off
WINOGRAD_CACHED = (256, 4000)  # range of points in which caching the transformed weights is worth its memory
WINOGRAD_FORWARD, WINOGRAD_BACKWARD = 100, 36  # fewest channels

SAVE_FROM = 256  # fewest channels with which a block saves its widest activations for backward
SAVE_UP_TO = 2  # points per channel up to which these activations are no larger than the block's weights

_enabled = True
_recomputing = ContextVar("recompute_in_block", default=False)


def configure() -> None:
    """Disable oneDNN's bfloat16 convolutions on AMX; call it before the first operation of the process.

    In torch 2.13 their results are wrong for some shapes (10 input channels and kernels of 16, for example). oneDNN
    reads the variable at its first operation. A value that the user has set is respected; fp32 does not use AMX.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def set_enabled(enabled: bool) -> None:
    """Enable or disable the CPU kernels in this process; they are enabled by default."""
    global _enabled
    _enabled = enabled


@contextmanager
def disabled() -> Iterator[None]:
    """Use the plain form of every operation within the block, as on a GPU."""
    before = _enabled
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(before)


def applies(x: Tensor) -> bool:
    """Return whether the CPU kernels apply: fp32 or fp64, no autocast, not traced by the compiler."""
    return (
        _enabled
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def reads_values(x: Tensor) -> bool:
    """Return whether reading a number from the tensor is free; on an accelerator it would synchronise."""
    return _enabled and x.device.type == "cpu" and not torch.compiler.is_compiling()


def is_checkpointed() -> bool:
    """Return whether activation checkpointing decides what is saved for backward."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def saves_activations(x: Tensor) -> bool:
    """Return whether a block saves its widest activations for backward rather than recomputing them from its input.

    Recomputing a value costs O(channels) operations, so it pays off for few channels, which are the large images.
    Within `recompute_in_block`, a block saves only activations that are no larger than its weights. Under activation
    checkpointing it saves everything: the block is already being recomputed, and backward follows immediately.
    """
    if not torch.is_grad_enabled():
        return False
    if is_checkpointed():
        return True
    channels = x.shape[-1]
    if _recomputing.get():
        return x.numel() <= SAVE_UP_TO * channels**2
    return channels >= SAVE_FROM


@contextmanager
def recompute_in_block() -> Iterator[None]:
    """Let blocks save little more than their input and recompute what their own backward needs.

    This is activation checkpointing inside the block, which is cheaper than rerunning its whole forward.
    """
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def prefers_onednn(x: Tensor) -> bool:
    """Return whether oneDNN is faster than MKL: for fp32 on a processor with AVX-512 that Intel did not make.

    torch multiplies fp32 matrices with MKL, which uses AVX-512 only on Intel's processors. oneDNN, which torch uses for
    convolutions, uses it on all. On a Zen 5 its products are twice as fast, its weight gradients of convolutions three
    times as fast as a product per tap, and its convolutions faster than Winograd's algorithm with MKL's products.
    """
    return x.dtype == torch.float32 and _has_avx512_of_another_maker()


@cache
def _has_avx512_of_another_maker() -> bool:
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def by_fourier(rows: int, columns: int, kernel: int, stride: int, channels: int, outputs: int) -> bool:
    """Return whether a strided convolution with this many outputs is faster through the Fourier transform."""
    if kernel < FOURIER_FROM or kernel < 2 * stride:
        return False
    taps, inputs = -(-kernel // stride), stride * stride * channels
    tile = fourier.tile_size(rows, columns, taps, inputs, outputs)
    direct = 2.0 * rows * columns * kernel * kernel * channels * outputs
    return fourier.cost(rows, columns, taps, inputs, outputs, tile) < DIRECT_SLOWDOWN * direct


def by_winograd(points: int, channels: int, outputs: int, *, cached: bool = False) -> tuple[bool, bool]:
    """Return whether Winograd's algorithm is faster for (output and input gradient, weight gradient).

    It transforms every value of image and weights to save multiplications, of which there are channels x outputs for
    each point. It therefore needs many points per weight (fewer if the transformed weights are cached) and many
    channels per point. The weight gradient benefits with fewer channels, because torch's own is slower than the rest.
    """
    least, enough = min(channels, outputs), points >= (WINOGRAD_CACHED[0] if cached else WINOGRAD_POINTS)
    return enough and least >= WINOGRAD_FORWARD, enough and least >= WINOGRAD_BACKWARD
