"""Matrix products, and convolutions and blocks made of them, are the same by either library."""

import platform

import pytest
import torch
from torch.nn import functional

from credit_like.ops.cpu import direct, matrix, policy
from credit_like.plan import meter  # noqa: F401  registers how products are counted

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise") or platform.machine() not in ("x86_64", "AMD64"),
    reason="torch has no oneDNN for this processor",
)


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def library(request, monkeypatch):
    monkeypatch.setattr(policy, "prefers_onednn", lambda x: request.param and x.dtype == torch.float32)
    monkeypatch.setattr(matrix, "ONEDNN_FROM", 1)
    monkeypatch.setattr(matrix, "TRANSPOSED_FROM", 1)
    return request.param


def layouts(rows, columns, generator):
    """Yield a matrix in four orders of memory: rows first, columns first, and a part of a wider one in both."""
    wide = torch.randn(rows + 3, columns + 5, generator=generator)
    yield wide[:rows, :columns].contiguous()
    yield wide[:rows, :columns].t().contiguous().t()
    yield wide[2 : rows + 2, 4 : columns + 4]
    yield torch.randn(columns + 5, rows + 3, generator=generator).t()[1 : rows + 1, 3 : columns + 3]


def close(got, expected):
    return got.shape == expected.shape and (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("size", [(7, 33, 20), (130, 64, 256), (1, 48, 5)])
def test_products_in_every_order_of_memory(library, size):
    rows, inner, columns = size
    generator = torch.Generator().manual_seed(0)
    bias, out = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    for a in layouts(rows, inner, generator):
        for b in layouts(inner, columns, generator):
            expected = a.double() @ b.double()
            assert close(matrix.product(a, b), expected)
            assert close(matrix.product(a, b, bias), expected + bias)
            assert close(matrix.widen(a, b.t(), bias), expected + bias)
            assert close(matrix.add_product(out.clone(), a, b, 0.5), out + 0.5 * expected)
            assert close(matrix.add_product(torch.full_like(out, torch.nan), a, b, keep=False), expected)
        for x in layouts(rows, columns, generator):
            gradient = matrix.gradient(a, x)
            assert close(gradient, a.double().t() @ x.double())


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 2), (8, 4)])
def test_convolutions_and_their_gradients(library, kernel, stride):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 40, 5, generator=generator).requires_grad_()
    weight = torch.randn(12, 5, kernel, kernel, generator=generator).requires_grad_()
    bias = torch.randn(12, generator=generator).requires_grad_()
    before = (kernel - stride) // 2
    pads = (before, kernel - stride - before)
    y = direct.conv(x, weight, bias, stride, pads, pads)
    cotangent = torch.randn(y.shape, generator=generator)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    padded = functional.pad(wide[0], (0, 0, *pads, *pads)).permute(0, 3, 1, 2)
    expected = functional.conv2d(padded, *wide[1:], stride=stride).permute(0, 2, 3, 1)
    for got, of_wide in zip(
        [y, *torch.autograd.grad((y * cotangent).sum(), [x, weight, bias])],
        [expected, *torch.autograd.grad((expected * cotangent).sum(), wide)],
        strict=True,
    ):
        assert close(got, of_wide)


def test_products_are_counted_by_either_library(library):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        matrix.product(torch.ones(6, 5), torch.ones(5, 7))
    assert counter.get_total_flops() == 2 * 6 * 5 * 7


def test_other_precisions_are_left_to_torch():
    assert not policy.prefers_onednn(torch.ones(1, dtype=torch.float64))
