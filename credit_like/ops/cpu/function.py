"""Helpers of the CPU kernels: calling a function, memory order, and matrix products over channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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


def widen(x_NC: Tensor, weight_OC: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b.

    For few points it is computed as the transpose of W x^T, which the library splits better between threads.
    """
    if 2 * x_NC.shape[0] > weight_OC.shape[0]:
        return functional.linear(x_NC, weight_OC, bias)
    y_ON = weight_OC @ x_NC.t() if bias is None else torch.addmm(bias[:, None], weight_OC, x_NC.t())
    return y_ON.t()


def matrix_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of W in y = x W^T."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
