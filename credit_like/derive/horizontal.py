"""Fields that need neighbouring points: vorticity and divergence of the wind on a latitude-longitude grid."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.grid import ROUNDING, Grid
from credit_like.nn.constants import on_device

EARTH_RADIUS = 6.371229e6
"""m, as in the IFS."""


def vorticity(u: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Return the relative vorticity in s⁻¹ of winds (…, H, W) in m s⁻¹.

    ζ = (∂v/∂λ − ∂(u cos φ)/∂φ) / (a cos φ), by centred differences; at a pole, the circulation around the nearest row
    divided by the area inside it, or of a sector the mean of that row.
    """
    cosine = _cosine(grid, u)
    return _at_poles((_along_longitude(v, grid) - _along_latitude(u * cosine, grid)) / _divisor(cosine), u, grid, 1)


def divergence(u: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Return the divergence in s⁻¹ of winds (…, H, W) in m s⁻¹.

    δ = (∂u/∂λ + ∂(v cos φ)/∂φ) / (a cos φ), by centred differences; at a pole, the flow through the nearest row divided
    by the area inside it, or of a sector the mean of that row.
    """
    cosine = _cosine(grid, u)
    return _at_poles((_along_longitude(u, grid) + _along_latitude(v * cosine, grid)) / _divisor(cosine), v, grid, -1)


def _cosine(grid: Grid, like: Tensor) -> Tensor:
    return on_device(_numbers(np.cos(np.deg2rad(grid.latitude))), like.dtype, like.device)[:, None]


def _numbers(values: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(values.tolist())


def _divisor(cosine: Tensor) -> Tensor:
    # The rows at the poles are replaced afterwards, and must not divide by zero before.
    return EARTH_RADIUS * torch.where(cosine < 1e-6, 1.0, cosine)


def _along_latitude(x: Tensor, grid: Grid) -> Tensor:
    """Return the derivative of x = wind · cos φ by latitude.

    Beyond the row that is nearest to a pole, the difference reaches to the pole, where x is zero. A one-sided difference, divided
    by the small cos φ of that row, would have an error that no resolution removes.
    """
    latitude = np.asarray(grid.latitude, np.float64)
    first, last = (_to_pole(latitude, end) for end in (0, -1))
    rows = np.concatenate([first, latitude, last])
    padded = torch.nn.functional.pad(x, (0, 0, len(first), len(last)))
    (result,) = torch.gradient(padded, spacing=(on_device(_numbers(np.deg2rad(rows)), x.dtype, x.device),), dim=(-2,))
    return result.narrow(-2, len(first), grid.height)


def _to_pole(latitude: NDArray[np.float64], end: int) -> NDArray[np.float64]:
    """Return the pole beyond the first or last row (`end` 0 or -1) if no row is missing between them, or else nothing."""
    row, inner = latitude[end], latitude[1 if end == 0 else -2]
    pole = np.copysign(90.0, row)
    is_next = abs(row) > abs(inner) and ROUNDING < abs(pole - row) < abs(row - inner) + ROUNDING
    return np.array([pole] if is_next else [])


def _along_longitude(x: Tensor, grid: Grid) -> Tensor:
    longitude = np.rad2deg(np.unwrap(np.deg2rad(grid.longitude)))
    if grid.is_periodic:
        step = np.deg2rad(longitude[1] - longitude[0])
        return (x.roll(-1, -1) - x.roll(1, -1)) / (2 * step)
    columns = on_device(_numbers(np.deg2rad(longitude)), x.dtype, x.device)
    (result,) = torch.gradient(x, spacing=(columns,), dim=(-1,))
    return result


def _at_poles(result: Tensor, wind: Tensor, grid: Grid, sign: int) -> Tensor:
    """Replace rows at a pole by the integral of `wind` along the nearest row, divided by the area inside that row.

    Of a sector, which has no such integral, they become the mean of the nearest row.
    """
    rows = list(result.unbind(-2))
    for row, neighbour in ((0, 1), (-1, -2)):
        if abs(abs(grid.latitude[row]) - 90) < ROUNDING:
            nearest = np.deg2rad(abs(grid.latitude[neighbour]))
            scale = sign * np.sign(grid.latitude[row]) * np.cos(nearest) / (EARTH_RADIUS * (1 - np.sin(nearest)))
            around = scale * wind[..., neighbour, :] if grid.is_periodic else rows[neighbour]
            rows[row] = around.mean(-1, keepdim=True).expand_as(rows[row])
    return torch.stack(rows, -2)
