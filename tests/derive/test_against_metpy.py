"""Derived fields against MetPy, an independent implementation.

MetPy has no reduction of surface pressure to sea level from a column; `test_vertical.py` compares that with closed forms.
"""

import numpy as np
import pytest
import torch

from credit_like.derive import horizontal, vertical
from credit_like.grid import Grid

calc = pytest.importorskip("metpy.calc", reason="MetPy is not installed: pip install metpy")
units = pytest.importorskip("metpy.units", reason="MetPy is not installed: pip install metpy").units


def column():
    """Return interfaces and levels (K, 1, 1) in Pa from 5 hPa down, temperature and specific humidity."""
    interfaces = torch.from_numpy(np.geomspace(500, 101_325, 401))[:, None, None]
    pressure = vertical.level_pressure(interfaces)
    warmth = (288 * (pressure / 101_325) ** 0.19).clamp_min(210)
    return interfaces, pressure, warmth, 0.012 * (pressure / 101_325) ** 3


def test_geopotential():
    interfaces, pressure, warmth, humidity = column()
    ground = torch.full((1, 1), 1234.0, dtype=torch.float64)
    found = vertical.geopotential(ground, warmth, humidity, interfaces)[:, 0, 0].numpy()
    p, t, q = (x[:, 0, 0].numpy()[::-1] for x in (pressure, warmth, humidity))
    thickness = calc.thickness_hydrostatic(p * units.Pa, t * units.K, calc.mixing_ratio_from_specific_humidity(q))
    # From the lowest to the highest level; gravity and gas constant of the two differ by less than 1e-4.
    assert (found[0] - found[-1]) / 9.80665 == pytest.approx(thickness.m_as("m"), rel=2e-4)


def test_relative_humidity():
    """MetPy's vapour pressure follows Ambaum (2020) and ours Buck (1981); they agree to 1 % from −30 to 40 °C."""
    warmth, pressure = np.meshgrid(np.linspace(243, 313, 36), np.linspace(200e2, 1000e2, 9))
    humidity = np.full_like(warmth, 1e-3)
    expected = calc.relative_humidity_from_specific_humidity(pressure * units.Pa, warmth * units.K, humidity)
    found = vertical.relative_humidity(*map(torch.from_numpy, (warmth, humidity, pressure)))
    np.testing.assert_allclose(found, expected.m_as(""), rtol=1e-2)


def test_column_water():
    interfaces, pressure, _, humidity = column()
    found = vertical.column_water(humidity, interfaces.diff(dim=0)).item()
    # MetPy integrates between levels, of which the lowest is the ground.
    p, q = (np.append(top, x[:, 0, 0].numpy()[::-1]) for top, x in ((101_325, pressure), (0.012, humidity)))
    p = p * units.Pa
    dewpoint = calc.dewpoint(calc.vapor_pressure(p, calc.mixing_ratio_from_specific_humidity(q)))
    # It integrates the mixing ratio q / (1 − q).
    assert found == pytest.approx(calc.precipitable_water(p, dewpoint).m_as("mm"), rel=2e-2)


def test_wind_speed_vorticity_and_divergence():
    grid = Grid(np.linspace(60, 20, 81), np.linspace(0, 60, 121))
    latitude, longitude = np.meshgrid(np.deg2rad(grid.latitude), np.deg2rad(grid.longitude), indexing="ij")
    u = 20 * np.cos(latitude) + 8 * np.sin(3 * longitude) * np.cos(latitude) ** 2
    v = 6 * np.cos(4 * longitude) * np.cos(latitude) + 3 * np.sin(2 * latitude)
    ours = [torch.from_numpy(x) for x in (u, v)]
    speed = calc.wind_speed(u * units("m/s"), v * units("m/s")).m_as("m/s")
    np.testing.assert_allclose(vertical.wind_speed(*ours), speed, rtol=1e-12)
    geometry = {
        "dx": horizontal.EARTH_RADIUS * np.deg2rad(0.5) * np.ones((81, 120)) * units.m,
        "dy": -horizontal.EARTH_RADIUS * np.deg2rad(0.5) * np.ones((80, 121)) * units.m,
        # Factors of a plate carrée: dx is the distance at the equator.
        "parallel_scale": 1 / np.cos(latitude), "meridional_scale": np.ones_like(latitude),
    }  # fmt: skip
    inner = (slice(1, -1), slice(1, -1))
    for name in ("vorticity", "divergence"):
        expected = getattr(calc, name)(u * units("m/s"), v * units("m/s"), **geometry).m_as("1/s")
        found = getattr(horizontal, name)(*ours, grid).numpy()
        # Both are centred differences, of u cos φ here and of u with a metric term there.
        np.testing.assert_allclose(found[inner], expected[inner], rtol=0, atol=2e-4 * np.abs(expected).max())
