"""The operations, and what the libraries below make of their arithmetic."""

import pytest
import torch

from credit_like import ops


@pytest.mark.parametrize("channels", [10, 16])
@pytest.mark.parametrize("kernel", [8, 16])
def test_convolutions_in_bfloat16_are_those_of_fp32_but_for_rounding(channels, kernel):
    """On every processor: some have instructions of their own for bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x_BHWC = torch.randn(2, 32, 78, channels, generator=generator).bfloat16()
    weight, bias = torch.randn(3, channels, kernel, kernel, generator=generator).bfloat16(), torch.zeros(3)
    y, expected = (
        ops.cross_embed(x_BHWC.to(t), [weight.to(t)], [bias.to(t)], 1, pad_rows=(0, 0), pad_cols=(0, 0))
        for t in (torch.bfloat16, torch.float32)
    )
    assert float((y.float() - expected).norm() / expected.norm()) < 0.01
