"""Fields in columns of air: pressure, geopotential, interpolation to pressure levels, sea-level pressure, moisture.

Every function acts on each column by itself and is differentiable. Levels are along dimension −3, from the top of the
atmosphere to the surface. Pressures are in Pa, temperatures in K, humidities in kg kg⁻¹, geopotentials in m² s⁻².

Shape suffixes: K levels, L pressure levels, H rows, W longitudes; any dimensions may precede them.

Sources: [1] ECMWF, IFS documentation Cy47r3, part III, chapter 2 (2.2.2, vertical discretisation). [2] Trenberth, Berry
and Buja (1993), Vertical interpolation and truncation of model-coordinate data, NCAR/TN-396+STR, doi:10.5065/D6HX19NH.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from credit_like.nn.constants import on_device

GRAVITY = 9.80665
"""m s⁻², the standard acceleration."""
DRY_AIR = 287.06
"""J kg⁻¹ K⁻¹, gas constant of dry air, as in ECMWF's tools for model levels."""
VAPOUR = 461.51
"""J kg⁻¹ K⁻¹, gas constant of water vapour."""
LAPSE_RATE = 0.0065
"""K m⁻¹, of the standard atmosphere."""
_TRENBERTH_GAS = 287.05
_MODEL_TOP = 0.57
"""Pa, in place of the zero pressure of the outermost interface, above which a column of air has no finite height."""
_NEAR_SURFACE = 150.0
"""m above ground: extrapolation starts from the level nearest to this height [2]."""

Conventions = Literal["standard", "credit"]
"""`standard` follows the sources above; `credit` gives the numbers of NCAR CREDIT, whose levels lie elsewhere within their
layers."""


def interface_pressure(surface_HW: Tensor, a: Sequence[float] | Tensor, b: Sequence[float] | Tensor) -> Tensor:
    """Return the pressure of the K + 1 interfaces, p = a + b · p_s."""
    a_K, b_K = (
        x.to(surface_HW) if isinstance(x, Tensor) else on_device(tuple(x), surface_HW.dtype, surface_HW.device)
        for x in (a, b)
    )
    return a_K[:, None, None] + b_K[:, None, None] * surface_HW[..., None, :, :]


def level_pressure(interfaces_KHW: Tensor) -> Tensor:
    """Return the pressure of K levels: the mean of each level's two interfaces."""
    return (interfaces_KHW[..., 1:, :, :] + interfaces_KHW[..., :-1, :, :]) / 2


def virtual_temperature(temperature: Tensor, humidity: Tensor) -> Tensor:
    """Return T (1 + (R_v / R_d − 1) q)."""
    return temperature * (1 + (VAPOUR / DRY_AIR - 1) * humidity)


def geopotential(
    surface_HW: Tensor,
    temperature_KHW: Tensor,
    humidity_KHW: Tensor,
    interfaces_KHW: Tensor,
    conventions: Conventions = "standard",
) -> Tensor:
    """Integrate the hydrostatic equation from the surface geopotential to K levels.

    φ_{k−1/2} = φ_{k+1/2} + R T_v ln(p_{k+1/2} / p_{k−1/2}), and φ_k = φ_{k+1/2} + α_k R T_v with
    α_k = 1 − p_{k−1/2} / Δp_k · ln(p_{k+1/2} / p_{k−1/2}), or ln 2 where the pressure of the upper interface is zero
    [1, equations 2.21 to 2.23]. CREDIT subtracts α_k R T_v from φ_{k−1/2} instead, and has no ln 2.
    """
    above, below = interfaces_KHW[..., :-1, :, :], interfaces_KHW[..., 1:, :, :]
    is_top = above <= 0
    above = torch.where(is_top, _MODEL_TOP, above)
    thickness = torch.log(below / above)
    alpha = 1 - above / (below - above) * thickness
    if conventions == "standard":
        alpha = torch.where(is_top, math.log(2), alpha)
    heat = DRY_AIR * virtual_temperature(temperature_KHW, humidity_KHW)
    layers = heat * thickness
    upper = surface_HW[..., None, :, :] + layers.flip(-3).cumsum(-3).flip(-3)
    return upper - heat * alpha if conventions == "credit" else upper - layers + heat * alpha


def interpolate(field_KHW: Tensor, pressure_KHW: Tensor, levels_L: Sequence[float]) -> Tensor:
    """Interpolate linearly in ln p to the pressure levels `levels_L`; beyond the column, take its outermost value."""
    wanted = on_device(tuple(levels_L), pressure_KHW.dtype, pressure_KHW.device)
    shape = (*pressure_KHW.shape[:-3], len(levels_L), *pressure_KHW.shape[-2:])
    return interpolate_columns(field_KHW, pressure_KHW, wanted[:, None, None].expand(shape))


def interpolate_columns(field_KHW: Tensor, pressure_KHW: Tensor, wanted_LHW: Tensor) -> Tensor:
    """Interpolate as `interpolate` to pressures that differ between columns."""
    above, weight_LHW = _bracket(pressure_KHW, wanted_LHW)
    above = above.expand(*field_KHW.shape[:-3], *above.shape[-3:])
    upper, lower = field_KHW.gather(-3, above), field_KHW.gather(-3, above + 1)
    return upper + (lower - upper) * weight_LHW


def _bracket(pressure_KHW: Tensor, wanted_LHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the level above each wanted pressure and the weight of the level below it, both (…, L, H, W)."""
    # Pressure increases downwards, so that the number of smaller pressures is the position of the next level. searchsorted
    # works along the last dimension.
    columns = pressure_KHW.detach().movedim(-3, -1).contiguous()
    wanted = wanted_LHW.detach().movedim(-3, -1).contiguous()
    above = torch.searchsorted(columns, wanted, right=True).sub(1).clamp(0, columns.shape[-1] - 2).movedim(-1, -3)
    upper, lower = pressure_KHW.gather(-3, above), pressure_KHW.gather(-3, above + 1)
    return above, (torch.log(wanted_LHW / upper) / torch.log(lower / upper)).clamp(0, 1)


def surface_temperature(
    temperature_KHW: Tensor,
    pressure_KHW: Tensor,
    geopotential_KHW: Tensor,
    surface_geopotential_HW: Tensor,
    surface_pressure_HW: Tensor,
) -> Tensor:
    """Extrapolate temperature to the surface with the standard lapse rate, from the level nearest to 150 m above it.

    T* = T + (Γ R / g) T (p_s / p − 1) [2, equation 5].
    """
    height = (geopotential_KHW - surface_geopotential_HW[..., None, :, :]) / GRAVITY
    level = (height - _NEAR_SURFACE).abs().argmin(-3, keepdim=True)
    temperature, pressure = (x.gather(-3, level)[..., 0, :, :] for x in (temperature_KHW, pressure_KHW))
    alpha = LAPSE_RATE * _TRENBERTH_GAS / GRAVITY
    return temperature + alpha * temperature * (surface_pressure_HW / pressure - 1)


def extrapolate_below_ground(
    geopotential_LHW: Tensor,
    temperature_LHW: Tensor,
    levels_L: Sequence[float],
    surface_temperature_HW: Tensor,
    surface_geopotential_HW: Tensor,
    surface_pressure_HW: Tensor,
) -> tuple[Tensor, Tensor]:
    """Replace geopotential and temperature on pressure levels that lie below the ground.

    With y = Γ R / g · ln(p / p_s): φ = φ_s − R T* ln(p / p_s) (1 + y/2 + y²/6) and T = T* (1 + y + y²/2 + y³/6)
    [2, equations 15 and 16]. Γ is 6.5 K km⁻¹ for ground below 2000 m. Above 2500 m it is such that the temperature at
    sea level is at most 298 K, and it is blended between the two in between; it is never negative.
    """
    t, phi = surface_temperature_HW, surface_geopotential_HW
    height = phi / GRAVITY
    sea_level = t + LAPSE_RATE * height
    capped = sea_level.clamp(max=298.0)
    blended = ((2500 - height) * sea_level + (height - 2000) * capped) / 500
    # Ground below 2000 m takes the standard rate; the divisor there is replaced, because it may be zero.
    steep = GRAVITY / torch.where(height >= 2000, phi, 1.0)
    gamma = steep * (torch.where(height > 2500, capped, blended) - t).clamp(min=0)
    gamma = torch.where(height >= 2000, gamma, LAPSE_RATE)[..., None, :, :]
    level = on_device(tuple(levels_L), phi.dtype, phi.device)[:, None, None]
    surface = surface_pressure_HW[..., None, :, :]
    log_p = torch.log(level / surface)
    y = gamma * _TRENBERTH_GAS / GRAVITY * log_p
    t, phi = t[..., None, :, :], phi[..., None, :, :]
    under = level > surface
    return (
        torch.where(under, phi - _TRENBERTH_GAS * t * log_p * (1 + y / 2 + y**2 / 6), geopotential_LHW),
        torch.where(under, t * (1 + y + y**2 / 2 + y**3 / 6), temperature_LHW),
    )


def mean_sea_level_pressure(
    surface_temperature_HW: Tensor,
    surface_geopotential_HW: Tensor,
    surface_pressure_HW: Tensor,
) -> Tensor:
    """Reduce surface pressure to sea level.

    p_s exp(x (1 − αx/2 + (αx)²/3)) with x = φ_s / (R T*) and α = Γ R / g [2, equations 6 to 11]. Where Γ = 6.5 K km⁻¹
    would make sea level warmer than 290.5 K, Γ is reduced so that it is not. Where the surface itself is warmer, Γ is 0
    and T* the mean of both; where it is colder than 255 K, T* is the mean of both. CREDIT takes Γ for α.
    """
    t, phi = surface_temperature_HW, surface_geopotential_HW
    warm_sea = t + LAPSE_RATE * phi / GRAVITY > 290.5
    warm_ground = t > 290.5
    flat = phi.abs() / GRAVITY < 1e-4
    reduced = GRAVITY / torch.where(flat, 1.0, phi) * (290.5 - t)
    gamma = torch.where(warm_sea, torch.where(warm_ground, 0.0, reduced), LAPSE_RATE)
    t = torch.where(warm_sea & warm_ground, (t + 290.5) / 2, t)
    t = torch.where(~warm_sea & (surface_temperature_HW < 255), (t + 255) / 2, t)
    x = phi / (_TRENBERTH_GAS * t)
    y = gamma * _TRENBERTH_GAS / GRAVITY * x
    reduced_pressure = surface_pressure_HW * torch.exp(x * (1 - y / 2 + y**2 / 3))
    return torch.where(flat, surface_pressure_HW, reduced_pressure)


def relative_humidity(temperature: Tensor, humidity: Tensor, pressure: Tensor) -> Tensor:
    """Return e / e_s over water, as a fraction.

    e = q p / (ε + (1 − ε) q) with ε = R_d / R_v, and e_s = 611.21 Pa · exp(17.502 (T − 273.16) / (T − 32.19))
    (IFS documentation Cy47r3, part IV, equation 7.5; Buck 1981).
    """
    ratio = DRY_AIR / VAPOUR
    saturated = 611.21 * torch.exp(17.502 * (temperature - 273.16) / (temperature - 32.19))
    return humidity * pressure / ((ratio + (1 - ratio) * humidity) * saturated)


def wind_speed(u: Tensor, v: Tensor) -> Tensor:
    """Return √(u² + v²); its gradient is zero where there is no wind."""
    return torch.linalg.vector_norm(torch.stack([u, v]), dim=0)


def column_water(water_KHW: Tensor, thickness_KHW: Tensor) -> Tensor:
    """Return Σ q Δp / g in kg m⁻², with the thickness Δp of each level's layer."""
    return (water_KHW * thickness_KHW).sum(-3) / GRAVITY
