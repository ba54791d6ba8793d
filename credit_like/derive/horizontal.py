"""Fields that need neighbouring points: vorticity and divergence of the wind on a latitude-longitude grid."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.grid import Grid
from credit_like.nn.constants import on_device

EARTH_RADIUS = 6.371229e6
"""m, as in the IFS."""


def vorticity(u: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Return the relative vorticity in s⁻¹ of winds (…, H, W) in m s⁻¹.

    ζ = (∂v/∂λ − ∂(u cos φ)/∂φ) / (a cos φ), by centred differences; at a pole, the circulation around the nearest row
    divided by the area inside it.
    """
    cosine = _cosine(grid, u)
    return _at_poles((_along_longitude(v, grid) - _along_latitude(u * cosine, grid)) / _divisor(cosine), u, grid, 1)


def divergence(u: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Return the divergence in s⁻¹ of winds (…, H, W) in m s⁻¹.

    δ = (∂u/∂λ + ∂(v cos φ)/∂φ) / (a cos φ), by centred differences; at a pole, the flow through the nearest row divided
    by the area inside it.
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
    rows = on_device(_numbers(np.deg2rad(grid.latitude)), x.dtype, x.device)
    (result,) = torch.gradient(x, spacing=(rows,), dim=(-2,))
    return result


def _along_longitude(x: Tensor, grid: Grid) -> Tensor:
    longitude = np.rad2deg(np.unwrap(np.deg2rad(grid.longitude)))
    if grid.is_periodic:
        step = np.deg2rad(longitude[1] - longitude[0])
        return (x.roll(-1, -1) - x.roll(1, -1)) / (2 * step)
    columns = on_device(_numbers(np.deg2rad(longitude)), x.dtype, x.device)
    (result,) = torch.gradient(x, spacing=(columns,), dim=(-1,))
    return result


def _at_poles(result: Tensor, wind: Tensor, grid: Grid, sign: int) -> Tensor:
    """Replace rows at a pole by the integral of `wind` along the nearest row, divided by the area inside that row."""
    rows = list(result.unbind(-2))
    for row, neighbour in ((0, 1), (-1, -2)):
        if abs(abs(grid.latitude[row]) - 90) < 1e-4:
            nearest = np.deg2rad(abs(grid.latitude[neighbour]))
            scale = sign * np.sign(grid.latitude[row]) * np.cos(nearest) / (EARTH_RADIUS * (1 - np.sin(nearest)))
            rows[row] = (scale * wind[..., neighbour, :].mean(-1, keepdim=True)).expand_as(rows[row])
    return torch.stack(rows, -2)
