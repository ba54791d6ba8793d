"""Comparison of two ways to compute the same function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def assert_same_function(y: Tensor, expected: Tensor, inputs: Sequence[Tensor], generator, tolerance: float) -> None:
    """Assert equal values to `tolerance`, and equal gradients of the inputs, to ten times that where they are near zero.

    Gradients come in any order of memory: also with the last dimension first, and as one number for all.
    """
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    for given in (
        cotangent,
        cotangent.movedim(-1, 0).contiguous().movedim(0, -1),
        cotangent[:1, :1, :1, :1].expand_as(y),
    ):
        gradients = (torch.autograd.grad(z, inputs, given, retain_graph=True) for z in (y, expected))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)


class StridedConvolutions(TorchDispatchMode):
    """Records `operands`, image and weight, of every convolution with a stride."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default and max(args[3]) > 1:
            self.operands.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))
