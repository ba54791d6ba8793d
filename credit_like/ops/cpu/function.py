"""Helpers of the CPU kernels: calling a function, and memory order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoContext:
    """A stand-in for the autograd context if no backward will follow."""

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Apply an autograd function; without gradients call only its forward, which avoids autograd's overhead."""
    y: Tensor = function.apply(*arguments) if torch.is_grad_enabled() else function.forward(NoContext(), *arguments)
    return y


def contiguous(x_BHWC: Tensor) -> Tensor:
    """Return the same image, contiguous.

    Images are copied one at a time, because transposing two dimensions is faster than four.
    """
    if x_BHWC.is_contiguous():
        return x_BHWC
    return torch.stack([image.flatten(0, 1).contiguous().view(image.shape) for image in x_BHWC.unbind(0)])
