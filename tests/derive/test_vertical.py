"""Fields in columns of air, against recordings of NCAR CREDIT, numpy, and closed forms."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_like.derive import vertical
from credit_like.derive.levels import read_levels

RECORDING = Path(os.environ.get("CREDIT_LIKE_PARITY", "../../shared/credit_parity")) / "diagnostics.npz"
LEVELS = read_levels("era5-137")


@pytest.fixture(scope="module")
def recorded():
    if not RECORDING.exists():
        pytest.skip(f"the recordings of CREDIT are not at {RECORDING}")
    return {name: torch.from_numpy(values) for name, values in np.load(RECORDING).items()}


def close(result, expected):
    """Assert 1e-5 of the largest value of each level, and of every value itself where that is not near zero."""
    scale = expected.abs().amax((-2, -1), keepdim=True)
    assert ((result - expected).abs() <= 1e-5 * scale).all()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=float(1e-9 * scale.max()))


def interfaces(recorded):
    return vertical.interface_pressure(recorded["surface_pressure"], LEVELS.a, LEVELS.b)


def test_shipped_coefficients_are_those_of_the_recording(recorded):
    np.testing.assert_array_equal(LEVELS.a, recorded["a_half"])
    np.testing.assert_array_equal(LEVELS.b, recorded["b_half"])


def test_geopotential_of_credit(recorded):
    result = vertical.geopotential(
        recorded["surface_geopotential"],
        recorded["temperature"],
        recorded["specific_humidity"],
        interfaces(recorded),
        "credit",
    )
    torch.testing.assert_close(result, recorded["geopotential"], rtol=1e-10, atol=0)


def on_pressure_levels(recorded):
    levels = recorded["pressure_levels"].tolist()
    pressure = vertical.level_pressure(interfaces(recorded))
    ground = recorded["surface_geopotential"], recorded["surface_pressure"]
    warmth = vertical.surface_temperature(recorded["temperature"], pressure, recorded["geopotential"], *ground)
    z, t, q, u, v = (
        vertical.interpolate(recorded[name], pressure, levels)
        for name in ("geopotential", "temperature", "specific_humidity", "u", "v")
    )
    z, t = vertical.extrapolate_below_ground(z, t, levels, warmth, *ground)
    return {"z": z, "t": t, "q": q, "u": u, "v": v}, warmth


@pytest.mark.parametrize("name", ["z", "t", "q", "u", "v"])
def test_pressure_levels_of_credit(recorded, name):
    close(on_pressure_levels(recorded)[0][name], recorded[f"{name}_plev"])


def test_mean_sea_level_pressure_of_credit(recorded):
    # CREDIT takes the temperature at 2 m for that of the surface.
    ground = recorded["surface_geopotential"], recorded["surface_pressure"]
    result = vertical.mean_sea_level_pressure(recorded["t2m"], *ground)
    torch.testing.assert_close(result, recorded["mslp"], rtol=1e-5, atol=0)


# --- closed forms ------------------------------------------------------------------------------------------------------


def column(surface_pressure=95_000.0, height=500.0, temperature=280.0, lapse=0.0065):
    """Return the fields of a dry column with a constant lapse rate: p = p_s (T / T_s)^(g / R Γ)."""
    surface = torch.full((1, 1), surface_pressure, dtype=torch.float64)
    interfaces = vertical.interface_pressure(surface, LEVELS.a, LEVELS.b)
    pressure = vertical.level_pressure(interfaces)
    alpha = lapse * vertical.DRY_AIR / vertical.GRAVITY
    warmth = temperature * (pressure / surface_pressure) ** alpha
    return interfaces, pressure, warmth, torch.full((1, 1), height * vertical.GRAVITY, dtype=torch.float64), surface


def test_isothermal_air_has_the_thickness_of_the_barometric_formula():
    interfaces, pressure, _, ground, surface = column()
    warmth = torch.full_like(pressure, 250.0)
    result = vertical.geopotential(ground, warmth, torch.zeros_like(warmth), interfaces)
    expected = ground + vertical.DRY_AIR * 250 * torch.log(surface / pressure)
    # A level is the mean of two pressures, which is the middle of its layer in height only for thin layers.
    error = ((result - expected).abs() / (expected - ground))[20:]
    assert error.max() < 2e-4
    other = vertical.geopotential(ground, warmth, torch.zeros_like(warmth), interfaces, "credit")
    assert (other - expected).abs()[20:].mean() > 3 * (result - expected).abs()[20:].mean()


def test_the_top_level_is_at_half_the_pressure_of_the_interface_below_it():
    """Where the uppermost interface has no pressure, IFS has α = ln 2: by the barometric formula the middle in pressure."""
    interfaces, _, warmth, ground, surface = column()
    assert interfaces[0].item() == 0
    warmth = torch.full_like(warmth, 250.0)
    result = vertical.geopotential(ground, warmth, 0 * warmth, interfaces)[0].item()
    expected = ground.item() + vertical.DRY_AIR * 250 * np.log(surface.item() / (interfaces[1].item() / 2))
    assert result == pytest.approx(expected, rel=1e-12)


def test_vapour_lifts_levels_as_warmer_air_does():
    interfaces, _, warmth, ground, _ = column()
    q = torch.full_like(warmth, 0.01)
    moist = vertical.geopotential(ground, warmth, q, interfaces)
    torch.testing.assert_close(
        moist, vertical.geopotential(ground, vertical.virtual_temperature(warmth, q), 0 * q, interfaces)
    )
    assert (moist > vertical.geopotential(ground, warmth, 0 * q, interfaces)).all()


def test_interpolation_is_exact_where_a_field_is_linear_in_the_logarithm_of_pressure():
    _, pressure, _, _, _ = column()
    levels = [1_000.0, 50_000.0, 85_000.0]
    result = vertical.interpolate(3 * torch.log(pressure) - 1, pressure, levels)
    torch.testing.assert_close(result[:, 0, 0], 3 * torch.log(torch.tensor(levels, dtype=torch.float64)) - 1)


def test_interpolation_is_numpys():
    rng = np.random.default_rng(0)
    pressure = np.sort(rng.uniform(100, 100_000, (9, 4, 5)), axis=0)
    field, levels = rng.standard_normal((2, 9, 4, 5)), [50.0, 5_000.0, 30_000.0, 99_999.0, 100_500.0]
    result = vertical.interpolate(torch.from_numpy(field), torch.from_numpy(pressure), levels).numpy()
    for b, i, j in np.ndindex(2, 4, 5):
        expected = np.interp(np.log(levels), np.log(pressure[:, i, j]), field[b, :, i, j])
        np.testing.assert_allclose(result[b, :, i, j], expected, rtol=1e-12)


def test_extrapolation_continues_a_constant_lapse_rate():
    interfaces, pressure, warmth, ground, surface = column()
    z = vertical.geopotential(ground, warmth, 0 * warmth, interfaces)
    at_surface = vertical.surface_temperature(warmth, pressure, z, ground, surface)
    assert at_surface.item() == pytest.approx(280, abs=0.01)
    nothing = torch.zeros(1, 1, 1, dtype=torch.float64)
    z, t = vertical.extrapolate_below_ground(nothing, nothing, [100_000.0], at_surface, ground, surface)
    alpha = 0.0065 * vertical.DRY_AIR / vertical.GRAVITY
    expected = 280 * (100_000 / 95_000) ** alpha
    assert t.item() == pytest.approx(expected, abs=0.01)
    assert (z / vertical.GRAVITY).item() == pytest.approx(500 - (expected - 280) / 0.0065, abs=0.1)
    reduced = vertical.mean_sea_level_pressure(at_surface, ground, surface)
    assert reduced.item() == pytest.approx(95_000 * (1 + 0.0065 * 500 / 280) ** (1 / alpha), rel=1e-5)


@pytest.mark.parametrize(
    ("height", "temperature", "sea_level"),
    [
        (1_999.0, 310.0, 310.0 + 0.0065 * 1_999),
        (2_250.0, 290.0, (290 + 0.0065 * 2_250 + 298) / 2),
        (2_400.0, 310.0, 310.0),  # warmer than the blend of sea level: no lapse, and no inversion
        (2_600.0, 290.0, 298.0),
        (2_600.0, 310.0, 310.0),
    ],
)
def test_air_below_high_ground_has_the_sea_level_of_trenberth(height, temperature, sea_level):
    """Γ is (sea level − ground) / height, nowhere negative (Trenberth et al. 1993, as NCL's vinth2p_ecmwf)."""
    one = torch.ones(1, 1, dtype=torch.float64)
    nothing, ground = torch.zeros(1, 1, 1, dtype=torch.float64), height * vertical.GRAVITY
    _, t = vertical.extrapolate_below_ground(
        nothing, nothing, [90_000.0], temperature * one, ground * one, 80_000.0 * one
    )
    y = (sea_level - temperature) / ground * 287.05 * np.log(90_000 / 80_000)
    assert t.item() == pytest.approx(temperature * (1 + y + y**2 / 2 + y**3 / 6), rel=1e-9)


@pytest.mark.parametrize("height", [-100.0, 0.0, 1_000.0, 2_200.0, 3_000.0])
def test_every_function_of_a_column_is_differentiable(height):
    levels = [*LEVELS.a[::17].tolist(), 0.0], [*LEVELS.b[::17].tolist(), 1.0]
    rng = np.random.default_rng(1)
    t, q = (
        torch.from_numpy(x).requires_grad_()
        for x in (rng.uniform(240, 290, (9, 1, 2)), rng.uniform(0, 0.01, (9, 1, 2)))
    )
    surface = torch.from_numpy(rng.uniform(70_000, 80_000, (1, 2))).requires_grad_()
    ground = torch.full((1, 2), height * vertical.GRAVITY, dtype=torch.float64)

    def everything(t, q, surface):
        interfaces = vertical.interface_pressure(surface, *levels)
        pressure = vertical.level_pressure(interfaces)
        z = vertical.geopotential(ground, t, q, interfaces)
        warmth = vertical.surface_temperature(t, pressure, z, ground, surface)
        wanted = [20_000.0, 90_000.0]
        above = (vertical.interpolate(x, pressure, wanted) for x in (z, t))
        extended = vertical.extrapolate_below_ground(*above, wanted, warmth, ground, surface)
        reduced = vertical.mean_sea_level_pressure(warmth, ground, surface)
        water = vertical.column_water(q, interfaces.diff(dim=-3))
        return *extended, reduced, water, vertical.relative_humidity(t, q, pressure)

    assert torch.autograd.gradcheck(everything, (t, q, surface), eps=1e-5, atol=1e-3)


def test_relative_humidity_of_saturated_air_is_one():
    # 0 °C, 611.2 Pa and 20 °C, 2339 Pa: the saturation pressures of steam tables
    for celsius, saturated in ((0.01, 611.66), (20.0, 2339.3)):
        pressure = torch.tensor(100_000.0)
        ratio = vertical.DRY_AIR / vertical.VAPOUR
        q = ratio * saturated / (pressure - (1 - ratio) * saturated)
        assert vertical.relative_humidity(torch.tensor(celsius + 273.15), q, pressure).item() == pytest.approx(
            1, abs=3e-3
        )


def test_column_water_of_equal_humidity_is_humidity_times_mass():
    interfaces, _, warmth, _, surface = column()
    water = vertical.column_water(torch.full_like(warmth, 0.004), interfaces.diff(dim=-3))
    torch.testing.assert_close(water, 0.004 * surface / vertical.GRAVITY)
