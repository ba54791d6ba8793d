"""Spectral normalisation against the singular value decomposition and against autograd."""

import pytest
import torch
from torch import nn

from credit_like.nn import spectral_norm
from credit_like.nn.conv import ConvTranspose2d
from credit_like.nn.init import initialise
from credit_like.nn.linear import Linear
from credit_like.plan.meter import Meter


@pytest.mark.parametrize("kind", ["linear", "transposed"])
def test_sigma_is_the_largest_singular_value(kind):
    layer = Linear(12, 7, spectral_norm=True) if kind == "linear" else ConvTranspose2d(6, 5, 2, spectral_norm=True)
    initialise(layer, 0).double()
    for _ in range(400):
        spectral_norm.before_step(layer)
    matrix = layer.weight if kind == "linear" else layer.weight.movedim(1, 0).flatten(1)
    assert torch.linalg.svdvals(matrix)[0].item() == pytest.approx(1 / layer.spectral.inv_sigma.item(), rel=1e-9)
    assert torch.linalg.matrix_norm(
        layer.effective_weight().movedim(0 if kind == "linear" else 1, 0).flatten(1), 2
    ).item() == (pytest.approx(1.0, rel=1e-9))


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("output_dim", [0, 1])
def test_the_gradient_is_that_of_sigma_as_a_function_of_the_weight(in_backward, output_dim):
    layer = ConvTranspose2d(6, 5, 2, spectral_norm=True) if output_dim else Linear(12, 7, spectral_norm=True)
    initialise(layer, 1).double()
    spectral_norm.before_step(layer)
    layer.spectral.in_backward = in_backward
    cotangent = torch.randn(layer.weight.shape, dtype=torch.float64)
    (layer.effective_weight() * cotangent).sum().backward()
    spectral_norm.correct_gradients(layer)
    weight = layer.weight.detach().clone().requires_grad_()
    matrix = weight.movedim(output_dim, 0).flatten(1)
    sigma = layer.spectral.u @ matrix @ layer.spectral.v
    (weight / sigma * cotangent).sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad, rtol=1e-12, atol=1e-12)


def test_one_iteration_is_the_definition():
    layer = initialise(Linear(12, 7, spectral_norm=True), 2).double()
    u = layer.spectral.u.clone()
    spectral_norm.before_step(layer)
    v = torch.nn.functional.normalize(layer.weight.T @ u, dim=0)
    u = torch.nn.functional.normalize(layer.weight @ v, dim=0)
    torch.testing.assert_close(layer.spectral.v, v)
    torch.testing.assert_close(layer.spectral.u, u)
    torch.testing.assert_close(layer.effective_weight(), layer.weight / (u @ layer.weight @ v))


def test_forward_leaves_the_state_alone():
    layer = initialise(Linear(12, 7, spectral_norm=True), 3)
    before = {name: value.clone() for name, value in layer.named_buffers()}
    layer.train()(torch.randn(4, 12)).sum().backward()
    for name, value in layer.named_buffers():
        assert torch.equal(value, before[name])


def test_large_weights_of_one_shape_are_processed_one_after_the_other_without_copies(monkeypatch):
    made = [initialise(nn.Sequential(*(Linear(64, 96, spectral_norm=True) for _ in range(4))), 5) for _ in range(2)]
    spectral_norm.before_step(made[0])
    monkeypatch.setattr(spectral_norm, "_TOGETHER", 64 * 96)
    meter = Meter()
    meter.ignore([*made[1].parameters(), *made[1].buffers()])
    with meter:
        spectral_norm.refresh(made[1])
    assert meter.peak < 64 * 96 * 4
    spectral_norm.before_step(made[1])
    for together, alone in zip(made[0].state_dict().values(), made[1].state_dict().values(), strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
