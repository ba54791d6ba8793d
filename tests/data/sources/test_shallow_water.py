"""Transforms against closed forms, balance, conservation and convergence of the two-layer equations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from credit_like.data.sources._shallow_water import (
    GRAVITY,
    RADIUS,
    ROTATION,
    Climate,
    Complex,
    ShallowWater,
    Sphere,
    mountains,
    simulate,
)


@pytest.fixture(scope="module")
def sphere() -> Sphere:
    return Sphere(64, 32)


def random_spectrum(sphere: Sphere, fields: int = 1) -> Complex:
    size = sphere.truncation + 1
    parts = np.random.default_rng(1).standard_normal((2, size, size, fields))
    x_MNF = parts[0] + 1j * parts[1]
    x_MNF[0].imag = 0
    return x_MNF * np.triu(np.ones((size, size)))[..., None]


def jet(model: ShallowWater) -> Complex:
    """A balanced unstable jet with a disturbance."""
    state = model.balanced(Climate().wind(model.sphere.latitude))
    noise_MN1 = random_spectrum(model.sphere)
    noise_MN1[:, 9:], noise_MN1[0] = 0, 0
    state[..., model.vorticity] += 2e-6 * noise_MN1
    return state


def run(model: ShallowWater, state: Complex, days: float) -> Complex:
    for _ in range(round(days * 86400 / model.dt)):
        state, _ = model.step(state)
    return state


def test_transforms_are_inverse(sphere: Sphere) -> None:
    x_MNF = random_spectrum(sphere, 3)
    np.testing.assert_allclose(sphere.to_spectrum(sphere.to_grid(x_MNF)), x_MNF, atol=1e-12)


def test_harmonics_are_the_textbook_ones(sphere: Sphere) -> None:
    """P_1^1, P_2^0 and P_2^2, with a mean square over sin(latitude) of 1."""
    mu_J, P_MJN = sphere.quadrature[0], sphere.legendre[0]
    np.testing.assert_allclose(P_MJN[1, :, 1], np.sqrt(3 / 2 * (1 - mu_J**2)), atol=1e-13)
    np.testing.assert_allclose(P_MJN[0, :, 2], np.sqrt(5) * (3 * mu_J**2 - 1) / 2, atol=1e-13)
    np.testing.assert_allclose(P_MJN[2, :, 2], np.sqrt(15 / 8) * (1 - mu_J**2), atol=1e-13)


def test_wind_has_its_vorticity_and_divergence(sphere: Sphere) -> None:
    x_MNF = 1e-5 * random_spectrum(sphere, 2)
    x_MNF[0, 0] = 0
    u_FJI, v_FJI = np.split(sphere.wind(x_MNF[..., :1], x_MNF[..., 1:]), 2)
    divergence, curl = sphere.divergence_and_curl(u_FJI, v_FJI)
    # A wind of degree 21 has components of degree 22, which the quadrature still integrates exactly.
    np.testing.assert_allclose(curl, x_MNF[..., :1], atol=1e-16)
    np.testing.assert_allclose(divergence, x_MNF[..., 1:], atol=1e-16)


def test_solid_body_rotation_is_in_the_closed_form_balance(sphere: Sphere) -> None:
    """Williamson et al. (1992), case 2: g h = g h0 - (a Omega u0 + u0^2 / 2) sin^2(latitude), and it stays."""
    model = ShallowWater(sphere, 3600.0, thickness=(3000.0,), density=(1.0,))
    speed = 2 * np.pi * RADIUS / (12 * 86400)
    state = model.balanced(speed * np.cos(sphere.latitude))
    head_J = -(RADIUS * ROTATION * speed + speed**2 / 2) * sphere.quadrature[0] ** 2
    thickness_JI = sphere.to_grid(state[..., 2:])[0]
    expected_J = GRAVITY * 3000 + head_J - head_J @ sphere.quadrature[1]
    np.testing.assert_allclose(thickness_JI, np.broadcast_to(expected_J[:, None], thickness_JI.shape), rtol=1e-12)
    later_JI = sphere.to_grid(run(model, state, 5)[..., 2:])[0]
    np.testing.assert_allclose(later_JI, thickness_JI, rtol=1e-9)


def test_rossby_wave_moves_at_its_phase_speed(sphere: Sphere) -> None:
    """A faint barotropic wave in a deep layer at rest turns by 2 Omega / (n (n + 1)) rad s-1 westward."""
    model = ShallowWater(sphere, 3600.0, thickness=(1e7,), density=(1.0,))
    m, n, days = 4, 5, 1
    state = np.zeros((sphere.truncation + 1, sphere.truncation + 1, 3), complex)
    state[0, 0, 2], state[m, n, 0] = GRAVITY * 1e7, 1e-9
    turned = np.angle(run(model, state, days)[m, n, 0] / state[m, n, 0]) / m
    assert turned == pytest.approx(2 * ROTATION / (n * (n + 1)) * days * 86400, rel=1e-3)


def test_mass_is_conserved_to_rounding(sphere: Sphere) -> None:
    model = ShallowWater(sphere, 3600.0, ground=mountains(sphere), diffusion_time=86400.0)
    later_FJI = sphere.to_grid(run(model, jet(model), 5)[..., model.thickness])
    for layer_JI, expected in zip(later_FJI, model.mean_L, strict=True):
        assert sphere.mean(layer_JI) == pytest.approx(expected, rel=1e-13)


def invariants(model: ShallowWater, state: Complex) -> tuple[float, float]:
    """Energy, and potential enstrophy of the lower layer, per unit of area and of density."""
    sphere, rho = model.sphere, np.array([0.87, 1.0])
    cosine_J1 = np.cos(sphere.latitude)[:, None]
    u_LJI, v_LJI = np.split(sphere.wind(state[..., model.vorticity], state[..., model.divergence]) / cosine_J1, 2)
    upper_JI, lower_JI = sphere.to_grid(state[..., model.thickness])
    ground_JI = GRAVITY * model.ground_JI
    kinetic = rho @ [
        sphere.mean(h * (u**2 + v**2) / 2) for h, u, v in zip((upper_JI, lower_JI), u_LJI, v_LJI, strict=True)
    ]
    lower_energy = sphere.mean(lower_JI**2 / 2 + lower_JI * ground_JI)
    upper_energy = sphere.mean(upper_JI**2 / 2 + upper_JI * (lower_JI + ground_JI))
    absolute_JI = sphere.to_grid(state[..., 1:2])[0] + model.coriolis_J1
    return kinetic + rho[1] * lower_energy + rho[0] * upper_energy, sphere.mean(absolute_JI**2 / lower_JI) / 2


def test_energy_and_potential_enstrophy_drift_little_without_forcing(sphere: Sphere) -> None:
    model = ShallowWater(sphere, 900.0, ground=mountains(sphere))
    start = jet(model)
    at_rest = np.zeros_like(start)
    at_rest[0, 0] = start[0, 0]
    before, after = invariants(model, start), invariants(model, run(model, start, 2))
    available = before[0] - invariants(model, at_rest)[0]
    assert abs(after[0] - before[0]) < 1e-3 * available
    assert after[1] == pytest.approx(before[1], rel=1e-3)


def test_time_scheme_converges_at_second_order(sphere: Sphere) -> None:
    states = []
    for dt in (1200.0, 600.0, 300.0):
        model = ShallowWater(sphere, dt, ground=mountains(sphere))
        states.append(run(model, jet(model), 0.25))
    coarse, fine = (np.abs(a - b)[..., 0].max() for a, b in pairwise(states))
    assert coarse / fine == pytest.approx(4, rel=0.1)


def test_water_changes_by_evaporation_less_rain(sphere: Sphere) -> None:
    model = ShallowWater(sphere, 600.0, ground=mountains(sphere), climate=Climate(evaporation_time=1e30))
    before = model.disturbed_jets(0)
    before[..., model.water] *= 1.5
    state, fallen = before, 0.0
    for _ in range(12):
        state, rain_JI = model.step(state)
        fallen += sphere.mean(rain_JI) * model.dt
    lost = (before[0, 0, model.water] - state[0, 0, model.water]).real
    assert fallen > 0.1
    assert lost == pytest.approx(fallen, rel=1e-2)  # rain is clipped at zero where a stage overshoots


def test_same_bits_twice_and_other_weather_from_another_seed(sphere: Sphere) -> None:
    first, second, other = (simulate(sphere, 21600.0, 4, 4, seed) for seed in (0, 0, 1))
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes()
    assert np.abs(first["u"] - other["u"]).max() > 1


@pytest.mark.long
def test_weather_is_stationary_and_soon_forgets(sphere: Sphere) -> None:
    """Storms equally strong in both halves of 100 days, close to themselves after 6 h and strangers after 5 days."""
    v_TLJI = simulate(sphere, 21600.0, 400, 200, 0)["v"]
    first, second = np.split(v_TLJI, 2)
    assert first.var(axis=0).mean() == pytest.approx(second.var(axis=0).mean(), rel=0.25)
    spread = np.sqrt(v_TLJI.var(axis=0).mean())
    # sqrt(0.2): a lag correlation above 0.9; 1: below 0.5.
    assert np.sqrt(np.mean((v_TLJI[1:] - v_TLJI[:-1]) ** 2)) < np.sqrt(0.2) * spread
    assert np.sqrt(np.mean((v_TLJI[20:] - v_TLJI[:-20]) ** 2)) > spread


@pytest.mark.long
def test_a_small_disturbance_grows_as_in_weather(sphere: Sphere) -> None:
    """Chaos: a change of one part in 10^5 of the storms is small after a day and grows thirtyfold in the next 29."""
    model = ShallowWater(sphere, 5400.0, ground=mountains(sphere), climate=Climate(), diffusion_time=86400.0)
    truth = run(model, model.disturbed_jets(0), 50)
    twin = truth.copy()
    twin[..., model.vorticity] *= 1 + 1e-5
    errors = []
    for days in (1, 29):
        truth, twin = run(model, truth, days), run(model, twin, days)
        errors.append(
            np.linalg.norm((twin - truth)[..., model.vorticity]) / np.linalg.norm(truth[..., model.vorticity])
        )
    assert errors[0] < 1e-4
    assert errors[1] > 30 * errors[0]
