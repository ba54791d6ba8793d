"""Copies between host and device for which neither waits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """An asynchronous copy of a tensor to the host; `wait` returns the tensor once it has arrived."""

    tensor: Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Wait for this copy, not for later work of the device, and return the tensor on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


def to_host(x: Tensor) -> HostCopy:
    """Start copying a tensor to pinned memory; a tensor already on the host is not copied."""
    if x.device.type != "cuda":
        return HostCopy(x)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(host, event)


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host in memory from which copies to `device` need not be waited for: pinned for a GPU."""
    return x if device.type == "cpu" else x.pin_memory()
