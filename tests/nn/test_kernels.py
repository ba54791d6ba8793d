"""What the libraries below make of the arithmetic."""

import pytest
import torch
from torch.nn import functional

from credit_like.nn import kernels


@pytest.mark.parametrize("channels", [10, 16])
@pytest.mark.parametrize("kernel", [8, 16])
def test_convolutions_in_bfloat16_are_those_of_fp32_but_for_rounding(channels, kernel):
    """On every processor: some have instructions of their own for bfloat16."""
    assert kernels.use_fused(torch.zeros(1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 32, 78, generator=generator).bfloat16()
    weight = torch.randn(3, channels, kernel, kernel, generator=generator).bfloat16()
    y, expected = (functional.conv2d(x.to(t), weight.to(t)) for t in (torch.bfloat16, torch.float32))
    assert float((y.float() - expected).norm() / expected.norm()) < 0.01
