"""Convolutions of odd sizes and paddings against those of torch, with their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from credit_like.nn.cross_embed import CrossEmbed
from credit_like.nn.init import initialise
from credit_like.ops.cpu import direct, policy
from tests.ops.agreement import assert_same_function


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("pad_rows", [(0, 0), (1, 1), (1, -1), (-1, 1), (2, 0), (-1, -1)])
@pytest.mark.parametrize("pad_cols", [(0, 0), (1, -1), (-2, 2), (2, 1)])
@pytest.mark.parametrize("outputs", [4, 400])
def test_any_padding_and_cropping(stride, pad_rows, pad_cols, outputs):
    """As many points may be added as are cropped, which leaves the size as it was. 400 outputs are computed by columns."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    x, weight, bias = random(2, 14, 13, 3), random(outputs, 3, 4, 4), random(outputs)
    padded = functional.pad(x.movedim(-1, 1), (*pad_cols, *pad_rows))
    expected = functional.conv2d(padded, weight, bias, stride).movedim(1, -1)
    y = direct.conv(x, weight, bias, stride, pad_rows, pad_cols)
    assert_same_function(y, expected, (x, weight, bias), generator, 1e-11)


@pytest.mark.parametrize(
    ("stride", "kernels", "size"),
    [(4, (4, 6), (34, 66)), (3, (3, 5), (32, 65)), (4, (7,), (35, 67)), (4, (4, 8), (34, 66))],
)
def test_a_cross_embedding_of_any_stride_has_the_gradient_of_its_plain_form(stride, kernels, size):
    layer = initialise(CrossEmbed(5, 8, kernels, stride), 0).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, *size, 5, dtype=torch.float64, generator=generator).requires_grad_()
    fused = layer(x)
    with policy.disabled():
        assert_same_function(fused, layer(x), (x, *layer.parameters()), generator, 1e-10)
