"""Corrections against the budgets that they close, recomputed in NumPy float64."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from credit_like import registry
from credit_like.data.sources._shallow_water import Sphere
from credit_like.data.times import spread
from credit_like.grid import Grid
from credit_like.physics import spherical_filter
from credit_like.schema.data import DataSection
from credit_like.variables import Variables

HEIGHT, WIDTH, G = 8, 12, 9.80665
A, B = (0.0, 5000.0, 3000.0, 0.0), (0.0, 0.2, 0.6, 1.0)


PERIOD = ["2000-01-01", "2000-02-01"]
MEAN_TIME = float(spread(946684800 + 21600 * np.arange(120), 50, 21600).mean())
"""Of the numbers of the times that a climatology reads."""


@dataclass
class Store:
    grid: Grid
    step_seconds: int = 21600
    seconds = 946684800 + 21600 * np.arange(120)
    """From 2000-01-01 on."""

    @property
    def times(self):
        return self.seconds.astype("datetime64[s]")

    def static(self, rows=slice(None), columns=slice(None)):
        """Surface geopotential in m² s⁻²."""
        return (3000.0 * np.sin(np.arange(HEIGHT * WIDTH)).reshape(1, HEIGHT, WIDTH)).astype(np.float32)[
            :, rows, columns
        ]

    def period(self, periods):
        """120 times in the year 2000."""
        return np.arange(120) if periods[0].start.startswith("2000") else np.arange(0)

    def reaches_over(self, periods):
        return len(self.period(periods)) > 0

    def read(self, variables, times, rows=slice(None), columns=slice(None)):
        """The number of the channel and of the row, and the time as a departure that has a mean; one time at once."""
        assert len(times) == 1
        first = {"Q": 0, "u": 3, "SP": 6, "water": 7, "tp": 8}
        channels = np.concatenate([first[variable.name] + np.arange(len(variable)) for variable in variables])
        field = channels[:, None, None] + 10.0 * np.arange(HEIGHT)[:, None] + np.zeros(WIDTH)
        return (field + np.asarray(times)[:, None, None, None]).astype(np.float32)[:, :, rows, columns]


class Statistics:
    def mask(self, variables):
        return np.ones((sum(map(len, variables)), HEIGHT, WIDTH), bool)


def of_levels(levels):
    """Variables Q and u on three levels, of the surface, rain and evaporation."""
    return Variables(
        DataSection.model_validate(
            {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "levels": levels,
                "prognostic": {"level": ["Q", "u"], "surface": ["SP", "water"]},
                "diagnostic": {"surface": ["tp", "evaporation"]},
                "train": PERIOD,
                "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-04-01", "2000-04-02"],
            }
        )
    )


@pytest.fixture
def variables():
    return of_levels([200, 500, 850])


@pytest.fixture
def states():
    """(after, before) with q, u on three levels, p_s, column water, rain, evaporation."""
    generator = torch.Generator().manual_seed(0)

    def field(channels, mean, spread):
        return mean + spread * torch.randn(2, channels, HEIGHT, WIDTH, generator=generator)

    def state():
        return torch.cat([field(3, 5e-3, 2e-3), field(3, 5, 10), field(1, 9.8e4, 2e3), field(1, 25, 5)], 1)

    rain, evaporation = field(1, 0.8, 0.1).abs(), field(1, 0.9, 0.1)
    return torch.cat([state(), rain, evaporation], 1), state()


def build(config, variables):
    latitude = np.linspace(78.75, -78.75, HEIGHT)
    store = Store(Grid(latitude, np.arange(WIDTH) * 30.0))
    module = registry.module("physics", config["type"])
    return module.build(module.Config(**config), variables, store, Statistics()), store.grid


def area_mean(x, grid):
    weights = np.repeat(grid.latitude_weights()[:, None], WIDTH, 1)
    return (x.double().numpy() * weights).sum((-2, -1)) / weights.sum()


def water_pa(x, hybrid):
    """g W, written out."""
    q, ps = x[:, :3].double(), x[:, 6].double()
    if hybrid:
        thickness = [A[k + 1] - A[k] + (B[k + 1] - B[k]) * ps for k in range(3)]
    else:
        thickness = [15000.0, 32500.0, 17500.0]  # 200-350, 350-675, 675-850 hPa
    return sum(q[:, k] * thickness[k] for k in range(3))


def test_clip_raises_what_is_negative_and_nothing_else(variables, states):
    after, before = states
    after[:, 8] -= 0.8
    fix, _ = build({"type": "clip", "variables": ["total_precipitation", "Q"]}, variables)
    fixed = fix(after, before)
    assert (after[:, 8] < 0).any()
    assert (fixed[:, [0, 1, 2, 8]] >= 0).all()
    untouched = torch.cat([after[:, 3:8], after[:, 9:]], 1)
    assert torch.equal(torch.cat([fixed[:, 3:8], fixed[:, 9:]], 1), untouched)
    assert torch.equal(fixed[:, 8][after[:, 8] >= 0], after[:, 8][after[:, 8] >= 0])


def test_zonal_filter_keeps_long_waves_and_removes_short_ones(variables, states):
    after, before = (x.double() for x in states)
    fix, _ = build({"type": "zonal-filter", "variables": ["Q", "water"], "highest": 3}, variables)
    fixed = fix(after, before)
    filtered = [0, 1, 2, 7]
    waves, kept = (np.fft.rfft(x[:, filtered].numpy()) for x in (after, fixed))
    np.testing.assert_allclose(kept[..., :4], waves[..., :4], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kept[..., 4:], 0, atol=1e-12)
    others = [c for c in range(after.shape[1]) if c not in filtered]
    assert torch.equal(fixed[:, others], after[:, others])


def test_zonal_filter_removes_short_waves_on_a_large_mean(variables, states):
    after, before = states
    after = after.clone()
    after[:, 6] = 1e5 + torch.cos(2 * torch.pi * 5 * torch.arange(WIDTH) / WIDTH)
    fix, _ = build({"type": "zonal-filter", "variables": ["SP"], "highest": 3}, variables)
    assert (fix(after, before)[:, 6] - 1e5).abs().max() < 0.01  # one unit in the last place of 1e5 in float32


def test_relaxation_pulls_zonal_means_and_leaves_waves(variables, states):
    after, before = (x.double() for x in states)
    fix, _ = build({"type": "relax", "variables": ["Q", "SP"], "rate": 0.25, "climatology": PERIOD}, variables)
    fixed = fix(after, before)
    relaxed, others = [0, 1, 2, 6], [3, 4, 5, 7, 8, 9]
    climate = torch.tensor(relaxed)[:, None] + 10.0 * torch.arange(HEIGHT) + MEAN_TIME
    mean, new = (x[:, relaxed].mean(-1) for x in (after, fixed))
    torch.testing.assert_close(new, 0.75 * mean + 0.25 * climate)
    waves, kept = (x[:, relaxed] - x[:, relaxed].mean(-1, keepdim=True) for x in (after, fixed))
    torch.testing.assert_close(kept, waves, rtol=0, atol=1e-9)
    assert torch.equal(fixed[:, others], after[:, others])


def zonal_energy(x, grid):
    """E_k written out with the sums of a discrete Fourier transform."""
    k, i = np.arange(WIDTH // 2 + 1), np.arange(WIDTH)
    waves = np.einsum("...hi,ik->...hk", x.double().numpy(), np.exp(-2j * np.pi * np.outer(i, k) / WIDTH))
    return np.einsum("...hk,h->...k", abs(waves) ** 2, grid.latitude_weights())


def test_zonal_energy_before_the_step_remains_in_the_scaled_waves(variables, states):
    after, before = (x.double() for x in states)
    fix, grid = build({"type": "zonal-energy", "variables": ["Q", "water"], "lowest": 3}, variables)
    fixed = fix(after, before)
    scaled = [0, 1, 2, 7]
    old, new, now = (zonal_energy(x[:, scaled], grid) for x in (before, after, fixed))
    np.testing.assert_allclose(now[..., 3:], old[..., 3:], rtol=1e-9)
    np.testing.assert_allclose(now[..., :3], new[..., :3], rtol=1e-9)
    others = [c for c in range(after.shape[1]) if c not in scaled]
    assert torch.equal(fixed[:, others], after[:, others])


def test_zonal_energy_changes_amplitudes_alike_in_all_rows_and_no_phase(variables, states):
    after, before = (x.double() for x in states)
    fix, _ = build({"type": "zonal-energy", "variables": ["u"], "rate": 0.5}, variables)
    before_waves, waves = (np.fft.rfft(x[:, 3:6].numpy()) for x in (after, fix(after, before)))
    factor = waves / before_waves
    np.testing.assert_allclose(factor.imag, 0, atol=1e-9)
    np.testing.assert_allclose(factor.real, factor.real[..., :1, :] + np.zeros((HEIGHT, 1)), rtol=1e-9)
    assert (factor.real > 0).all()
    assert (abs(factor.real[..., 1:] - 1) > 1e-3).mean() > 0.9


def test_zonal_energy_approaches_that_of_the_data_at_its_rate(variables, states, monkeypatch):
    fields = 5 + np.random.default_rng(1).standard_normal((120, 10, HEIGHT, WIDTH)).astype(np.float32)

    def read(store, variables, times, rows=slice(None), columns=slice(None)):
        assert [v.name for v in variables] == ["Q", "tp"]
        return fields[np.ix_(times, [0, 1, 2, 8])][..., rows, columns]

    monkeypatch.setattr(Store, "read", read)
    after, before = (x.double() for x in states)
    # Energies of the data are larger by orders of magnitude; a step changes them by a factor of at most 100.
    after[:, :3] *= 100
    config = {"type": "zonal-energy", "variables": ["Q", "total_precipitation"], "rate": 0.25, "climatology": PERIOD}
    fix, grid = build(config, variables)
    scaled = [0, 1, 2, 8]
    climate = zonal_energy(torch.tensor(fields[:, scaled]), grid).mean(0)
    new, now = (zonal_energy(x[:, scaled], grid) for x in (after, fix(after, before)))
    expected = np.clip(0.75 * new + 0.25 * climate, new / 100, new * 100)
    np.testing.assert_allclose(now[..., 1:], expected[..., 1:], rtol=1e-9)
    np.testing.assert_allclose(now[..., 0], new[..., 0], rtol=1e-9)


def test_zonal_energy_of_fields_without_waves_is_finite_and_so_are_its_gradients(variables, states):
    after, before = (torch.full_like(x, 3.0) for x in states)
    after.requires_grad_()
    for config in ({"lowest": 2}, {"climatology": PERIOD}):
        fix, _ = build({"type": "zonal-energy", "variables": ["Q", "SP"], **config}, variables)
        fixed = fix(after, before)
        torch.testing.assert_close(fixed, after)
        (grad,) = torch.autograd.grad(fixed.square().sum(), after)
        assert torch.isfinite(grad).all()


def test_rows_that_lack_points_at_a_time_have_the_energy_of_the_other_times(variables, monkeypatch):
    fields = np.random.default_rng(1).standard_normal((120, 1, HEIGHT, WIDTH)).astype(np.float32)
    first, second = spread(Store.seconds, 200, 21600)[[3, 7]]
    fields[first, 0, 2, 5] = fields[second, 0, 2, 6] = fields[second, 0, 4] = np.nan
    monkeypatch.setattr(
        Store, "read", lambda _, __, times, rows=slice(None), columns=slice(None): fields[times][..., rows, :]
    )
    config = {"type": "zonal-energy", "variables": ["SP"], "climatology": PERIOD}
    fix, grid = build(config, variables)
    x = torch.zeros(1, 10, HEIGHT, WIDTH, dtype=torch.float64)
    x[:, 6] = torch.tensor(fields[0, 0])
    power = abs(np.fft.rfft(fields[:, 0].astype(np.float64))) ** 2
    whole = np.isfinite(power).all(-1)
    assert whole.sum(0).tolist() == [120, 120, 118, 120, 119, 120, 120, 120]
    expected = sum(grid.latitude_weights()[h] * power[whole[:, h], h].mean(0) for h in range(HEIGHT))
    np.testing.assert_allclose(zonal_energy(fix(x, x)[:, 6], grid)[0, 1:], expected[1:], rtol=1e-9)
    fields[:, 0, 2, 3] = np.nan
    with pytest.raises(ValueError, match=r"physics.climatology: expected times at which rows have data at all points"):
        build(config, variables)


@pytest.fixture
def ocean(monkeypatch):
    """The surface pressure has data in the first half of the columns alone."""
    mask = np.ones((10, HEIGHT, WIDTH), bool)
    mask[6, :, WIDTH // 2 :] = False
    monkeypatch.setattr(Statistics, "mask", lambda _, __: mask)
    return mask[6]


def test_relaxation_averages_over_points_with_data(variables, states, monkeypatch, ocean):
    read = Store.read

    def with_gaps(store, chosen, times, rows=slice(None), columns=slice(None)):
        return np.where(ocean, read(store, chosen, times), np.float32("nan"))[:, :, rows, columns]

    monkeypatch.setattr(Store, "read", with_gaps)
    after = states[0].double()
    fix, _ = build({"type": "relax", "variables": ["SP"], "rate": 0.25, "climatology": PERIOD}, variables)
    climate = 6 + 10.0 * torch.arange(HEIGHT) + MEAN_TIME
    here = slice(WIDTH // 2)
    mean, new = (x[:, 6, :, here].mean(-1) for x in (after, fix(after, after)))
    torch.testing.assert_close(new, 0.75 * mean + 0.25 * climate)


def test_a_variable_of_the_oceans_takes_no_points_from_the_budgets_of_others(variables, states, ocean):
    after, before = (x.double() for x in states)
    fix, grid = build({"type": "conserve", "variables": ["SP", "water"]}, variables)
    fix.record()
    fixed = fix(after, before)
    np.testing.assert_allclose(area_mean(fixed[:, 7], grid), area_mean(before[:, 7], grid), rtol=1e-13)
    weights = grid.latitude_weights()[:, None] * ocean

    def of_ocean(x):
        return (x[:, 6].numpy() * weights).sum((-2, -1)) / weights.sum()

    np.testing.assert_allclose(of_ocean(fixed), of_ocean(before), rtol=1e-13)
    added = [np.mean(of_ocean(fixed - after)), np.mean(area_mean((fixed - after)[:, 7], grid))]
    np.testing.assert_allclose(fix.taken().numpy(), added, rtol=1e-9)
    rain, grid = build({"type": "moisture", "column_water": "water"}, variables)
    wet = torch.cat([before[:, :8], after[:, 8:]], 1)
    fixed = rain(wet, before)
    np.testing.assert_allclose(area_mean(fixed[:, 8], grid), area_mean(fixed[:, 9], grid), rtol=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        {"type": "relax", "variables": ["Q"]},
        {"type": "spherical-filter", "variables": ["Q"], "highest": 3},
        {"type": "zonal-energy", "variables": ["Q"]},
    ],
    ids=lambda config: config["type"],
)
def test_an_analysis_is_no_climatology(variables, monkeypatch, config):
    monkeypatch.setattr(Store, "period", lambda self, periods: np.arange(1))
    monkeypatch.setattr(Store, "reaches_over", lambda self, periods: False)
    with pytest.raises(ValueError, match=r"expected data of the period 2000-01-01\S* to 2000-02-01\S*, got 2000-01-01"):
        build({**config, "climatology": PERIOD}, variables)


def test_relaxation_needs_the_data_of_its_period(variables):
    with pytest.raises(ValueError, match=r"physics.climatology: expected data of the period 1999.*got none"):
        build({"type": "relax", "variables": ["Q"], "climatology": ["1999-01-01", "1999-02-01"]}, variables)


def test_a_correction_of_no_variable_changes_nothing_and_records_nothing(variables):
    fix, _ = build({"type": "conserve", "variables": []}, variables)
    x = torch.randn(1, 4, HEIGHT, WIDTH)
    fix.record()
    assert torch.equal(fix(x, x), x)
    assert fix.taken().shape == (0,)


def test_zonal_filter_needs_whole_rows_with_data(variables):
    module = registry.module("physics", "zonal-filter")
    config = module.Config(variables=("Q",), highest=3)

    class Holes(Statistics):
        def mask(self, variables):
            mask = super().mask(variables)
            mask[1, 2, 3] = False
            return mask

    latitude = np.linspace(80, -80, HEIGHT)
    whole, part = (Store(Grid(latitude, np.arange(WIDTH) * step)) for step in (360 / WIDTH, 5.0))
    with pytest.raises(ValueError, match="full circle of longitude"):
        module.build(config, variables, part, Statistics())
    with pytest.raises(ValueError, match="data at all points for zonal-filter, got Q"):
        module.build(config, variables, whole, Holes())


@pytest.fixture(scope="module")
def sphere():
    """A Gaussian grid, and a truncated scalar and wind on it by the transforms of the embedded data's model."""
    sphere = Sphere(32, 16)
    random = np.random.default_rng(0)
    size = sphere.truncation + 1

    def spectrum():
        x = random.normal(size=(size, size)) + 1j * random.normal(size=(size, size))
        x[0] = x[0].real
        return np.where(np.arange(size) >= np.arange(size)[:, None], x, 0)[..., None]

    vorticity, divergence, scalar = spectrum(), spectrum(), spectrum()
    vorticity[0, 0] = divergence[0, 0] = 0
    u, v = sphere.wind(vorticity, divergence) / np.cos(sphere.latitude)[:, None]
    return sphere, scalar, sphere.to_grid(scalar)[0], u, v


def spherical(sphere, **keys):
    """The filter on this grid, for a scalar `Q` and the wind `u`, `v`."""
    data = {
        "source": {"type": "synthetic"}, "timestep": "6h", "prognostic": {"surface": ["Q", "u", "v"]},
        "train": PERIOD, "valid": ["2000-03-01", "2000-03-02"], "test": ["2000-04-01", "2000-04-02"],
    }  # fmt: skip
    variables = Variables(DataSection.model_validate(data))
    grid = Grid(np.rad2deg(sphere.latitude), np.rad2deg(sphere.longitude))

    class All:
        def mask(self, variables):
            return np.ones((3, grid.height, grid.width), bool)

    config = spherical_filter.Config(variables=("Q",), winds=("u", "v"), **keys)
    return spherical_filter.build(config, variables, Store(grid), All())


def test_spherical_filter_keeps_truncated_fields_and_removes_all_else(sphere):
    sphere, _, *truncated = sphere
    fix = spherical(sphere, highest=sphere.truncation)
    fields = torch.tensor(np.stack(truncated))[None]
    scale = fields.abs().amax((0, 2, 3), keepdim=True)
    torch.testing.assert_close(fix(fields, fields) / scale, fields / scale, rtol=0, atol=1e-10)
    fields = fields / scale
    noise = torch.randn(fields.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = fix(fields + noise, fields)
    torch.testing.assert_close(fix(once, fields), once, rtol=1e-10, atol=1e-9)
    # of white noise remains the part of the coefficients in the points, 121 of 512 for the scalar
    part = float((once - fields)[:, 0].var() / noise[:, 0].var())
    assert part == pytest.approx((sphere.truncation + 1) ** 2 / (32 * 16), rel=0.25)
    # A truncated wind has no more zonal waves than the scalars it is derived from.
    assert torch.fft.rfft(once)[..., sphere.truncation + 1 :].abs().max() < 1e-10


@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_rows_at_the_poles_have_the_wind_across_them(damping):
    """A solid rotation about any axis is a truncated wind; noise stays as small in these rows as where they end beside them."""
    latitude, longitude = np.linspace(90, -90, 17), np.arange(32) * 11.25
    phi, lam = np.deg2rad(latitude)[:, None], np.deg2rad(longitude)
    x, y, z = 2.0, -3.0, 5.0
    u = z * np.cos(phi) - np.sin(phi) * (x * np.cos(lam) + y * np.sin(lam))
    v = x * np.sin(lam) - y * np.cos(lam) + 0 * phi
    data = {
        "source": {"type": "synthetic"}, "timestep": "6h", "prognostic": {"surface": ["u", "v"]},
        "train": PERIOD, "valid": ["2000-03-01", "2000-03-02"], "test": ["2000-04-01", "2000-04-02"],
    }  # fmt: skip
    config = spherical_filter.Config(winds=("u", "v"), highest=9, damping=damping)

    class All:
        def mask(self, _):
            return np.ones((2, 17, 32), bool)

    def build(latitude):
        return spherical_filter.build(
            config, Variables(DataSection.model_validate(data)), Store(Grid(latitude, longitude)), All()
        )

    fix = build(latitude)
    wind = torch.tensor(np.stack([u, v]))[None]
    if not damping:
        torch.testing.assert_close(fix(wind, wind), wind, rtol=0, atol=1e-12)
    noise = 10 * torch.randn(1, 2, 17, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fixed = fix(noise, noise)
    assert fixed.abs().max() < 40
    by_rounding = np.nextafter(latitude, 0)
    torch.testing.assert_close(build(by_rounding)(noise, noise), fixed, rtol=0, atol=1e-10)
    of_pole = torch.fft.rfft(fixed[..., [0, -1], :])
    assert of_pole[..., [0, *range(2, 17)]].abs().max() < 1e-10
    near = np.array([89.99, -89.99])
    beside = spherical_filter.legendre(near, 9)[1] / np.cos(np.deg2rad(near))[:, None]
    np.testing.assert_allclose(spherical_filter.winds_at_poles(np.array([90.0, -90.0]), 9)[1], beside, rtol=1e-5)


def test_spherical_filter_leaves_the_mean_of_its_period(variables, states):
    """What the data always have, which includes waves above the highest, stays; deviations are filtered as whole fields are."""
    plain = {"type": "spherical-filter", "variables": ["Q", "SP"], "winds": ["u"], "highest": 3, "damping": 0.3}
    whole, _ = build(plain, variables)
    fix, _ = build({**plain, "climatology": PERIOD}, variables)
    after = states[0].double()
    filtered, others = range(7), [7, 8, 9]
    climate = torch.zeros_like(after[:1])
    climate[:, filtered] = (torch.arange(7.0, dtype=torch.float64)[:, None] + 10.0 * torch.arange(HEIGHT) + MEAN_TIME)[
        ..., None
    ]
    torch.testing.assert_close(fix(climate, climate), climate, rtol=1e-12, atol=0)
    torch.testing.assert_close(fix(after, after), whole(after - climate, after) + climate, rtol=1e-12, atol=1e-9)
    assert (whole(climate, climate) - climate)[:, filtered].abs().max() > 1
    assert torch.equal(fix(after, after)[:, others], after[:, others])


def test_spherical_filter_needs_the_data_of_its_period(variables):
    with pytest.raises(
        ValueError,
        match=r"physics.climatology: expected data of the period 1999.*forecast with spherical-filter from a package",
    ):
        build(
            {"type": "spherical-filter", "variables": ["Q"], "highest": 3, "climatology": ["1999-01-01", "1999-02-01"]},
            variables,
        )


def test_spherical_filter_damps_each_wavenumber_by_its_factor(sphere):
    sphere, spectrum, scalar, u, v = sphere
    N, n = sphere.truncation, np.arange(sphere.truncation + 1)
    fix = spherical(sphere, highest=N, damping=0.3, order=4)
    expected = sphere.to_grid(spectrum * np.exp(-0.3 * (n * (n + 1) / (N * (N + 1))) ** 2)[:, None])[0]
    fields = torch.tensor(np.stack([scalar, u, v]))[None]
    np.testing.assert_allclose(fix(fields, fields)[0, 0], expected, atol=1e-10 * np.abs(scalar).max())


@pytest.mark.parametrize(("highest", "most"), [(7, 4), (5, 4)])
def test_spherical_filter_needs_a_grid_that_holds_its_waves(variables, highest, most):
    with pytest.raises(ValueError, match=f"physics.highest: expected at most {most} on 8 x 12 points, got {highest}"):
        build({"type": "spherical-filter", "winds": ["u"], "highest": highest}, variables)


@pytest.mark.parametrize("hybrid", [False, True])
def test_mass_of_dry_air_is_what_it_was(variables, states, hybrid):
    after, before = states
    config = {"type": "mass", **({"a": A, "b": B} if hybrid else {})}
    fix, grid = build(config, variables)
    fixed = fix(after.double(), before.double())

    def dry(x):
        return area_mean(x[:, 6].double() - water_pa(x, hybrid), grid)

    assert np.abs(dry(after) - dry(before)).min() > 10  # Pa, before the correction
    np.testing.assert_allclose(dry(fixed), dry(before), rtol=1e-12)
    change = (fixed - after)[:, 6]
    assert torch.allclose(change, change[:, :1, :1], atol=1e-9)
    others = [c for c in range(10) if c != 6]
    assert torch.equal(fixed[:, others], after.double()[:, others])


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 0, 2], [1, 2, 0]])
@pytest.mark.parametrize("kind", ["mass", "moisture"])
def test_the_order_of_levels_does_not_change_a_budget(variables, states, kind, order):
    """Levels in another order, with the fields and coefficients in that order, give the same result."""
    config = {"type": kind}
    fields = [x.double() for x in states]
    shuffled = [torch.cat([x[:, order], x[:, 3:]], 1) for x in fields]
    other = of_levels([[200, 500, 850][i] for i in order])
    expected = build(config, variables)[0](*fields)
    got = build(config, other)[0](*shuffled)
    torch.testing.assert_close(got[:, 6:], expected[:, 6:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["mass", "moisture"])
def test_hybrid_levels_from_the_surface_up_have_the_same_budget(variables, states, kind):
    fields = [x.double() for x in states]
    flipped = [torch.cat([x[:, :3].flip(1), x[:, 3:]], 1) for x in fields]
    expected = build({"type": kind, "a": A, "b": B}, variables)[0](*fields)
    got = build({"type": kind, "a": A[::-1], "b": B[::-1]}, variables)[0](*flipped)
    torch.testing.assert_close(got[:, 6:], expected[:, 6:], rtol=1e-12, atol=0)


def test_mass_holds_in_single_precision_to_its_rounding(variables, states):
    after, before = states
    fix, grid = build({"type": "mass", "column_water": "water"}, variables)
    fixed = fix(after, before)
    assert fixed.dtype == torch.float32

    def dry(x):
        return area_mean(x[:, 6].double() - G * x[:, 7].double(), grid)

    # One rounding of 1e5 Pa is 4e-3 Pa; the mean over 96 points is smaller.
    np.testing.assert_allclose(dry(fixed), dry(before), atol=4e-3)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_water_budget_closes(variables, states, scale):
    after, before = states
    after = torch.cat([before[:, :8] * 1.0001, after[:, 8:] / scale], 1).double()
    config = {"type": "moisture", "evaporation_upward": False, "a": A, "b": B, "water_scale": scale}
    after[:, 9] *= -1
    fix, grid = build(config, variables)
    fixed = fix(after, before.double())

    def budget(x):
        rain, evaporation = scale * area_mean(x[:, 8], grid), -scale * area_mean(x[:, 9], grid)
        gained = (area_mean(water_pa(x, True), grid) - area_mean(water_pa(before, True), grid)) / G
        return rain - evaporation + gained

    assert np.abs(budget(after)).min() > 0.01
    np.testing.assert_allclose(budget(fixed), 0, atol=1e-12)
    ratio = fixed[:, 8] / after[:, 8]
    assert torch.allclose(ratio, ratio[:, :1, :1])
    assert torch.equal(fixed[:, :8], after[:, :8])


def test_rain_never_becomes_negative_where_the_air_gained_more_than_evaporated(variables, states):
    after, before = states
    after[:, 7] += 50
    fix, _ = build({"type": "moisture", "column_water": "water"}, variables)
    assert (fix(after, before)[:, 8] == 0).all()


def test_global_means_of_levels_are_conserved_and_nothing_else_changes(variables, states):
    after, before = (x.double() for x in states)
    fix, grid = build({"type": "conserve", "variables": ["Q", "SP"]}, variables)
    fixed, kept = fix(after, before), [0, 1, 2, 6]
    assert np.abs(area_mean(after[:, kept], grid) / area_mean(before[:, kept], grid) - 1).min() > 1e-5
    np.testing.assert_allclose(area_mean(fixed[:, kept], grid), area_mean(before[:, kept], grid), rtol=1e-13)
    change = (fixed - after)[:, kept]
    torch.testing.assert_close(change, change[..., :1, :1].expand_as(change), rtol=0, atol=1e-9)
    others = [c for c in range(after.shape[1]) if c not in kept]
    assert torch.equal(fixed[:, others], after[:, others])


ENERGY = {"temperature": "T", "humidity": "Q", "surface_pressure": "SP", "surface_geopotential": "PHIS"}
NET = {"top": {"down": ["solar", "thermal"]}, "surface": {"down": ["sensible"]}}
BOTH = {
    "top": {"down": ["incident"], "up": ["solar", "thermal"]},
    "surface": {"down": ["sensible"]},
    "flux_units": "W m-2",
}


@pytest.fixture
def moist():
    """Variables of an energy budget: channels T, Q, u, v on three levels, SP; three fluxes; one forcing."""
    return moist_variables()


def moist_variables(**roles):
    return Variables(
        DataSection.model_validate(
            {
                "source": {"type": "synthetic"},
                "timestep": "6h",
                "levels": [200, 500, 850],
                "prognostic": {"level": ["T", "Q", "u", "v"], "surface": ["SP"]},
                "diagnostic": {"surface": ["solar", "thermal", "sensible"]},
                "dynamic_forcing": {"surface": ["incident"]},
                "static": {"surface": ["PHIS"]},
                **roles,
                "train": PERIOD,
                "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-04-01", "2000-04-02"],
            }
        )
    )


def energetic(fluxes):
    """(after, before, forcing) of `moist` in float64; sums over 6 h of `fluxes` W m⁻²."""
    generator = torch.Generator().manual_seed(3)

    def field(channels, mean, spread):
        noise = torch.randn(2, channels, HEIGHT, WIDTH, generator=generator, dtype=torch.float64)
        return mean + spread * noise

    def state():
        return torch.cat([field(3, 260, 20), field(3, 5e-3, 2e-3), field(6, 5, 10), field(1, 9.8e4, 2e3)], 1)

    return torch.cat([state(), fluxes * field(3, 100, 30)], 1), state(), fluxes * field(1, 300, 30)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("variant", [NET, BOTH])
def test_energy_budget_closes(moist, variant, hybrid):
    """Against the budget written out; the temperature of all levels changes by (r − 1) e / c_p."""
    per_step = variant is NET
    seconds = 21600.0
    after, before, forcing = energetic(seconds if per_step else 1.0)
    config = {"type": "energy", **ENERGY, **variant, **({"a": A, "b": B} if hybrid else {})}
    fix, grid = build(config, moist)
    fixed = fix(after, before, forcing)

    def capacity(x):
        return (1 - x[:, 3:6]) * 1004.64 + x[:, 3:6] * 1810.0

    def mass_specific(x):
        surface = torch.from_numpy(Store(grid).static()[0]).double()
        return capacity(x) * x[:, :3] + 2.501e6 * x[:, 3:6] + surface + 0.5 * (x[:, 6:9] ** 2 + x[:, 9:12] ** 2)

    def energy(x):
        e, ps = mass_specific(x), x[:, 12]
        if hybrid:
            thickness = [A[k + 1] - A[k] + (B[k + 1] - B[k]) * ps for k in range(3)]
        else:
            thickness = [15000.0, 32500.0, 17500.0]
        return area_mean(sum(e[:, k] * thickness[k] for k in range(3)) / G, grid)

    solar, thermal, sensible = (area_mean(after[:, 13 + i], grid) for i in range(3))
    if per_step:
        brought = solar + thermal - sensible
    else:
        brought = seconds * (area_mean(forcing[:, 0], grid) - solar - thermal - sensible)
    due = energy(before) + brought
    assert np.abs(energy(after) / due - 1).min() > 1e-4
    np.testing.assert_allclose(energy(fixed), due, rtol=1e-13)
    ratio = torch.from_numpy(due / energy(after))[:, None, None, None]
    expected = after[:, :3] + (ratio - 1) * mass_specific(after) / capacity(after)
    torch.testing.assert_close(fixed[:, :3], expected, rtol=1e-13, atol=0)
    assert torch.equal(fixed[:, 3:], after[:, 3:])


def test_energy_needs_what_its_budget_needs():
    variables = moist_variables(
        prognostic={"level": ["T", "Q", "u", "v", {"name": "w", "levels": [200, 500, 1000]}], "surface": ["SP"]},
        dynamic_forcing={"level": ["heating"], "surface": ["incident"]},
        static={"level": ["profile"], "surface": ["PHIS"]},
    )
    for change, message in [
        (
            {"temperature": "SP"},
            r"physics.temperature: expected a variable on the levels of Q \(200, 500, 850\), got 'SP' on none, change",
        ),
        ({"u": "w"}, r"physics.u: .* the levels of Q \(200, 500, 850\), got 'w' on 200, 500, 1000, change"),
        (
            {"surface_geopotential": "profile"},
            "physics.surface_geopotential: expected a variable at the surface, got 'pro",
        ),
        ({"surface": {"down": ["T"]}}, "physics.surface.down: expected a variable at the surface, got 'T' on levels"),
        (
            {"top": {"down": ["heating"]}},
            "physics.top.down: expected a variable at the surface, got 'heating' on levels",
        ),
        (
            {"top": {"down": ["solar"], "up": ["solar"]}},
            "physics.top.up: expected each flux once, got 'solar' more than",
        ),
        (
            {"surface_pressure": "T", "a": A, "b": B},
            "physics.surface_pressure: expected a variable at the surface, got",
        ),
        (
            {"top": {"down": ["solr"]}},
            "physics.top.down: expected one of .*, incident, got 'solr'; did you mean 'solar'",
        ),
        ({"surface_geopotential": "Z"}, "physics.surface_geopotential: expected one of profile, PHIS"),
        ({"top": {}}, "top: expected at least one flux"),
        ({"column_water": "SP"}, "column_water: expected none"),
    ]:
        with pytest.raises(ValueError, match=message):
            build({"type": "energy", **ENERGY, **NET, **change}, variables)


@dataclass
class Declared:
    """A store whose variables declare units."""

    variables: Variables
    units: dict[str, str]
    levels: str = "hPa"
    step_seconds: int = 21600
    other_sums: dict[str, int] = field(default_factory=dict)
    """Variable → seconds of sums over another time than the step."""

    def attrs(self, variable):
        return {"units": self.units[variable.name]} if variable.name in self.units else {}

    def level_units(self, variable):
        return self.levels

    def level_attrs(self, variable):
        return {"units": self.level_units(variable)}


WATER = {"Q": "kg kg-1", "SP": "Pa", "water": "kg m-2", "tp": "m", "evaporation": "m"}
HEAT = {"T": "K", "Q": "kg kg**-1", "u": "m/s", "v": "m s-1", "SP": "Pa", "PHIS": "m2/s2"} | dict.fromkeys(
    ("solar", "thermal", "sensible"), "J m**-2"
)
MOISTURE = {"type": "moisture", "precipitation": "tp", "water_scale": 1000}
HYBRID = {"a": A, "b": B}


@pytest.mark.parametrize(
    ("config", "declared", "levels", "message"),
    [
        ({"type": "mass"}, {}, "hPa", None),
        ({"type": "mass"}, {"SP": "Pascal", "Q": "1"}, "mb", None),
        ({"type": "mass"}, {"SP": "", "Q": "parts"}, "", None),
        ({"type": "mass", "humidity_scale": 1000, "level_pa": 1}, {"Q": "g kg-1"}, "Pa", None),
        ({"type": "mass", **HYBRID}, {}, "1", None),
        (
            {"type": "mass"},
            {"SP": "hPa"},
            "hPa",
            "surface_pressure: expected SP in 'Pa', got 'hPa', give the variable `units",
        ),
        ({"type": "mass"}, {"SP": "K"}, "hPa", "surface_pressure: expected SP in 'Pa', got 'K', change it"),
        ({"type": "mass"}, {"Q": "g/kg"}, "hPa", "humidity_scale: expected 1000 for Q in 'g/kg', got 1, change it"),
        ({"type": "mass"}, {}, "Pa", "level_pa: expected 1 for levels in 'Pa', got 100, change it"),
        (
            {"type": "mass", "column_water": "water"},
            {"water": "m"},
            "hPa",
            "column_water: expected water in 'kg m-2', got",
        ),
        (MOISTURE, {}, "hPa", None),
        ({**MOISTURE, "water_scale": 1.0}, {"tp": "kg m-2", "evaporation": "mm"}, "hPa", None),
        ({**MOISTURE, "water_scale": 21600.0}, {"tp": "kg m-2 s-1", "evaporation": "mm/s"}, "hPa", None),
        ({**MOISTURE, "water_scale": 1.0}, {}, "hPa", "water_scale: expected 1000 for tp in 'm', got 1, change it"),
        (MOISTURE, {"evaporation": "mm"}, "hPa", "water_scale: expected 1 for evaporation in 'mm', got 1000"),
        (MOISTURE, {"tp": "kg m-2 s-1"}, "hPa", "water_scale: expected 21600 for tp in 'kg m-2 s-1', got 1000"),
        (MOISTURE, {"tp": "K"}, "hPa", "precipitation: expected tp in 'kg m-2', got 'K', change it"),
        ({**MOISTURE, **HYBRID}, {"SP": "hPa"}, "1", "surface_pressure: expected SP in 'Pa', got 'hPa'"),
        ({"type": "energy", **ENERGY, **NET}, {}, "hPa", None),
        (
            {"type": "energy", **ENERGY, **NET},
            {"T": "degC"},
            "hPa",
            "temperature: expected T in 'K', got 'degC', give the",
        ),
        (
            {"type": "energy", **ENERGY, **NET},
            {"PHIS": "m"},
            "hPa",
            "surface_geopotential: expected PHIS in 'm2 s-2', got 'm'",
        ),
        ({"type": "energy", **ENERGY, **NET}, {"u": "kt"}, "hPa", "u: expected u in 'm s-1', got 'kt'"),
        (
            {"type": "energy", **ENERGY, **NET},
            {"thermal": "W m-2"},
            "hPa",
            "top.down: expected thermal in 'J m-2', got 'W m-2', change it or flux_units",
        ),
        ({"type": "energy", **ENERGY, **NET, "humidity_scale": 1000}, {}, "hPa", "humidity_scale: expected 1 for Q in"),
    ],
)
def test_units_that_the_data_declare_are_those_that_a_budget_counts_on(
    variables, moist, config, declared, levels, message
):
    of_data, known = (moist, HEAT) if config["type"] == "energy" else (variables, WATER)
    module = registry.module("physics", config["type"])
    store = Declared(of_data, {**known, **declared}, levels)
    if message is None:
        module.check_data(module.Config(**config), store)
        return
    with pytest.raises(ValueError, match=re.escape(f"physics.{message}")):
        module.check_data(module.Config(**config), store)


@pytest.mark.parametrize(
    ("config", "units", "name", "key"),
    [
        (MOISTURE, WATER, "evaporation", "evaporation"),
        ({"type": "energy", **ENERGY, **NET}, HEAT, "thermal", "top.down"),
    ],
    ids=["moisture", "energy"],
)
def test_sums_over_another_time_than_the_step_close_no_budget(variables, moist, config, units, name, key):
    """ERA5 accumulates over an hour, also where every sixth hour is read; a mean flux may be of any time."""
    module = registry.module("physics", config["type"])
    store = Declared(moist if config["type"] == "energy" else variables, units, other_sums={name: 3600})
    told = f"physics.{key}: expected {name} as sums over data.timestep (6h), got sums over 1h, sum them up"
    with pytest.raises(ValueError, match=re.escape(told)):
        module.check_data(module.Config(**config), store)
    store.other_sums = {"another": 3600}
    module.check_data(module.Config(**config), store)
    if config["type"] == "energy":
        rates = {**units, **dict.fromkeys(("solar", "thermal", "sensible"), "W m-2")}
        rate = {**config, "flux_units": "W m-2"}
    else:
        rates = {**units, **dict.fromkeys(("tp", "evaporation"), "kg m-2 s-1")}
        rate = {**config, "water_scale": 21600}
    module.check_data(module.Config(**rate), Declared(store.variables, rates, other_sums={name: 3600}))


def test_a_maximum_clips_too(variables, states):
    after, before = states
    fix, _ = build({"type": "clip", "variables": ["water"], "minimum": None, "maximum": 24.0}, variables)
    torch.testing.assert_close(fix(after, before)[:, 7], after[:, 7].clamp(max=24.0))


@pytest.mark.parametrize("bounds", [{"minimum": None}, {"minimum": 2.0, "maximum": 1.0}])
def test_bounds_have_to_make_sense(bounds):
    with pytest.raises(ValueError, match="expected"):
        registry.module("physics", "clip").Config(variables=("Q",), **bounds)


def test_what_was_added_is_recorded(variables, states):
    after, before = states
    fix, grid = build({"type": "clip", "variables": ["total_precipitation", "Q"], "minimum": 0.8}, variables)
    fix.record()
    expected = []
    for x in (after, after - 0.5):
        change = fix(x, before) - x
        expected.append([area_mean(change[:, channels], grid).mean() for channels in (8, slice(0, 3))])
    added = fix.taken()
    fix(after, before)  # is not recorded
    torch.testing.assert_close(added.double(), torch.tensor(expected).double().mean(0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "config",
    [
        {"type": "mass"},
        {"type": "moisture", "column_water": "water"},
        {"type": "clip", "variables": ["Q"]},
        {"type": "zonal-filter", "variables": ["Q"], "highest": 3},
        {"type": "spherical-filter", "variables": ["Q"], "winds": ["u"], "highest": 3, "damping": 0.1},
        {"type": "spherical-filter", "variables": ["Q"], "winds": ["u"], "highest": 3, "climatology": PERIOD},
        {"type": "conserve", "variables": ["Q", "SP"]},
        {"type": "relax", "variables": ["Q", "SP"], "climatology": PERIOD},
        {"type": "zonal-energy", "variables": ["Q", "SP"], "rate": 0.5},
        {"type": "zonal-energy", "variables": ["total_precipitation"], "climatology": PERIOD},
    ],
)
def test_gradients_pass(variables, states, config):
    after, before = states
    after.requires_grad_()
    fix, _ = build(config, variables)
    fix(after, before).square().sum().backward()
    assert torch.isfinite(after.grad).all()
    assert (after.grad != 0).any()


@pytest.mark.parametrize(
    "config",
    [
        {"type": "mass", "a": A, "b": B},
        {"type": "moisture", "a": A, "b": B},
        {"type": "energy", **ENERGY, **BOTH, "a": A, "b": B},
        {"type": "zonal-filter", "variables": ["Q"], "highest": 3},
        {"type": "spherical-filter", "variables": ["Q"], "winds": ["u"], "highest": 3, "damping": 0.1},
        {"type": "spherical-filter", "variables": ["Q"], "winds": ["u"], "highest": 3, "climatology": PERIOD},
        {"type": "conserve", "variables": ["Q", "SP"]},
        {"type": "relax", "variables": ["Q", "SP"], "climatology": PERIOD},
        {"type": "zonal-energy", "variables": ["Q", "SP"], "rate": 0.5},
        {"type": "zonal-energy", "variables": ["total_precipitation"], "climatology": PERIOD},
    ],
)
def test_two_halves_of_the_grid_give_the_whole(variables, moist, states, config):
    fields = [x.double() for x in states]
    if config["type"] == "energy":
        variables, fields = moist, energetic(1.0)
    whole, grid = build(config, variables)
    expected = whole(*fields)
    module = registry.module("physics", config["type"])
    rows = [slice(0, 3), slice(3, HEIGHT)]
    barrier, shared = threading.Barrier(2, timeout=900), [torch.empty(0), torch.empty(0)]

    def rank(i):
        def reduce(x):
            """What an all-reduce does, between two threads."""
            shared[i] = x
            barrier.wait()
            total = shared[0] + shared[1]
            barrier.wait()
            return total

        part = module.build(module.Config(**config), variables, Store(grid), Statistics(), rows=rows[i], reduce=reduce)
        return part(*(x[:, :, rows[i]] for x in fields))

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(rank, range(2)))
    torch.testing.assert_close(torch.cat(halves, 2), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"type": "mass", "surface_pressure": "spp"},
            "physics.surface_pressure: expected one of Q, u, SP, water, got 'spp'",
        ),
        ({"type": "mass", "a": (0.0, 1.0), "b": (0.0, 1.0)}, "expected 4 interface coefficients"),
        (
            {"type": "moisture", "a": (0.0, 5e3, 2e3, 0.0), "b": (0.0, 0.2, 0.1, 1.0)},
            "physics.a: expected coefficients a and b of interfaces in order, .* got pressures of 0, 25000, 12000, 100000 Pa",
        ),
        ({"type": "mass", "column_water": "u"}, "expected a variable at the surface"),
        ({"type": "mass", "humidity": "SP"}, "on at least two levels"),
        ({"type": "mass", "surface_pressure": "Q"}, "physics.surface_pressure: expected a variable at the surface"),
        ({"type": "moisture", "evaporation": "evap"}, "did you mean 'evaporation'"),
        ({"type": "moisture", "evaporation": "Q"}, "physics.evaporation: expected a variable at the surface, got 'Q'"),
        ({"type": "moisture", "precipitation": "u"}, "physics.precipitation: expected a variable at the surface"),
        ({"type": "clip", "variables": ["rainfall"]}, "physics.variables"),
        ({"type": "zonal-filter", "variables": ["rainfall"]}, "physics.variables"),
        (
            {"type": "conserve", "variables": ["total_precipitation"]},
            "physics.variables: expected one of Q, u, SP, water",
        ),
        (
            {"type": "zonal-energy", "variables": ["total_precipitation"]},
            "physics.variables: expected one of Q, u, SP, water",
        ),
        (
            {"type": "zonal-energy", "variables": ["Q"], "lowest": 7},
            "physics.lowest: expected at most 6 on 12 longitudes",
        ),
        (
            {"type": "zonal-energy", "variables": ["Q"], "climatology": ["1999-01-01", "1999-02-01"]},
            "physics.climatology: expected data of the period 1999",
        ),
        ({"type": "spherical-filter", "winds": ["uu"]}, "physics.winds: .*got 'uu'"),
    ],
)
def test_what_does_not_fit_is_said(variables, config, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        build(config, variables)


def test_configs_need_no_torch():
    code = "import sys; from credit_like import registry as r; [r.module('physics', n).Config() for n in r.names('physics')]"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
