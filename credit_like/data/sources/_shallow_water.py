"""A forced two-layer shallow-water atmosphere on the rotating sphere: the weather of the embedded dataset.

Layers of constant density rho_l, numbered from the top, flow over the ground h_s. For layer l, with V_l its wind,
zeta_l and delta_l the wind's vorticity and divergence, h_l its thickness, Phi_l = g h_l, and W the water in the lowest
layer:

    d zeta_l / dt  = - div((zeta_l + f) V_l)                              - zeta_l / tau_l
    d delta_l / dt =   curl((zeta_l + f) V_l) - lap(M_l + |V_l|^2 / 2)    - delta_l / tau_l
    d Phi_l / dt   = - div(Phi_l V_l)                                     + (Phi_l^eq - Phi_l) / tau_phi
    d W / dt       = - div(W V) + E - P
    M_l = g h_s + sum_k min(rho_k, rho_l) / rho_l Phi_k

each with scale-selective diffusion of the order lap^4. tau_l is surface friction, felt by the lowest layer. The
thicknesses relax to those in balance with a westerly jet aloft in each hemisphere, which represents heating in the
tropics and cooling at the poles; the jets are baroclinically unstable, so travelling highs and lows persist.
Water evaporates where the column is below saturation and rains out where it is above; saturation falls with latitude,
and where the lowest layer is thick (cold) or the ground is high.

Fields are expanded in spherical harmonics, triangularly truncated so that quadratic products are free of aliasing;
products are formed on the Gaussian grid. Time stepping is Runge-Kutta of order two and three stages with the gravity
waves implicit and the diffusion applied exactly after each step.

References: Hack and Jakob (1992), NCAR/TN-343+STR (the spectral transform method); Williamson et al. (1992), J. Comput.
Phys. 102, 211-224 (constants, test cases); Galewsky et al. (2004), Tellus 56A, 429-440 (balanced unstable jets);
Vallis (2017), Atmospheric and Oceanic Fluid Dynamics, chapter 3 (stacked shallow water); Bouchut et al. (2009), Phys.
Fluids 21, 116604 (rain by a saturation threshold); Whitaker and Kar (2013), Mon. Weather Rev. 141, 3426-3434 (the time
scheme).

Shape suffixes: I longitude, J latitude (north to south), F field, M zonal wavenumber, N total wavenumber, L layer. A
spectral array holds coefficients of exp(i m lambda) P_n^m(sin phi) for m >= 0, zero where n < m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from credit_like.grid import turn

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

RADIUS = 6.37122e6  # m
GRAVITY = 9.80616  # m s-2
ROTATION = 7.292e-5  # s-1
DAY = 86400.0  # s
LONGEST_STEP = 5400.0  # s, stable at T21 with the winds of this climate
DIFFUSION_TIME = 1.0 * DAY


@dataclass(frozen=True)
class Sphere:
    """Spherical-harmonic transforms between a Gaussian grid and a triangular truncation.

    P_n^m is normalised to a mean square of 1 over -1 < sin(phi) < 1, so that the coefficient (0, 0) is the global mean.
    """

    longitudes: int
    latitudes: int

    @cached_property
    def truncation(self) -> int:
        """Return the largest total wavenumber for which quadratic products are free of aliasing."""
        return min(self.longitudes - 1, 2 * self.latitudes - 1) // 3

    @cached_property
    def quadrature(self) -> tuple[Real, Real]:
        """Return the sine of the Gaussian latitudes, north to south, and their weights, which sum to 1."""
        mu_J, weight_J = np.polynomial.legendre.leggauss(self.latitudes)
        return mu_J[::-1].copy(), weight_J[::-1] / 2

    @cached_property
    def latitude(self) -> Real:
        """Return the Gaussian latitudes in radians, north to south."""
        return np.arcsin(self.quadrature[0])

    @cached_property
    def longitude(self) -> Real:
        """Return the longitudes in radians, from 0 eastward."""
        return 2 * np.pi * np.arange(self.longitudes) / self.longitudes

    @cached_property
    def laplacian(self) -> Real:
        """Return the eigenvalues - n (n + 1) / a^2 of the Laplacian, (N, 1)."""
        n_N = np.arange(self.truncation + 1)
        return (-n_N * (n_N + 1) / RADIUS**2)[:, None]

    @cached_property
    def inverse_laplacian(self) -> Real:
        """Return 1 / laplacian, and 0 for the global mean, (N, 1)."""
        inverse = np.zeros_like(self.laplacian)
        inverse[1:] = 1 / self.laplacian[1:]
        return inverse

    @cached_property
    def legendre(self) -> tuple[Real, Real]:
        """Return P_n^m and H_n^m = cos^2(phi) dP/dmu at the Gaussian latitudes, (M, J, N) each."""
        size, (mu_J, _) = self.truncation + 1, self.quadrature
        n_N = np.arange(size + 2)
        P_MJN = np.zeros((size, self.latitudes, size + 1))
        H_MJN = np.zeros((size, self.latitudes, size))
        sectoral_J = np.ones_like(mu_J)
        for m in range(size):
            if m:
                sectoral_J = sectoral_J * np.sqrt((2 * m + 1) / (2 * m) * (1 - mu_J**2))
            eps_N = np.sqrt(np.maximum(n_N**2 - m**2, 0) / (4 * n_N**2 - 1.0))
            P_MJN[m, :, m] = sectoral_J
            for n in range(m, size):
                below_J = P_MJN[m, :, n - 1] if n > m else np.zeros_like(mu_J)
                P_MJN[m, :, n + 1] = (mu_J * P_MJN[m, :, n] - eps_N[n] * below_J) / eps_N[n + 1]
                H_MJN[m, :, n] = (n + 1) * eps_N[n] * below_J - n * eps_N[n + 1] * P_MJN[m, :, n + 1]
        return P_MJN[:, :, :size].copy(), H_MJN

    @cached_property
    def _winds(self) -> tuple[Real, Real]:
        """Return maps (M, J, N) from a potential to its eastward (without the factor i) and northward gradient × cos(phi)."""
        P_MJN, H_MJN = self.legendre
        m_M = np.arange(self.truncation + 1)[:, None, None]
        return m_M * P_MJN / RADIUS, H_MJN / RADIUS

    @cached_property
    def _projections(self) -> tuple[Real, Real, Real]:
        """Return quadratures (M, N, J) of a scalar, and of the two parts of a divergence of a vector times cos(phi)."""
        mu_J, weight_J = self.quadrature
        east_MJN, north_MJN = self._winds
        secant2_J1, weight_J1 = 1 / (1 - mu_J**2)[:, None], weight_J[:, None]
        parts = [self.legendre[0] * weight_J1, east_MJN * secant2_J1 * weight_J1, north_MJN * secant2_J1 * weight_J1]
        scalar, east, north = (np.ascontiguousarray(x_MJN.transpose(0, 2, 1)) for x_MJN in parts)
        return scalar, east, north

    def to_grid(self, x_MNF: Complex) -> Real:
        """Return values on the grid, (F, J, I)."""
        return self._to_longitudes(_apply(self.legendre[0], x_MNF))

    def to_spectrum(self, x_FJI: Real) -> Complex:
        """Return the coefficients of the truncated expansion, (M, N, F)."""
        return _apply(self._projections[0], self._to_wavenumbers(x_FJI))

    def wind(self, vorticity_MNL: Complex, divergence_MNL: Complex) -> Real:
        """Return u cos(phi) of each layer, then v cos(phi) of each, (2L, J, I), from vorticity and divergence."""
        layers = vorticity_MNL.shape[-1]
        stream_and_potential = self.inverse_laplacian * np.concatenate([vorticity_MNL, divergence_MNL], axis=-1)
        east_MJN, north_MJN = self._winds
        east_MJF, north_MJF = 1j * _apply(east_MJN, stream_and_potential), _apply(north_MJN, stream_and_potential)
        wind_MJF = np.empty_like(east_MJF)
        wind_MJF[..., :layers] = east_MJF[..., layers:] - north_MJF[..., :layers]
        wind_MJF[..., layers:] = east_MJF[..., :layers] + north_MJF[..., layers:]
        return self._to_longitudes(wind_MJF)

    def divergence_and_curl(self, x_FJI: Real, y_FJI: Real) -> tuple[Complex, Complex]:
        """Return divergence and curl, (M, N, F) each, of vectors (x, y) / cos(phi).

        Derivatives are taken of the basis functions (integration by parts), so that no grid value is differenced.
        """
        _, east_MNJ, north_MNJ = self._projections
        x_MJF, y_MJF = self._to_wavenumbers(x_FJI), self._to_wavenumbers(y_FJI)
        divergence_MNF = 1j * _apply(east_MNJ, x_MJF) - _apply(north_MNJ, y_MJF)
        curl_MNF = 1j * _apply(east_MNJ, y_MJF) + _apply(north_MNJ, x_MJF)
        return divergence_MNF, curl_MNF

    def mean(self, x_JI: Real) -> float:
        """Return the area mean over the sphere."""
        return float(self.quadrature[1] @ x_JI.mean(axis=-1))

    def _to_longitudes(self, x_MJF: Complex) -> Real:
        return np.fft.irfft(np.ascontiguousarray(x_MJF.transpose(2, 1, 0)), n=self.longitudes, norm="forward")

    def _to_wavenumbers(self, x_FJI: Real) -> Complex:
        return np.fft.rfft(x_FJI, norm="forward")[..., : self.truncation + 1].transpose(2, 1, 0).copy()


def _apply(operator: Real, x: Complex) -> Complex:
    """Multiply `operator` (M, A, B) by `x` (M, B, F) for each zonal wavenumber, in real arithmetic."""
    x = np.ascontiguousarray(x)
    return np.matmul(operator, x.view(np.float64)).view(np.complex128)


@dataclass(frozen=True)
class Climate:
    """Parameters of the forcing. Every number is a choice of this dataset."""

    jet_speed: float = 42.0  # m s-1, of the upper layer over the lower one
    jet_latitude: float = 46.0  # degrees
    jet_width: float = 12.0  # degrees
    thickness_time: float = 10 * DAY
    friction_time: float = 3 * DAY
    saturation: float = 30.0  # kg m-2, at the equator
    saturation_width: float = 60.0  # degrees
    saturation_thickness: float = 4000.0  # m
    evaporation_time: float = 5 * DAY
    rain_time: float = 0.2 * DAY

    def wind(self, latitude_J: Real) -> Real:
        """Return the zonal wind (m s-1) of the upper layer in balance with the equilibrium thicknesses."""
        degrees_J = np.rad2deg(latitude_J)
        centres = (self.jet_latitude, -self.jet_latitude)
        return np.asarray(self.jet_speed * sum(np.exp(-(((degrees_J - c) / self.jet_width) ** 2)) for c in centres))


# longitude, latitude, half-width east-west, half-width north-south (degrees), height (m)
MOUNTAINS = (
    (88, 34, 18, 9, 2000),
    (250, 44, 9, 16, 1500),
    (292, -24, 7, 20, 1500),
    (25, -8, 12, 18, 800),
    (318, 74, 14, 8, 1500),
    (80, -84, 120, 11, 2000),
    (134, -26, 13, 9, 500),
)


def mountains(sphere: Sphere) -> Real:
    """Return the height of the ground in m, (J, I): Gaussian bells that resemble Earth's large ranges."""
    longitude, latitude = np.rad2deg(sphere.longitude), np.rad2deg(sphere.latitude)[:, None]
    height_JI = np.zeros((sphere.latitudes, sphere.longitudes))
    for east, north, wide, tall, metres in MOUNTAINS:
        distance = turn(longitude - east)
        height_JI += metres * np.exp(-((distance / wide) ** 2) - ((latitude - north) / tall) ** 2)
    return height_JI


class ShallowWater:
    """The equations of the module docstring; without a climate they are unforced and dry.

    A state is a complex array (M, N, F): vorticity (s-1) of each layer, then divergence (s-1), then thickness times g
    (m2 s-2), then, with a climate, water (kg m-2).
    """

    def __init__(
        self,
        sphere: Sphere,
        step: float,
        thickness: tuple[float, ...] = (8000.0, 4300.0),
        density: tuple[float, ...] = (0.87, 1.0),
        ground: Real | None = None,
        climate: Climate | None = None,
        diffusion_time: float = np.inf,
    ) -> None:
        """Set up the model.

        `step` and `diffusion_time` (e-folding time of the smallest scale) are in s, `thickness` and `ground` (J, I) in
        m.
        """
        self.sphere, self.dt, self.climate, self.layers = sphere, step, climate, len(thickness)
        self.mean_L = GRAVITY * np.array(thickness)
        rho_L = np.array(density)
        self.coupling_LL = np.minimum.outer(rho_L, rho_L) / rho_L[:, None]
        ground_JI = np.zeros((sphere.latitudes, sphere.longitudes)) if ground is None else ground
        self.ground_MN1 = sphere.to_spectrum(GRAVITY * ground_JI[None])
        self.ground_JI = sphere.to_grid(self.ground_MN1)[0] / GRAVITY  # truncated like the fields
        self.coriolis_J1 = (2 * ROTATION * sphere.quadrature[0])[:, None]
        self.half_secant2_J1 = 0.5 / (1 - sphere.quadrature[0] ** 2)[:, None]
        self.damping_N1 = np.exp(-step / diffusion_time * (sphere.laplacian / sphere.laplacian[-1]) ** 4)
        self.vorticity, self.divergence, self.thickness = (
            slice(i * self.layers, (i + 1) * self.layers) for i in range(3)
        )
        self.water = 3 * self.layers
        self._inverses: dict[float, Real] = {}
        if climate is not None:
            self.equilibrium_MNL = self.balanced(climate.wind(sphere.latitude))[..., self.thickness]
            degrees_J1 = np.rad2deg(sphere.latitude)[:, None]
            zonal_J1 = climate.saturation * np.exp(-((degrees_J1 / climate.saturation_width) ** 2))
            cold_JI = 2 * self.ground_JI - self.mean_L[-1] / GRAVITY
            self.saturation_JI = zonal_J1 * np.exp(-cold_JI / climate.saturation_thickness)

    def balanced(self, upper_wind_J: Real) -> Complex:
        """Return the steady unforced dry state (M, N, F) of a zonal wind (m s-1) in the upper layer and none below."""
        wind_FJI = np.zeros((2, self.sphere.latitudes, self.sphere.longitudes))
        wind_FJI[0] = (upper_wind_J * np.cos(self.sphere.latitude))[:, None]
        vorticity_MN1 = self.sphere.divergence_and_curl(wind_FJI[:1], wind_FJI[1:])[1]
        state = np.zeros((*vorticity_MN1.shape[:2], 3 * self.layers), complex)
        state[..., :1] = vorticity_MN1
        # Without thickness, the divergence tendency lacks only lap(M - M_s) to vanish.
        unbalanced_MNL = self.tendency(state, forced=False)[0][..., self.divergence]
        head_MNL = unbalanced_MNL * self.sphere.inverse_laplacian
        state[..., self.thickness] = head_MNL @ np.linalg.inv(self.coupling_LL).T
        state[0, 0, self.thickness] = self.mean_L
        return state

    def disturbed_jets(self, seed: int) -> Complex:
        """Return the equilibrium with a small random disturbance of large scale and 3/4 of the saturation water."""
        assert self.climate is not None
        dry = self.balanced(self.climate.wind(self.sphere.latitude))
        noise_FJI = np.random.default_rng(seed).standard_normal((1, self.sphere.latitudes, self.sphere.longitudes))
        noise_MN1 = self.sphere.to_spectrum(noise_FJI)
        noise_MN1[:, 9:], noise_MN1[:, 0] = 0, 0
        dry[..., self.vorticity] += 2e-5 * noise_MN1
        lowest_FJI = self.sphere.to_grid(dry[..., self.water - 1 :])
        water_MN1 = self.sphere.to_spectrum(0.75 * self._saturation(self.climate, lowest_FJI))
        return np.concatenate([dry, water_MN1], axis=-1)

    def potential(self, state: Complex) -> Complex:
        """Return M (m2 s-2) of each layer, (M, N, L); M / g is the height whose slope drives the layer."""
        return state[..., self.thickness] @ self.coupling_LL.T + self.ground_MN1

    def tendency(self, state: Complex, forced: bool = True) -> tuple[Complex, Real]:
        """Return d(state)/dt and the rain in kg m-2 s-1 (J, I); unforced without a climate or with `forced=False`."""
        sphere, layers = self.sphere, self.layers
        wind_FJI = sphere.wind(state[..., self.vorticity], state[..., self.divergence])
        carried_FJI = sphere.to_grid(np.concatenate([state[..., self.vorticity], state[..., 2 * layers :]], axis=-1))
        carried_FJI[:layers] += self.coriolis_J1
        carrier = [*range(layers), *range(layers), layers - 1][: len(carried_FJI)]  # the layer that carries each field
        u_FJI, v_FJI = wind_FJI[carrier], wind_FJI[layers:][carrier]
        divergence, curl = sphere.divergence_and_curl(u_FJI * carried_FJI, v_FJI * carried_FJI)
        kinetic_LJI = (wind_FJI[:layers] ** 2 + wind_FJI[layers:] ** 2) * self.half_secant2_J1
        head_MNL = self.potential(state) + sphere.to_spectrum(kinetic_LJI)
        change = np.empty_like(state)
        change[..., self.vorticity] = -divergence[..., :layers]
        change[..., self.divergence] = curl[..., :layers] - head_MNL * sphere.laplacian
        change[..., 2 * layers :] = -divergence[..., layers:]
        if self.climate is None or not forced:
            return change, np.zeros_like(carried_FJI[0])
        return change, self._force(self.climate, state, carried_FJI[-2:], change)

    def _force(self, climate: Climate, state: Complex, lowest_and_water: Real, change: Complex) -> Real:
        """Add heating, friction, evaporation and rain to `change`; return the rain in kg m-2 s-1 (J, I)."""
        change[..., self.thickness] += (self.equilibrium_MNL - state[..., self.thickness]) / climate.thickness_time
        for slow in (self.layers - 1, 2 * self.layers - 1):
            change[..., slow] -= state[..., slow] / climate.friction_time
        excess_JI = lowest_and_water[1] - self._saturation(climate, lowest_and_water[0])
        rain_JI = np.maximum(excess_JI, 0) / climate.rain_time
        evaporation_JI = np.maximum(-excess_JI, 0) / climate.evaporation_time
        change[..., self.water :] += self.sphere.to_spectrum((evaporation_JI - rain_JI)[None])
        return rain_JI

    def _saturation(self, climate: Climate, lowest_JI: Real) -> Real:
        """Return the water in kg m-2 above which it rains, for the lowest layer's thickness times g."""
        return self.saturation_JI * np.exp(lowest_JI / (-GRAVITY * climate.saturation_thickness))

    def step(self, state: Complex) -> tuple[Complex, Real]:
        """Return the state one time step later, and the mean rain over the step in kg m-2 s-1 (J, I)."""
        dt = self.dt
        f0, g0, rain0 = self._split(state)
        stage = self._implicit(state + dt * (f0 / 3 + g0 / 6), 1 / 6)
        f1, _, rain1 = self._split(stage)
        stage = self._implicit(state + dt * (f0 / 6 + f1 / 2 + g0 / 3), 1 / 3)
        f2, g2, rain2 = self._split(stage)
        later = self._implicit(state + dt * ((f0 - f1) / 2 + f2 + 3 / 8 * (g0 + g2)), 1 / 4) * self.damping_N1
        return later, np.maximum((rain0 - rain1) / 2 + rain2, 0)

    def _split(self, state: Complex) -> tuple[Complex, Complex, Real]:
        """Return the tendency without gravity waves on layers at rest, that of these waves, and the rain."""
        waves = np.zeros_like(state)
        heads_MNL = state[..., self.thickness] @ self.coupling_LL.T
        waves[..., self.divergence] = -heads_MNL * self.sphere.laplacian
        waves[..., self.thickness] = -self.mean_L * state[..., self.divergence]
        change, rain_JI = self.tendency(state)
        return change - waves, waves, rain_JI

    def _implicit(self, known: Complex, weight: float) -> Complex:
        """Solve x = known + weight dt waves(x) for x."""
        s = weight * self.dt
        solved = known.copy()
        heads_MNL = known[..., self.thickness] @ self.coupling_LL.T
        right_MNL = known[..., self.divergence] - s * heads_MNL * self.sphere.laplacian
        solved[..., self.divergence] = (self._inverse(s) * right_MNL[..., None, :]).sum(-1)
        solved[..., self.thickness] = known[..., self.thickness] - s * self.mean_L * solved[..., self.divergence]
        return solved

    def _inverse(self, s: float) -> Real:
        """Return (1 - s^2 lap G mean)^-1 for each total wavenumber, (N, L, L)."""
        if s not in self._inverses:
            waves_LL = self.coupling_LL * self.mean_L
            matrix = np.eye(self.layers) - s**2 * self.sphere.laplacian[..., None] * waves_LL
            self._inverses[s] = np.linalg.inv(matrix)
        return self._inverses[s]


def simulate(sphere: Sphere, interval: float, steps: int, spin_up: int, seed: int) -> dict[str, Real]:
    """Simulate weather every `interval` s after `spin_up` intervals.

    Returns u, v (m s-1) and height (m) of each layer as (T, L, J, I), column_water (kg m-2) and precipitation since the
    previous time (kg m-2) as (T, J, I), and orography (m) as (J, I). Raises FloatingPointError if the integration
    becomes unstable.
    """
    substeps = math.ceil(interval / LONGEST_STEP * sphere.truncation / 21)
    model = ShallowWater(
        sphere, interval / substeps, ground=mountains(sphere), climate=Climate(), diffusion_time=DIFFUSION_TIME
    )
    state = model.disturbed_jets(seed)
    cosine_J1, layers = np.cos(sphere.latitude)[:, None], model.layers
    wind, height, water, rain = [], [], [], []
    for index in range(spin_up + steps):
        rained_JI = np.zeros((sphere.latitudes, sphere.longitudes))
        for _ in range(substeps):
            state, rate_JI = model.step(state)
            rained_JI += rate_JI * model.dt
        if not np.isfinite(state).all():
            raise FloatingPointError(f"the integration became unstable at interval {index}")
        if index >= spin_up:
            wind.append(sphere.wind(state[..., model.vorticity], state[..., model.divergence]) / cosine_J1)
            height.append(sphere.to_grid(model.potential(state)) / GRAVITY)
            water.append(np.maximum(sphere.to_grid(state[..., model.water :])[0], 0))
            rain.append(rained_JI)
    wind_TFJI = np.stack(wind)
    return {
        "u": wind_TFJI[:, :layers],
        "v": wind_TFJI[:, layers:],
        "height": np.stack(height),
        "column_water": np.stack(water),
        "precipitation": np.stack(rain),
        "orography": model.ground_JI,
    }
