"""The operations, and what the libraries below make of their arithmetic."""

import pytest
import torch

from credit_like import ops
from credit_like.models import wxformer
from tests.ops.agreement import StridedConvolutions


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


def test_every_branch_of_a_cross_embedding_gets_its_channels_last_on_a_gpu():
    config = wxformer.Config.model_validate(
        {"padding_conf": {"activate": True, "mode": "earth", "pad_lat": [16, 16], "pad_lon": [16, 16]}}
    )
    with torch.device("meta"):
        model = wxformer.build(config, in_channels=6, out_channels=5, frames=1, height=32, width=64)
        with StridedConvolutions() as seen:
            model(torch.empty(1, 6, 1, 32, 64))
    assert len(seen.operands) == sum(map(len, config.cross_embed_kernel_sizes))
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in seen.operands)


def test_backward_of_a_cross_embedding_copies_no_image_that_is_read_whole():
    x = torch.empty(1, 8, 8, 3, device="meta", requires_grad=True)
    weights = [torch.empty(4, 3, kernel, kernel, device="meta") for kernel in (2, 4)]
    biases = [torch.empty(4, device="meta") for _ in weights]
    operations = []
    y = ops.cross_embed(x, weights, biases, 2, pad_rows=(1, 1), pad_cols=(1, 1))
    functions = [y.grad_fn]
    while functions:
        function = functions.pop()
        operations.append(function.name())
        functions += [before for before, _ in function.next_functions if before is not None]
    assert "ConvolutionBackward0" in operations
    assert "SliceBackward0" not in operations
