"""Area weights against WeatherBench 2's definition and the closed form, whichever way the rows run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_like.errors import UserError
from credit_like.grid import Grid


def uniform(height, width, poles):
    """A global grid with rows on the poles, or half a row away from them."""
    latitude = np.linspace(-90, 90, height) if poles else -90 + (np.arange(height) + 0.5) * 180 / height
    return Grid(latitude, np.arange(width) * 360 / width)


def weatherbench2(latitude):
    """Weights as WeatherBench 2 defines them for ascending latitudes: differences of sines of the cell bounds."""
    points = np.deg2rad(latitude)
    bounds = np.concatenate([[-np.pi / 2], (points[:-1] + points[1:]) / 2, [np.pi / 2]])
    weights = np.sin(bounds[1:]) - np.sin(bounds[:-1])
    return weights / np.mean(weights)


@settings(deadline=None)
@given(st.integers(2, 90), st.booleans())
def test_global_weights_are_weatherbench2s_in_both_orders(height, poles):
    up = uniform(height, 8, poles)
    down = Grid(up.latitude[::-1], up.longitude)
    assert up.is_global
    assert down.is_global
    np.testing.assert_allclose(up.latitude_weights(), weatherbench2(up.latitude), rtol=1e-12)
    np.testing.assert_allclose(down.latitude_weights(), weatherbench2(up.latitude)[::-1], rtol=1e-12)


@settings(deadline=None)
@given(st.integers(2, 90))
def test_half_row_weights_are_the_sine_of_half_a_row_times_the_cosine_of_latitude(height):
    """Between φ − δ and φ + δ: sin(φ + δ) − sin(φ − δ) = 2 cos φ sin δ; the sum over the globe is 2."""
    grid = uniform(height, 8, poles=False)
    closed = height * np.cos(np.deg2rad(grid.latitude)) * np.sin(np.pi / 2 / height)
    np.testing.assert_allclose(grid.latitude_weights(), closed, rtol=1e-11)


def test_gaussian_grids_are_global():
    nodes, quadrature = np.polynomial.legendre.leggauss(32)
    grid = Grid(np.rad2deg(np.arcsin(nodes))[::-1], np.arange(64) * 5.625)
    assert grid.is_global
    np.testing.assert_allclose(grid.latitude_weights(), weatherbench2(grid.latitude[::-1])[::-1], rtol=1e-12)
    # The quadrature of the transform itself, which gives the rows next to the poles less.
    np.testing.assert_allclose(grid.latitude_weights()[1:-1], 16 * quadrature[1:-1], rtol=2e-3)


@settings(deadline=None)
@given(st.lists(st.floats(-89, 89), min_size=2, max_size=20, unique_by=lambda x: round(x, 1)), st.booleans())
def test_weights_are_positive_with_mean_one(latitudes, descending):
    grid = Grid(np.array(sorted(latitudes, reverse=descending)), np.linspace(0, 30, 4))
    weights = grid.latitude_weights()
    assert (weights > 0).all()
    assert weights.mean() == pytest.approx(1)


def test_a_region_ends_half_a_row_beyond_its_rows():
    """An even region's rows count like the cosine of their latitude, the outermost ones too."""
    grid = Grid(np.arange(20.0, 61.0, 1.25), np.arange(-140.0, -52.0, 2.5))
    assert not grid.is_global
    cosine = np.cos(np.deg2rad(grid.latitude))
    np.testing.assert_allclose(grid.latitude_weights(), cosine / cosine.mean(), rtol=1e-12)


def test_a_band_around_the_globe_is_not_global_and_a_turn_over_greenwich_is_a_small_step():
    band = Grid(np.arange(-30.0, 31.0, 10.0), np.arange(0.0, 360.0, 10.0))
    assert band.is_periodic
    assert not band.is_global
    assert Grid(np.arange(-85.0, 86.0, 10.0), (np.arange(36) * 10.0 + 200) % 360).is_global
    assert Grid(np.arange(-85.0, 86.0, 10.0), np.arange(36) * 10.0 - 180).is_global


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 8), (8, 1)])
def test_a_single_row_or_column_is_a_region(height, width):
    grid = Grid(np.arange(height) * 1.0, np.arange(width) * 1.0)
    assert not grid.is_global
    assert grid.latitude_weights().mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("latitude", "longitude", "message"),
    [
        ([0, 10, 5], [0, 1], "ascend or descend"),
        ([0, 10, 10], [0, 1], "ascend or descend"),
        ([80, 91], [0, 1], "within ±90"),
        ([0, np.nan], [0, 1], "finite values of latitude"),
        ([0, 1], [0, np.inf], "finite values of longitude"),
        ([[0, 1]], [0, 1], "1-D latitude"),
        ([0, 1], [], "1-D longitude"),
        ([0, 1], [0, 0], "each longitude once"),
        ([0, 1], [10, 370], "each longitude once"),
    ],
)
def test_what_is_no_grid_is_refused(latitude, longitude, message):
    with pytest.raises(ValueError, match=message):
        Grid(np.array(latitude, float), np.array(longitude, float))


def test_a_circle_with_a_column_twice_is_no_grid():
    with pytest.raises(UserError, match="expected each longitude once, got 0 and 360, which are the same"):
        Grid(np.linspace(90, -90, 5), np.linspace(0, 360, 9))


@pytest.mark.parametrize("width", [4, 64, 1440])
def test_a_circle_that_lacks_a_column_is_not_closed(width):
    longitude = np.arange(width) * 360 / width
    assert Grid(np.linspace(90, -90, 5), longitude.astype(np.float32)).is_periodic
    assert Grid(np.linspace(90, -90, 5), np.roll(longitude, 1) % 360 - 180).is_periodic
    for lacking in (longitude[:-1], longitude[1:], np.delete(longitude, width // 2)):
        assert not Grid(np.linspace(90, -90, 5), lacking).is_periodic


def test_rows_that_miss_a_pole_by_rounding_are_at_it():
    """Steps that were added up, and single precision, end beside 90 degrees, on either side of it."""
    for step in (1.8, 0.9):
        assert abs(np.arange(-90, 90 + step / 2, step)[-1]) != 90
        assert Grid(np.arange(-90, 90 + step / 2, step), np.arange(4) * 90.0).latitude[[0, -1]].tolist() == [-90, 90]
    single = np.array([90, 0, np.nextafter(np.float32(-90), np.float32(0))], np.float32)
    assert Grid(single, np.arange(4) * 90.0).latitude.tolist() == [90, 0, -90]
    assert Grid(np.array([89.999, 0, -89.999]), np.arange(4) * 90.0).latitude.tolist() == [89.999, 0, -89.999]
