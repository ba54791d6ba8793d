"""Convolutions with wide kernels through the Fourier transform equal the direct ones, gradients included."""

import pytest
import torch
from torch.nn import functional

from credit_like import ops
from credit_like.ops.cpu import fourier, policy
from tests.ops.agreement import assert_same_function


@pytest.mark.parametrize(("taps", "tile"), [(3, 16), (8, 16), (8, 40), (16, 24)])
@pytest.mark.parametrize(("batch", "rows", "columns", "channels"), [(1, 30, 47, 3), (2, 17, 19, 6)])
@pytest.mark.parametrize("most_bytes", [10**6, 10**5])  # several groups of tiles; several parts of the weights
def test_a_tiled_correlation_equals_the_direct_one(taps, tile, batch, rows, columns, channels, most_bytes, monkeypatch):
    monkeypatch.setattr(fourier, "MOST_BYTES", most_bytes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, rows, columns, channels, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(taps, taps, channels, 5, dtype=torch.float64, generator=generator).requires_grad_()
    expected = functional.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)
    y = fourier.correlate(x, w, tile)
    assert_same_function(y, expected, [x, w], generator, 1e-10)


@pytest.mark.parametrize("stride", [2, 4])
def test_a_cross_embedding_is_the_same_with_and_without_it(stride, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 8, 16, 32)
    x = torch.randn(1, 48, 64, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weights = [torch.randn(4, 3, k, k, dtype=torch.float64, generator=generator).requires_grad_() for k in sizes]
    biases = [torch.randn(4, dtype=torch.float64, generator=generator).requires_grad_() for _ in sizes]
    pads = ((32 - stride) // 2, 32 - stride - (32 - stride) // 2)
    results = []
    for fast in (False, True):
        monkeypatch.setattr(policy, "_enabled", fast)
        monkeypatch.setattr(policy, "by_fourier", lambda rows, columns, kernel, *_: kernel >= 16)
        y = ops.cross_embed(x, weights, biases, stride, pad_rows=pads, pad_cols=pads)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *weights, *biases])])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() < 1e-11 * b.norm()


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("before", [(0, 0), (5, 1), (-2, -3)])
@pytest.mark.parametrize("count", [(2, 3), (9, 8)])
def test_phases_are_those_of_the_padded_image(stride, before, count):
    x = torch.randn(2, 11, 13, 3, dtype=torch.float64, requires_grad=True)
    rows, columns = count
    padded = functional.pad(x, (0, 0, before[1], 99, before[0], 99))[:, : rows * stride, : columns * stride]
    split = padded.reshape(2, rows, stride, columns, stride, 3).permute(0, 1, 3, 2, 4, 5)
    expected = split.reshape(2, rows, columns, stride * stride * 3)
    cotangent = torch.randn_like(expected)
    assert torch.equal(fourier.phases(x.detach(), stride, rows, columns, before), expected)
    gradient = torch.autograd.grad((expected * cotangent).sum(), x)[0]
    assert torch.equal(fourier.from_phases(cotangent, x.shape, (stride, rows, columns, before)), gradient)
