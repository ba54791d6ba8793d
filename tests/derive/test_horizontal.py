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


WITHOUT_POLES = {
    "cells": np.linspace(89.5, -89.5, 180),
    "Gaussian, ascending": np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(160)[0])),
    "a cap": np.linspace(89.5, 30.5, 60),
}


def of_harmonics(latitude, longitude):
    """Return u, v, vorticity and divergence of ψ = a sin φ cos³φ cos 3λ (degree 4) and χ = a cos²φ sin 2λ (degree 2)."""
    phi, lam = np.deg2rad(latitude)[:, None], np.deg2rad(longitude)
    c, s = np.cos(phi), np.sin(phi)
    u = -(c**4 - 3 * s**2 * c**2) * np.cos(3 * lam) + 2 * c * np.cos(2 * lam)
    v = -3 * s * c**2 * np.sin(3 * lam) - 2 * c * s * np.sin(2 * lam)
    found = u, v, -20 / EARTH_RADIUS * s * c**3 * np.cos(3 * lam), -6 / EARTH_RADIUS * c**2 * np.sin(2 * lam)
    return tuple(map(torch.from_numpy, found))


@pytest.mark.parametrize("latitude", WITHOUT_POLES.values(), ids=WITHOUT_POLES)
@pytest.mark.parametrize("longitude", [np.arange(360.0), np.arange(0, 90.5)], ids=["circles", "sector"])
def test_rows_beside_a_pole_that_is_no_row_are_as_exact_as_others(latitude, longitude):
    """A one-sided difference had an error of half of the largest value, at any resolution."""
    u, v, *expected = of_harmonics(latitude, longitude)
    grid = Grid(latitude, longitude)
    polar = np.abs(latitude) > 89
    assert polar.any()
    for compute, wanted in zip((vorticity, divergence), expected, strict=True):
        error = (compute(u, v, grid) - wanted).abs()[polar][:, 1:-1]
        assert error.max() < 0.02 * wanted.abs().max()
    rotation = vorticity(20 * torch.cos(torch.deg2rad(torch.from_numpy(latitude)))[:, None] + 0 * u, 0 * u, grid)
    expected = 40 * torch.sin(torch.deg2rad(torch.from_numpy(latitude)))[:, None] / EARTH_RADIUS
    assert (rotation - expected)[polar].abs().max() < 1e-3 * expected.abs().max()


def test_edges_of_an_area_do_not_reach_to_the_pole():
    """Rows are missing between them: the difference is that of the two outermost rows."""
    latitude, longitude = np.linspace(60, 20, 81), np.arange(0, 90.5)
    _, v, *_ = of_harmonics(latitude, longitude)
    phi = torch.deg2rad(torch.from_numpy(latitude))[:, None]
    flow = v * phi.cos()
    for edge, inner in ((0, 1), (-1, -2)):
        expected = (flow[edge] - flow[inner]) / (phi[edge] - phi[inner]) / (EARTH_RADIUS * phi[edge].cos())
        found = divergence(0 * v, v, Grid(latitude, longitude))[edge]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_a_pole_of_a_sector_is_not_taken_for_one_of_whole_circles():
    """The wind along a part of a circle is no circulation."""
    latitude, longitude = np.linspace(90, 30, 61), np.arange(0, 90.5)
    u, v, *expected = of_harmonics(latitude, longitude)
    for compute, wanted in zip((vorticity, divergence), expected, strict=True):
        error = (compute(u, v, Grid(latitude, longitude)) - wanted).abs()
        assert error[0].max() < 0.02 * wanted.abs().max()


def test_gradients_reach_the_winds():
    grid = Grid(np.linspace(90, -90, 7), np.arange(0.0, 360, 90))
    u, v = (torch.randn(7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda u, v: (1e6 * vorticity(u, v, grid), 1e6 * divergence(u, v, grid)), (u, v))
