"""Synthesis of spherical harmonics, against a sum of scipy's and against derivatives in closed form."""

from importlib.util import find_spec

import numpy as np
import pytest
from scipy.special import sph_harm_y

from credit_like.data.sources import _spectral
from credit_like.data.sources._spectral import Synthesis, gaussian_grid, size
from credit_like.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("ducc0") is None, reason="the extra `grib` (ducc0) is not installed")


def coefficients(truncation, seed=0):
    """Return random values of a message; those of order 0 are real."""
    values = np.random.default_rng(seed).standard_normal(size(truncation))
    values[1 : 2 * (truncation + 1) : 2] = 0
    return values


def summed(values, truncation, latitude, longitude):
    """Return the field by the sum that defines it, over positive and negative orders."""
    theta, phi = np.deg2rad(90 - latitude)[:, None], np.deg2rad(longitude)
    total, at = np.zeros((len(latitude), len(longitude))), 0
    for m in range(truncation + 1):
        for n in range(m, truncation + 1):
            x = (values[at] + 1j * values[at + 1]) * (-1) ** m * np.sqrt(4 * np.pi) * sph_harm_y(n, m, theta, phi)
            total += x.real if m == 0 else 2 * x.real
            at += 2
    return total


@pytest.mark.parametrize(
    ("truncation", "latitude", "longitude"),
    [
        (10, np.linspace(90, -90, 19), np.arange(36) * 10.0),  # with poles
        (21, *gaussian_grid(21)),
        (21, np.linspace(90, -90, 7), np.arange(8) * 45.0),  # fewer points than waves
        (7, np.array([10.0, 20.0, 31.5]), 350 + np.arange(5) * 2.5),  # part of the globe, south first
        (5, np.array([0.0]), np.array([30.0])),
    ],
    ids=["poles", "gaussian", "coarse", "region", "point"],
)
def test_values_are_those_of_the_sum(truncation, latitude, longitude):
    values = coefficients(truncation)
    expected = summed(values, truncation, latitude, longitude)
    found = Synthesis(truncation, latitude, longitude)(values)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_the_first_coefficient_is_the_mean_and_waves_have_no_other_sign():
    """X_11 P_11 e^{iλ} with P_11 = √(3/2) cos φ, positive at longitude 0."""
    latitude, longitude = gaussian_grid(5)
    values = np.zeros(size(5))
    values[0], values[2 * 6] = 250.0, 2.0
    expected = 250 + 4 * np.sqrt(1.5) * np.cos(np.deg2rad(latitude))[:, None] * np.cos(np.deg2rad(longitude))
    np.testing.assert_allclose(Synthesis(5, latitude, longitude)(values), expected, rtol=1e-13)


def test_wind_has_the_vorticity_and_divergence_it_came_from():
    """Of random coefficients, by differences on a fine grid; a solid rotation in closed form."""
    truncation, a = 6, _spectral._EARTH_RADIUS
    latitude, longitude = np.linspace(30, 20, 101), np.arange(3600) * 0.1
    zeta, delta = coefficients(truncation, 1) * 1e-5, coefficients(truncation, 2) * 1e-5
    zeta[0] = delta[0] = 0
    synthesis = Synthesis(truncation, latitude, longitude)
    u, v = synthesis.wind(zeta, delta)
    phi, step = np.deg2rad(latitude)[:, None], np.deg2rad(0.1)

    def east(x):
        return (np.roll(x, -1, 1) - np.roll(x, 1, 1)) / (2 * step)

    def north(x):
        return (x[:-2] - x[2:]) / (2 * step)

    inner = np.cos(phi)[1:-1]
    found = (east(v)[1:-1] - north(u * np.cos(phi))) / (a * inner)
    np.testing.assert_allclose(found, synthesis(zeta)[1:-1], rtol=0, atol=1e-4 * np.abs(found).max())
    found = (east(u)[1:-1] + north(v * np.cos(phi))) / (a * inner)
    np.testing.assert_allclose(found, synthesis(delta)[1:-1], rtol=0, atol=1e-4 * np.abs(found).max())

    rotation = np.zeros(size(truncation))
    rotation[2] = 2 * 10 / a / np.sqrt(3)  # ζ = 2 U sin φ / a for u = U cos φ, and P_10 = √3 sin φ
    u, v = Synthesis(truncation, np.array([90.0, 45.0, 0.0]), longitude).wind(rotation, 0 * rotation)
    np.testing.assert_allclose(u, np.broadcast_to([[0], [10 / np.sqrt(2)], [10]], u.shape), rtol=0, atol=1e-12)
    np.testing.assert_allclose(v, 0, rtol=0, atol=1e-12)


def test_the_gaussian_grid_is_that_of_the_truncation():
    latitude, longitude = gaussian_grid(639)
    assert (len(latitude), len(longitude)) == (640, 1280)
    assert latitude[0] == pytest.approx(89.784877, abs=1e-6)  # N320, as ECMWF lists it
    assert longitude[1] == 0.28125
    assert len(gaussian_grid(10)[0]) == 12


def test_uneven_columns_are_refused():
    with pytest.raises(UserError, match=r"evenly spaced around the globe .* 3 from 0 to 25"):
        Synthesis(5, np.array([0.0]), np.array([0.0, 10.0, 25.0]))


def test_without_the_library_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ducc0", None)
    with pytest.raises(UserError, match=r"install 'credit-like\[grib\]'"):
        Synthesis(5, np.array([0.0]), np.array([0.0]))
