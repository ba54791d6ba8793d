"""Ensembles: Gaussian random fields on the sphere, added to the initial state.

A field of unit variance and correlation length L is

    f(λ, μ) = Σ_n Σ_m σ_n a_nm Y_nm(λ, μ),   a_nm independent standard normal,   σ_n² ∝ exp(−n(n + 1) L² / (2 a²)),

with real orthonormal spherical harmonics Y and a the Earth's radius; Σ_n (2n + 1) σ_n² / 4π = 1 makes the variance
one at every point (addition theorem), and the covariance at angle γ is Σ_n (2n + 1) σ_n² P_n(cos γ) / 4π, which for L
≪ a is exp(−a²γ² / 2L²). The global mean (n = 0) is left out, so that a perturbation adds no mass. Source: Weaver and
Courtier (2001), Q. J. R. Meteorol. Soc. 127, 1815-1846 (diffusion operators as correlation models).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credit_like.data.statistics import Statistics
from credit_like.data.store import FieldStore
from credit_like.errors import UserError
from credit_like.grid import Grid
from credit_like.schema.checks import ensemble_findings
from credit_like.schema.inference import Ensemble
from credit_like.transforms import Transforms
from credit_like.variables import Variables

EARTH_RADIUS_KM = 6371.22
_SMALLEST = 1e-6  # degrees with a smaller share of the variance are omitted


class SphericalRandomField:
    """Sampler of fields (H, W) of zero mean and unit variance on a grid."""

    def __init__(self, grid: Grid, length_scale_km: float) -> None:
        degree = np.arange(grid.height + 1, dtype=np.float64)
        power = np.exp(-degree * (degree + 1) * (length_scale_km / EARTH_RADIUS_KM) ** 2 / 2)
        power[0] = 0
        share = (2 * degree + 1) * power
        # The grid cannot resolve degrees beyond half its number of rows.
        top = max(1, min(grid.height // 2, int(np.flatnonzero(share > _SMALLEST * share.max())[-1])))
        power = power[: top + 1]
        power *= 4 * np.pi / ((2 * degree[: top + 1] + 1) * power).sum()
        self.top = top
        self.scale = np.sqrt(power)
        self.legendre = normalised_legendre(np.sin(np.deg2rad(grid.latitude)), top)
        angle = np.outer(np.arange(top + 1), np.deg2rad(grid.longitude))
        self.cos, self.sin = np.cos(angle), np.sin(angle)

    def draw(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw a field (H, W)."""
        coefficients = rng.standard_normal((2, self.top + 1, self.top + 1)) * self.scale[:, None]  # (cos | sin, n, m)
        # Real harmonics: √2 P_nm cos mλ and √2 P_nm sin mλ for m > 0; P_n0 alone for m = 0.
        coefficients[:, :, 1:] *= np.sqrt(2)
        coefficients[1, :, 0] = 0
        by_order = np.einsum("cnm,nmh->chm", coefficients, self.legendre)
        return by_order[0] @ self.cos + by_order[1] @ self.sin


def normalised_legendre(mu: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    """Return (n, m, H): associated Legendre functions P_nm(μ), P_nm e^{imλ} being orthonormal on the sphere.

    Stable upward recursion in degree (Holmes and Featherstone 2002, J. Geodesy 76, 279-299); zero for m > n.
    """
    p = np.zeros((top + 1, top + 1, len(mu)))
    p[0, 0] = np.sqrt(1 / (4 * np.pi))
    cosine = np.sqrt(1 - mu**2)
    for m in range(1, top + 1):
        p[m, m] = np.sqrt((2 * m + 1) / (2 * m)) * cosine * p[m - 1, m - 1]
    for m in range(top):
        p[m + 1, m] = np.sqrt(2 * m + 3) * mu * p[m, m]
        for n in range(m + 2, top + 1):
            a = np.sqrt((4 * n**2 - 1) / (n**2 - m**2))
            b = np.sqrt(((n - 1) ** 2 - m**2) / (4 * (n - 1) ** 2 - 1))
            p[n, m] = a * (mu * p[n - 1, m] - b * p[n - 2, m])
    return p


def perturbations(
    ensemble: Ensemble,
    variables: Variables,
    statistics: Statistics,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Callable[[Sequence[int]], Callable[[Tensor, Sequence[int]], Tensor]]:
    """Return a function from the members of a batch to the `perturb` argument of `rollout`.

    Adds the fields of `gaussian_fields`. Raises UserError as that function does.
    """
    fields = gaussian_fields(ensemble, variables, statistics, store, rows, columns)
    transforms = Transforms(variables.role("prognostic"))

    def for_members(members: Sequence[int]) -> Callable[[Tensor, Sequence[int]], Tensor]:
        def perturb(newest_BCHW: Tensor, init: Sequence[int]) -> Tensor:
            drawn = fields(members, init)
            changed = transforms.forward(newest_BCHW, torch) + torch.from_numpy(drawn).to(newest_BCHW.device)
            perturbed: Tensor = transforms.inverse(changed, torch)
            return perturbed

        return perturb

    return for_members


def gaussian_fields(
    ensemble: Ensemble,
    variables: Variables,
    statistics: Statistics,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Callable[[Sequence[int], Sequence[int]], NDArray[np.float32]]:
    """Return a function from members and initial positions to perturbations (B, C, H, W) of the transformed values.

    The noise of (seed, member, initial time, channel) is the same in every batch, order and layout, and in data that begin
    at another time. Its standard deviation is `amplitude[variable]` times the channel's own change per step. Member 0 is
    the unperturbed control. Raises UserError for an amplitude of a variable that is not prognostic, and if all members
    would be the same.
    """
    prognostic = variables.role("prognostic")
    perturbed = ensemble.model_copy(update={"from_": "perturbations"})
    for _, message in ensemble_findings(perturbed, [variable.name for variable in prognostic]):
        raise UserError(f"inference.ensemble.amplitude: {message}")
    _, _, change_std = statistics.select(prognostic)
    amplitude = [ensemble.amplitude.get(variable.name, 0.0) for variable in prognostic for _ in variable.channels]
    size_C = np.array(amplitude) * change_std
    grid = store.grid
    field = SphericalRandomField(grid, ensemble.length_scale_km)

    def noise(member: int, init: int) -> NDArray[np.float32]:
        result = np.zeros((len(size_C), grid.height, grid.width), np.float32)
        for channel in np.flatnonzero(size_C) if member else ():
            time = int(store.seconds[init]) % 2**64  # a seed is not negative, unlike seconds before 1970
            rng = np.random.default_rng((ensemble.seed, member, time, int(channel)))
            result[channel] = size_C[channel] * field.draw(rng)
        return result[:, rows, columns]

    return lambda members, init: np.stack([noise(member, i) for member, i in zip(members, init, strict=True)])
