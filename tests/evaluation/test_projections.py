"""Projections against those of PROJ, and fields sampled on them."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from credit_like.errors import UserError
from credit_like.evaluation.projections import (
    PROJECTIONS,
    image_points,
    projected_lines,
    projection_of,
    sampling,
)
from credit_like.grid import Grid

GRID = Grid(90 - (np.arange(32) + 0.5) * 5.625, np.arange(64) * 5.625)
CENTRE = (40.0, -100.0)


RADIUS = 6371229.0
THEIRS = """
import sys
import numpy as np
from cartopy import crs

radius = float(sys.argv[2])
globe = crs.Globe(ellipse=None, semimajor_axis=radius, semiminor_axis=radius)
rng = np.random.default_rng(0)
latitude, longitude = rng.uniform(-89, 89, 500), rng.uniform(-180, 180, 500)
projections = {
    "robinson": crs.Robinson(-100, globe=globe),
    "orthographic": crs.Orthographic(-100, 40, globe=globe),
    "north-polar": crs.Stereographic(90, -100, globe=globe),
    "south-polar": crs.Stereographic(-90, -100, globe=globe),
}
points = {
    name: projection.transform_points(crs.Geodetic(globe=globe), longitude, latitude)[:, :2]
    for name, projection in projections.items()
}
# On a sphere, where degrees are lengths.
points["plate-carree"] = np.stack([(longitude + 100 + 180) % 360 - 180, latitude], 1)
np.savez(sys.argv[1], latitude=latitude, longitude=longitude, **points)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Points as PROJ projects them, computed in another process: two copies of PROJ, this and ecCodes', crash one at its end."""
    if importlib.util.find_spec("cartopy") is None:
        pytest.skip("the package cartopy is not installed")
    path = tmp_path_factory.mktemp("proj") / "points.npz"
    subprocess.run([sys.executable, "-c", THEIRS, path, str(RADIUS)], check=True)
    with np.load(path) as found:
        return dict(found)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_those_of_proj(name, theirs):
    x, y = projection_of(name, GRID, CENTRE).forward(theirs["latitude"], theirs["longitude"])
    there = np.isfinite(x)
    assert there.sum() > 100
    unit = {"plate-carree": 1.0, "north-polar": 2 * RADIUS, "south-polar": 2 * RADIUS}.get(name, RADIUS)
    np.testing.assert_allclose(np.stack([x, y], 1)[there], (theirs[name] / unit)[there], atol=2e-3)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_way_back(name):
    projection = projection_of(name, GRID, CENTRE)
    latitude, longitude = image_points(projection, 120)
    x, y = projection.forward(latitude, longitude)
    again, east = projection.inverse(x, y)
    there = np.isfinite(latitude) & np.isfinite(x)
    assert there.mean() > 0.7
    np.testing.assert_allclose(again[there], latitude[there], atol=1e-3)
    off = np.deg2rad(east - longitude)[there] * np.cos(np.deg2rad(latitude[there]))
    assert np.abs(np.angle(np.exp(1j * off))).max() < 1e-4


@pytest.mark.parametrize("south_first", [False, True])
@pytest.mark.parametrize("offset", [0.0, -180.0])
def test_a_field_is_interpolated_between_points(south_first, offset):
    latitude = GRID.latitude[::-1] if south_first else GRID.latitude
    grid = Grid(latitude, GRID.longitude + offset)
    north, east = np.deg2rad(np.meshgrid(grid.latitude, grid.longitude, indexing="ij"))
    field = np.sin(north) + np.cos(north) * np.cos(east - 0.3)
    there, where = image_points(projection_of("robinson", grid), 300)
    image = sampling(grid, there, where)(field)
    inside = np.isfinite(there)
    np.testing.assert_array_equal(np.isfinite(image), inside)
    expected = np.sin(np.deg2rad(there)) + np.cos(np.deg2rad(there)) * np.cos(np.deg2rad(where) - 0.3)
    assert np.abs(image - expected)[inside & (np.abs(there) < 85)].max() < 3e-3


def test_missing_points_stay_missing_and_do_not_spread():
    field = np.ones((32, 64))
    field[10, 20] = np.nan
    image = sampling(GRID, GRID.latitude[:, None] + np.zeros(64), np.zeros((32, 1)) + GRID.longitude)(field)
    assert np.argwhere(np.isnan(image)).tolist() == [[10, 20]]
    around = sampling(GRID, GRID.latitude[9:12, None] + np.full(2, 2.0), GRID.longitude[20:22][None] + np.zeros((3, 1)))
    assert np.nanmax(np.abs(around(field) - 1)) < 1e-12


def test_a_region_has_a_map_of_its_own():
    grid = Grid(np.arange(30.0, 60.0, 2), np.arange(350.0, 390.0, 2) % 360)
    projection = projection_of(None, grid)
    assert projection.centre == (0.0, 369.0)
    assert projection.bounds() == (-20.0, 20.0, 29.0, 59.0)
    latitude, longitude = image_points(projection, 40)
    field = np.arange(len(grid.latitude))[:, None] + np.zeros(len(grid.longitude))
    image = sampling(grid, latitude, longitude)(field)
    assert np.isfinite(image).all()
    assert image[0, 0] > image[-1, 0]


def test_lines_do_not_cross_the_map_at_the_seam():
    projection = projection_of("robinson", GRID)
    line = np.array([[170.0, 10.0], [179.0, 10.0], [-179.0, 10.0], [-170.0, 10.0]])
    x, _ = projected_lines(projection, [line])
    assert np.nanmax(np.abs(np.diff(x))) < 0.2
    assert np.isnan(x).sum() == 2


def test_an_unknown_projection():
    with pytest.raises(UserError, match=r"--projection: expected one of .*, got 'robinsn'; did you mean 'robinson'"):
        projection_of("robinsn", GRID)
