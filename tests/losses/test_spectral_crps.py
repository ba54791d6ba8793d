"""The CRPS of zonal Fourier coefficients: its basis, and brute force on coefficients by sums of cosines and sines."""

from __future__ import annotations

import math

import pytest
import torch

from credit_like.losses import crps, spectral_crps


def basis(width):
    """The orthonormal functions as columns: mean, cosines, sines."""
    x = 2 * math.pi * torch.arange(width, dtype=torch.float64) / width
    cosines = [torch.cos(m * x) for m in range(width // 2 + 1)]
    sines = [-torch.sin(m * x) for m in range(1, (width + 1) // 2)]
    columns = torch.stack(cosines + sines, -1)
    return columns / columns.norm(dim=0)


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_coefficients_are_those_of_an_orthonormal_basis(width):
    functions = basis(width)
    torch.testing.assert_close(functions.T @ functions, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-13)
    x = torch.randn(2, 3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(spectral_crps.coefficients(x), x @ functions, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", [7, 8])
@pytest.mark.parametrize("point_weight", [0.0, 0.5])
def test_value_and_gradient_equal_those_of_the_definition(width, point_weight):
    error = torch.randn(2, 4, 3, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    config, results = spectral_crps.Config(alpha=0.9, point_weight=point_weight), []

    def defined(e):
        of_rows = [crps.of_members(crps.Config(alpha=0.9), x).mean(-1) for x in (e @ basis(width), e)]
        return of_rows[0] + point_weight * of_rows[1]

    for score in (lambda e: spectral_crps.of_members(config, e).mean(-1), defined):
        e = error.clone().requires_grad_()
        value = score(e)
        (value * weight).sum().backward()
        results.append((value.detach(), e.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
