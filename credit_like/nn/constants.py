"""Numbers as tensors on a device, made once: a tensor made of Python numbers there makes the host wait for the device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def on_device(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (n,): these values, cached by value; not to be written to."""
    if detect_fake_mode() is not None:
        return torch.tensor(values, dtype=dtype, device=device)  # of one simulation, of no use to another
    return _cached(values, dtype, device)


@functools.lru_cache(maxsize=64)
def _cached(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # used by autograd later, also where a forecast asked first
        return torch.tensor(values, dtype=dtype, device=device)
