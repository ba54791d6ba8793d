"""Convolutions whose columns are output channels equal the plain ones, in values and gradients."""

from types import SimpleNamespace

import pytest
import torch

from credit_like import ops
from credit_like.models import wxformer
from credit_like.ops import wide
from tests.ops.agreement import StridedConvolutions, assert_same_function

CASES = [  # kernels, stride, channels, outputs, rows and columns, zero rows, zero columns
    ((4, 8, 16, 32), 2, 5, (8, 4, 2, 2), (34, 40), (15, 15), (15, 15)),
    ((4, 8), 2, 4, (3, 5), (16, 19), (3, 3), (3, 3)),
    ((5, 9), 3, 3, (2, 1), (21, 25), (3, 3), (3, 3)),  # shifts that are no multiple of the stride
    ((3, 6, 11), 2, 1, (1, 2, 3), (17, 23), (4, 5), (0, 9)),
    ((8,), 4, 6, (2,), (16, 16), (2, 2), (2, 2)),
    ((2, 4, 8), 2, 3, (4, 2, 2), (24, 18), (-2, 0), (3, 3)),  # a band with halo rows that nothing reads
    ((4, 4), 1, 2, (2, 2), (9, 11), (1, 2), (1, 2)),
]


def _inputs(kernels, channels, outputs, size, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, channels, *size, generator=generator, dtype=dtype).permute(0, 2, 3, 1).requires_grad_()
    weights = [
        torch.randn(o, channels, k, k, generator=generator, dtype=dtype).requires_grad_()
        for o, k in zip(outputs, kernels, strict=True)
    ]
    return x, weights, [torch.randn(o, generator=generator, dtype=dtype).requires_grad_() for o in outputs]


def _embedded(x, weights, biases, stride, rows, columns):
    with ops.cpu.policy.disabled():
        return ops.cross_embed(x, weights, biases, stride, pad_rows=rows, pad_cols=columns)


def _assert_same(y, expected, x, weights, biases):
    generator = torch.Generator().manual_seed(1)
    assert_same_function(y, expected, [x, *weights, *biases], generator, 1e-12)


@pytest.mark.parametrize(("kernels", "stride", "channels", "outputs", "size", "rows", "columns"), CASES)
def test_values_and_gradients_are_those_of_torch(kernels, stride, channels, outputs, size, rows, columns, monkeypatch):
    inputs = _inputs(kernels, channels, outputs, size)
    expected = _embedded(*inputs, stride, rows, columns)
    monkeypatch.setattr(wide, "applies", lambda *_: True)
    _assert_same(_embedded(*inputs, stride, rows, columns), expected, *inputs)


def test_compiled_they_are_the_same(monkeypatch):
    kernels, stride, channels, outputs, size, rows, columns = CASES[0]
    inputs = _inputs(kernels, channels, outputs, size)
    expected = _embedded(*inputs, stride, rows, columns)
    monkeypatch.setattr(wide, "applies", lambda *_: True)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    def compiled(x, weights, biases):
        return ops.cross_embed(x, weights, biases, stride, pad_rows=rows, pad_cols=columns)

    _assert_same(compiled(*inputs), expected, *inputs)


def test_partial_sums_in_bfloat16_are_added_in_float32(monkeypatch):
    x, weights, biases = _inputs((32,), 8, (4,), (62, 62), torch.float32)
    expected = ops.cross_embed(x, weights, biases, 2, pad_rows=(15, 15), pad_cols=(15, 15))
    monkeypatch.setattr(wide, "applies", lambda *_: True)
    y = ops.cross_embed(
        x.bfloat16(), [w.bfloat16() for w in weights], [b.bfloat16() for b in biases], 2,
        pad_rows=(15, 15), pad_cols=(15, 15),
    )  # fmt: skip
    assert y.dtype == torch.bfloat16
    assert float((y - expected).detach().norm() / expected.detach().norm()) < 0.005


def test_it_is_the_form_on_gpus_alone():
    few_and_wide, narrow = [torch.empty(16, 3, 32, 32)], [torch.empty(16, 3, 4, 4)]
    on_gpu, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    assert wide.applies(on_gpu, few_and_wide, 2)
    assert not wide.applies(on_gpu, narrow, 2)
    assert not wide.applies(on_cpu, few_and_wide, 2)


def test_on_a_gpu_only_the_first_embedding_of_the_large_models_is_affected(monkeypatch):
    """Its products have 64 columns or more where the kernels have 4 or 16 outputs; all read channels last."""
    monkeypatch.setattr(wide, "applies", lambda _, *rest: wide.suits(*rest))
    section = {
        "dim": [128, 256, 512, 1024], "depth": [1, 1, 1, 1], "cross_embed_kernel_sizes": [[4, 8, 16, 32], [2, 4], [2, 4], [2, 4]],
        "global_window_size": [2, 2, 2, 1], "local_window_size": 2,
    }  # fmt: skip
    config = wxformer.Config.model_validate(section)
    with torch.device("meta"):
        model = wxformer.build(config, in_channels=79, out_channels=70, frames=1, height=64, width=128)
        with StridedConvolutions() as seen:
            model(torch.empty(1, 79, 1, 64, 128))
    shapes = [tuple(weight.shape) for _, weight in seen.operands]
    assert shapes[:4] == [(128, 160, 4, 1), (128, 160, 8, 1), (128, 160, 16, 1), (256, 160, 32, 1)]
    assert all(shape[-1] == shape[-2] for shape in shapes[4:])
    assert all(x.stride(1) == 1 for x, _ in seen.operands)
