"""Vorticity and divergence against closed forms on the sphere."""

import numpy as np
import pytest
import torch

from credit_like.derive.horizontal import EARTH_RADIUS, divergence, vorticity
from credit_like.grid import Grid

GRIDS = {
    "with poles": Grid(np.linspace(90, -90, 181), np.arange(360.0)),
    "ascending, without poles": Grid(np.linspace(-89.5, 89.5, 180), np.arange(0.5, 360)),
    "regional over Greenwich": Grid(np.linspace(60, 20, 81), np.linspace(340, 380, 81) % 360),
}


def fields(grid):
    latitude, longitude = (torch.deg2rad(torch.from_numpy(x)) for x in (grid.latitude, grid.longitude))
    return latitude[:, None].expand(grid.height, grid.width), longitude.expand(grid.height, grid.width)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_solid_rotation(grid):
    latitude, _ = fields(grid)
    u = 20 * latitude.cos()
    expected = 40 * latitude.sin() / EARTH_RADIUS
    inner = slice(None) if grid.is_global and abs(grid.latitude[0]) == 90 else slice(1, -1)
    error = (vorticity(u, 0 * u, grid) - expected).abs()
    assert error[inner].max() < 1e-3 * expected.abs().max()
    assert divergence(u, 0 * u, grid).abs().max() < 1e-15


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_gradient_and_rotated_gradient_of_a_spherical_harmonic(grid):
    # χ = a² cos²φ sin 2λ has Laplacian −6 χ / a² (degree 2).
    latitude, longitude = fields(grid)
    along = EARTH_RADIUS * 2 * latitude.cos() * (2 * longitude).cos()
    across = EARTH_RADIUS * -2 * latitude.cos() * latitude.sin() * (2 * longitude).sin()
    expected = -6 * latitude.cos() ** 2 * (2 * longitude).sin()
    inner = (slice(1, -1), slice(None) if grid.is_periodic else slice(1, -1))
    for result in (divergence(along, across, grid), vorticity(-across, along, grid)):
        assert (result - expected)[inner].abs().max() < 2e-3 * 6
    for nothing in (vorticity(along, across, grid), divergence(-across, along, grid)):
        assert nothing[inner].abs().max() < 2e-3 * 6


def test_gradients_reach_the_winds():
    grid = Grid(np.linspace(90, -90, 7), np.arange(0.0, 360, 90))
    u, v = (torch.randn(7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda u, v: (1e6 * vorticity(u, v, grid), 1e6 * divergence(u, v, grid)), (u, v))
