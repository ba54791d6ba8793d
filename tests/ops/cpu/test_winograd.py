"""Convolutions in Winograd's form equal the direct ones, gradients included."""

import pytest
import torch
from torch.nn import functional

from credit_like import ops
from credit_like.ops.cpu import policy, winograd
from tests.ops.agreement import assert_same_function


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("strip", [1, 2000, 2**18])
@pytest.mark.parametrize(
    ("size", "pad_rows", "pad_cols"),
    [
        ((7, 9, 3, 5), (1, 1), (1, 1)),
        ((13, 6, 9, 8), (0, 0), (1, 1)),
        ((5, 6, 8, 2), (2, 0), (0, 2)),
        ((3, 3, 1, 1), (0, 0), (0, 0)),
    ],
)
def test_it_equals_the_direct_convolution(size, pad_rows, pad_cols, strip, forward, monkeypatch):
    monkeypatch.setattr(winograd, "STRIP", strip)
    height, width, channels, outputs = size
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    x, weight, bias = random(2, height, width, channels), random(outputs, channels, 3, 3), random(outputs)
    padded = functional.pad(x, (0, 0, *pad_cols, *pad_rows)).permute(0, 3, 1, 2)
    expected = functional.conv2d(padded, weight, bias).permute(0, 2, 3, 1)
    y = winograd.conv3x3(x, weight, bias, pad_rows, pad_cols, forward=forward)
    assert_same_function(y, expected, [x, weight, bias], generator, 1e-11)


def test_single_precision_is_kept(monkeypatch):
    monkeypatch.setattr(policy, "prefers_onednn", lambda x: False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 36, 40, 128, generator=generator).requires_grad_()
    weight = torch.randn(104, 128, 3, 3, generator=generator).requires_grad_()
    assert policy.by_winograd(36 * 40, 128, 104) == (True, True)
    y = ops.conv3x3(x, weight, None)
    cotangent = torch.randn(y.shape, generator=generator)
    got = [y, *torch.autograd.grad((y * cotangent).sum(), [x, weight])]
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = functional.conv2d(x64.permute(0, 3, 1, 2), w64, padding=1).permute(0, 2, 3, 1)
    for a, b in zip(got, [expected, *torch.autograd.grad((expected * cotangent).sum(), [x64, w64])], strict=True):
        assert (a - b).norm() < 2e-6 * b.norm()
