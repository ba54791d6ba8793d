"""Cached constants on a device: creating a tensor from Python numbers there synchronises host and device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached tensor (n,) of these values; do not write to it."""
    if detect_fake_mode() is not None:
        return torch.tensor(values, dtype=dtype, device=device)  # a tensor of one simulation is of no use to another
    return _cached(values, dtype, device)


@functools.lru_cache(maxsize=64)
def _cached(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # autograd may use it later, even if the first caller was in inference mode
        return torch.tensor(values, dtype=dtype, device=device)
