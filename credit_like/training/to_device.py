"""Copies of samples to the device, during which the device computes."""

from __future__ import annotations

import torch

from credit_like.state import Sample


class ToDevice:
    """Copies samples to a device; to a GPU on a separate stream, during the computation that was queued before.

    The sample is in pinned memory, otherwise the host waits for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample on the device, for use by operations that are queued after this call."""
        if self.stream is None:
            return sample.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            copied = sample.to(self.device)
        computing.wait_stream(self.stream)
        # The memory belongs to the copying stream, which would reuse it before the computation is done.
        for tensor in copied.tensors():
            tensor.record_stream(computing)
        return copied
