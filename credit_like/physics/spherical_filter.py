"""Spherical filter: waves in any direction that are shorter than those of the data are removed, and short ones damped.

The fields of a spectral model are sums of spherical harmonics Y_n^m of total wavenumber n ≤ N. A model that predicts changes adds
them to the state, so that whatever it puts into other waves stays there, step after step: it never saw any in its data, and does
not learn to remove them. With x_n^m the coefficients of a field, fitted to the grid by area-weighted least squares,

    x ← Σ_{m ≤ n ≤ N} d_n x_n^m Y_n^m,    d_n = exp(−damping · (n (n + 1) / (N (N + 1)))^(order / 2))

The factors are those of one step of implicit diffusion −∇^order, with which atmospheric models damp waves near their truncation.
Components of the wind are not smooth at the poles, but their products with cos φ are sums of Y_n^m with n ≤ N + 1 and m ≤ N;
these are filtered. In rows at the poles the quotient has a limit, the wave m = 1 of a wind across the pole. With `climatology` the
deviation x − c from the mean c over a period is filtered: stationary waves, such as those of the surface pressure over mountains,
stay. Source: Jablonowski and Williamson (2011), in Numerical Techniques for Global Atmospheric Models, Springer, 381-493, for
diffusion in models; Hack and Jakob (1992), NCAR/TN-343+STR, for the harmonics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from credit_like.errors import UserError
from credit_like.physics._climatology import check_period, climatology, on_channels
from credit_like.physics._column import channels_of
from credit_like.physics._correction import Correction, Names
from credit_like.physics._gaps import refuse_gaps
from credit_like.schema.data import Periods

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.grid import Grid
    from credit_like.variables import Variables

Real = NDArray[np.float64]

shares_columns = True
"""See `credit_like.physics`."""


class Config(Correction):
    """The predicted variables to filter, the highest total wavenumber that remains, and the damping of those below."""

    type: Literal["spherical-filter"] = "spherical-filter"
    variables: Names = ()
    """Predicted variables to filter, other than components of the wind."""
    winds: tuple[str, ...] = ()
    """Components of the wind along and across circles of latitude."""
    highest: int = Field(default=21, ge=1)
    """Highest total wavenumber that remains."""
    damping: float = Field(default=0.0, ge=0)
    """Part of a wave of the wavenumber `highest` that a step removes, as the exponent of exp(−damping)."""
    order: Literal[2, 4, 6, 8] = 4
    """Order of the diffusion: the higher it is, the less longer waves are damped."""
    climatology: Periods | None = None
    """Period, such as that of training: only deviations from its mean are filtered. Default: whole fields are filtered."""


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    return [
        channels_of(name, variables.outputs, f"physics.{key}")
        for key in ("variables", "winds")
        for name in getattr(config, key)
    ]


def legendre(latitude: Real, highest: int) -> Real:
    """Return P_n^m(sin φ) of m, n ≤ `highest` at latitudes in degrees, (M, H, N), zero where n < m.

    They are normalised to a mean square of 1 over −1 < sin φ < 1 and computed by recursion in n from n = m.
    """
    mu = np.sin(np.deg2rad(latitude))
    sectoral = np.ones((highest + 1, len(mu)))
    for m in range(1, highest + 1):
        sectoral[m] = sectoral[m - 1] * np.sqrt((2 * m + 1) / (2 * m) * (1 - mu**2))
    return _from_sectoral(sectoral, mu)


def winds_at_poles(latitude: Real, highest: int) -> Real:
    """Return P_n^m(sin φ) / cos φ at latitudes of ±90 degrees, (M, H, N), where only those of m = 1 are not zero.

    This is the limit for m > 0. For m = 0 the quotient has none, but the zonal mean of a wind's component is zero there.
    """
    sectoral = np.zeros((highest + 1, len(latitude)))
    sectoral[1:2] = np.sqrt(3 / 2)
    return _from_sectoral(sectoral, np.sin(np.deg2rad(latitude)))


def _from_sectoral(sectoral: Real, mu: Real) -> Real:
    """Return the functions (M, H, N) of those with n = m, (M, H), by the recursion in n, which is linear."""
    highest = len(sectoral) - 1
    P = np.zeros((highest + 1, len(mu), highest + 1))
    for m in range(highest + 1):
        P[m, :, m] = sectoral[m]
        for n in range(m + 1, highest + 1):
            epsilon, below = (np.sqrt((k**2 - m**2) / (4 * k**2 - 1)) for k in (n, n - 1))
            before = P[m, :, n - 2] if n - 2 >= m else 0.0
            P[m, :, n] = (mu * P[m, :, n - 1] - below * before) / epsilon
    return P


def transforms(latitude: Real, weights: Real, highest: int) -> tuple[Real, Real]:
    """Return the maps (M, N, H) from rows to coefficients, and (M, H, N) back, of harmonics up to `highest`.

    The first is the least-squares fit with `weights` (H,), which is exact for fields that are sums of the harmonics.
    """
    back = legendre(latitude, highest)
    fit = np.zeros((highest + 1, highest + 1, len(latitude)))
    for m in range(highest + 1):
        P_HN = back[m, :, m:]
        weighted_NH = P_HN.T * weights
        fit[m, m:] = np.linalg.solve(weighted_NH @ P_HN, weighted_NH)
    return fit, back


def damped_transforms(config: Config, grid: Grid, winds: bool) -> tuple[Real, Real]:
    """Return the maps (M, N, H) from rows to coefficients, and (M, H, N) from these, damped, back to rows.

    Of `winds` the coefficients are those of their products with cos φ.
    """
    factor = np.cos(np.deg2rad(grid.latitude)) if winds else np.ones_like(grid.latitude)
    highest = config.highest + winds
    fit, back = transforms(grid.latitude, grid.latitude_weights(), highest)
    back = back / factor[:, None]
    if winds:
        is_pole = np.abs(grid.latitude) == 90
        back[:, is_pole] = winds_at_poles(grid.latitude[is_pole], highest)
    n = np.arange(highest + 1)
    ratio = n * (n + 1) / (config.highest * (config.highest + 1))
    back = back * np.exp(-config.damping * ratio ** (config.order / 2))
    waves = slice(config.highest + 1)  # derivatives of Y_n^m have the same m
    return fit[waves] * factor, back[waves]


def measure(
    config: Config,
    variables: Variables,
    store: FieldStore,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> dict[str, NDArray[np.float64]]:
    """Return the mean of the climatology (n, H, W), if deviations from it are filtered. Raises UserError as `check_data` does."""
    check_data(config, store)
    where = find(config, variables)
    if not where or config.climatology is None:
        return {}
    return {"mean": climatology(where, config.climatology, variables, store, rows, columns)}


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`).

    Raises UserError for a grid that is not global or too coarse, and for variables with points without data.
    """
    import torch

    from credit_like.nn.area import identity
    from credit_like.physics._fix import Fix

    where, grid = find(config, variables), store.grid
    check_mask(config, variables, statistics.mask(variables.outputs))
    rows = layout.get("rows", slice(None))
    reduce: Callable[[Tensor], Tensor] = layout.get("reduce", identity)
    columns: slice = layout.get("columns", slice(None))
    measured = layout.get("measured") or measure(config, variables, store, rows, columns)
    whole_rows: Callable[[Tensor], Tensor] = layout.get("whole_rows", identity)
    # The ranks that share rows compute the sums over these rows alike, and `reduce` adds up those of all ranks.
    copies: int = layout.get("column_ranks", 1)
    number = len(config.variables)
    kinds = [(chosen, winds) for chosen, winds in ((where[:number], False), (where[number:], True)) if chosen]
    maps = torch.nn.Module()
    for kind, (_, winds) in enumerate(kinds):
        fit, back = damped_transforms(config, grid, winds)
        maps.register_buffer(f"fit_{kind}", torch.tensor(fit[:, :, rows]), persistent=False)
        maps.register_buffer(f"back_{kind}", torch.tensor(back[:, rows]), persistent=False)

    def filtered(part_BCHW: Tensor, fit_MNH: Tensor, back_MHN: Tensor) -> Tensor:
        x_BCHW = whole_rows(part_BCHW)
        real_BCHMR = torch.view_as_real(torch.fft.rfft(x_BCHW)[..., : len(fit_MNH)])
        coefficients = reduce(torch.einsum("mnh,bchmr->bcmnr", fit_MNH, real_BCHMR)) / copies
        kept = torch.einsum("mhn,bcmnr->bchmr", back_MHN, coefficients).contiguous()
        return torch.fft.irfft(torch.view_as_complex(kept), n=x_BCHW.shape[-1])[..., columns]

    if "mean" in measured:
        maps.register_buffer("mean", torch.tensor(on_channels(measured["mean"], where, variables)), persistent=False)

    def correct(after_BCHW: Tensor, _before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for kind, (chosen, _) in enumerate(kinds):
            fit, back = maps.get_buffer(f"fit_{kind}"), maps.get_buffer(f"back_{kind}")
            for channels in chosen:
                # In float64, because sums in float32 would lose digits of fields whose mean is large.
                x_BCHW = after_BCHW[:, channels].double()
                c_CHW = maps.get_buffer("mean")[channels] if "mean" in measured else 0.0
                result[:, channels] = (filtered(x_BCHW - c_CHW, fit, back) + c_CHW).to(after_BCHW.dtype)
        return result

    changes = dict(zip((*config.variables, *config.winds), where, strict=True))
    fix = Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
    fix.maps = maps
    return fix


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for a grid that is not global or too coarse."""
    grid, highest = store.grid, config.highest + bool(config.winds)
    if not config.variables and not config.winds:
        return
    if not grid.is_global:
        raise UserError(
            "physics.type: expected a global grid for spherical-filter, got a part of one; remove the filter"
        )
    if highest >= grid.height or 2 * highest >= grid.width:
        most = min(grid.height - 1, (grid.width - 1) // 2) - bool(config.winds)
        raise UserError(
            f"physics.highest: expected at most {most} on {grid.height} x {grid.width} points, got {config.highest}"
        )
    if config.climatology is not None:
        check_period(config.type, config.climatology, store)


def check_mask(config: Config, variables: Variables, mask: NDArray[np.bool_]) -> None:
    """Raise UserError for a variable with points without data."""
    refuse_gaps(config.type, (*config.variables, *config.winds), find(config, variables), mask)
