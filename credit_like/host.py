"""Copies from the device to the host that do not stop the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostCopy:
    """A tensor that is on its way to the host; `wait` returns it once it has arrived."""

    tensor: Tensor
    event: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """Wait for this copy, not for later work of the device, and return the tensor on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


def to_host(x: Tensor) -> HostCopy:
    """Start the copy of a tensor to pinned memory; a tensor that is on the host already is not copied."""
    if x.device.type != "cuda":
        return HostCopy(x)
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(host, event)
