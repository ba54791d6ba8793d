"""Random fields against the addition theorem, scipy's harmonics and the covariance they are made for."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import eval_legendre, sph_harm_y

from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.inference.random_field import EARTH_RADIUS_KM, SphericalRandomField, normalised_legendre


def grid(height=24, width=48):
    latitude = np.linspace(90 - 90 / height, -90 + 90 / height, height)
    return Grid(latitude, np.arange(width) * 360 / width)


def test_legendre_functions_are_those_of_scipy():
    latitude = np.deg2rad([-80.0, -10.0, 3.0, 55.0, 89.0])
    ours = normalised_legendre(np.sin(latitude), 40)
    for n in (0, 1, 2, 7, 40):
        for m in range(n + 1):
            theirs = sph_harm_y(n, m, np.pi / 2 - latitude, 0.0).real * (-1) ** m  # scipy has the Condon-Shortley phase
            np.testing.assert_allclose(ours[n, m], theirs, atol=1e-12)


@pytest.mark.parametrize("length", [500.0, 1000.0, 3000.0])
def test_variance_is_one_at_every_point(length):
    field = SphericalRandomField(grid(), length)
    twice = np.where(np.arange(field.top + 1) == 0, 1, 2)
    variance = np.einsum("n,nmh,m->h", field.scale**2, field.legendre**2, twice)
    np.testing.assert_allclose(variance, 1, rtol=1e-12)


def test_covariance_is_the_sum_over_degrees():
    field = SphericalRandomField(grid(), 2000.0)
    rng = np.random.default_rng(0)
    draws = np.stack([field.draw(rng) for _ in range(3000)])
    row, shift = 12, 3
    lat = np.deg2rad(grid().latitude[row])
    cosine = np.sin(lat) ** 2 + np.cos(lat) ** 2 * np.cos(np.deg2rad(shift * 7.5))
    n = np.arange(field.top + 1)
    expected = ((2 * n + 1) * field.scale**2 * eval_legendre(n, cosine)).sum() / (4 * np.pi)
    sampled = (draws[:, row] * np.roll(draws[:, row], shift, -1)).mean()
    assert abs(sampled - expected) < 0.03  # 3000 draws of some ten independent places around the row
    assert abs(expected - np.exp(-((EARTH_RADIUS_KM * np.arccos(cosine) / 2000) ** 2) / 2)) < 0.06
    assert abs(draws.mean((0, 1, 2))) < 0.01


class OneAtATime:
    """In place of random numbers, all zero but one, which is another one at each call."""

    def __init__(self):
        self.calls = 0

    def standard_normal(self, shape):
        drawn = np.zeros(shape)
        drawn.flat[self.calls] = 1
        self.calls += 1
        return drawn


@pytest.mark.parametrize("longitudes", [np.arange(10) * 36.0, 350 - np.arange(7) * 20.0])
def test_the_covariance_of_any_two_points_depends_on_their_distance_alone(longitudes):
    """Of all pairs, those across the poles and of other rows too: the sum over all coefficients, not a sample."""
    points = Grid(np.linspace(90, -90, 17), longitudes)
    field, numbers = SphericalRandomField(points, 3500.0), OneAtATime()
    responses = np.stack([field.draw(numbers).ravel() for _ in range(2 * (field.top + 1) ** 2)])
    phi, lam = (np.deg2rad(x) for x in np.meshgrid(points.latitude, points.longitude, indexing="ij"))
    place = np.stack([np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)]).reshape(3, -1)
    cosine, n = np.clip(place.T @ place, -1, 1), np.arange(field.top + 1)[:, None, None]
    power = (2 * n + 1) * np.exp(-n * (n + 1) * (3500.0 / EARTH_RADIUS_KM) ** 2 / 2) * (n > 0)
    expected = (power * eval_legendre(n, cosine)).sum(0) / power.sum()
    np.testing.assert_allclose(responses.T @ responses, expected, atol=1e-12)


@pytest.mark.parametrize(("rows", "spacing", "length"), [(64, 0.25, 100.0), (100, 0.03, 50.0)])
def test_a_region_has_the_length_scale_that_was_asked_for(rows, spacing, length):
    """The covariance of the field along a meridian, of all degrees of the sampler, is the Gaussian of the length."""
    region = Grid(45 + spacing * (rows / 2 - np.arange(rows)), 10 + spacing * np.arange(8))
    field = SphericalRandomField(region, length)
    angle = np.deg2rad(spacing * np.arange(0, rows, 4))
    n = np.arange(field.top + 1)
    harmonics = eval_legendre(n[:, None], np.cos(angle))
    covariance = ((2 * n + 1) * field.scale**2) @ harmonics / (4 * np.pi)
    np.testing.assert_allclose(covariance, np.exp(-((EARTH_RADIUS_KM * angle / length) ** 2) / 2), atol=0.01)


def test_fields_too_fine_for_the_memory_are_refused():
    fine = Grid(45 - 0.01 * np.arange(500), 0.01 * np.arange(500))
    with pytest.raises(UserError, match=r"length_scale_km: expected .* at most 4 GiB, got 10, .* degree 36\d\d"):
        SphericalRandomField(fine, 10.0)
