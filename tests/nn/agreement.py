"""Two ways to compute the same function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_same_function(y: Tensor, expected: Tensor, inputs: Sequence[Tensor], generator, tolerance: float) -> None:
    """Equal values to `tolerance`, and equal gradients of the inputs, to ten times that where they are near zero."""
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    gradients = (torch.autograd.grad((z * cotangent).sum(), inputs) for z in (y, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=10 * tolerance)
