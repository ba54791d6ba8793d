"""Zonal energy: waves along the rows keep their energy, or are pulled to that of the data, one wavenumber at a time.

A network that is trained on squared errors makes short waves too weak, because it cannot know their phases, and some of
them grow from step to step. With F the Fourier transform along a row, w the area weights of the rows and

    E_k(x) = Σ w |F(x)_k|²  over the rows,

each wave of k ≥ `lowest` of a variable on a level is multiplied by one factor in all rows,

    F(x)_k ← F(x)_k · √(1 + rate · (T_k / E_k(x) − 1)),

so that its energy moves to the target T_k by a part `rate` of the distance. T is the energy before the step, or with
`climatology` the mean energy over a period of the data. Zonal means, phases and the shape of each wave from pole to pole
stay as they are, and so do truncations: a sum of spherical harmonics up to some wavenumber remains one. The correction
prescribes how sharp a forecast is. It does not make the forecast more accurate: the errors of sharp forecasts are larger.
Source of the form: the linear relaxation of Held and Suarez (1994), Bull. Amer. Meteor. Soc. 75, 1825-1830, here of energies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from credit_like.errors import UserError
from credit_like.physics._climatology import check_period, on_channels, states
from credit_like.physics._column import channels_of
from credit_like.physics._correction import Correction, Names, require_circle
from credit_like.physics._gaps import refuse_gaps
from credit_like.schema.data import Periods

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables

shares_columns = True
"""See `credit_like.physics`."""

MOST = 100.0
"""Largest factor, or divisor, of an energy in a step: where a wave is nearly absent, its phase is rounding."""
TINY = 1e-30
"""Energies below this are zero to rounding, in any variable's units."""
TIMES = 200
"""At most as many times make the climatology. Short waves are strong at few of them: a mean needs more than that of fields."""


class Config(Correction):
    """The predicted variables, the waves that are rescaled, and how fast their energy approaches which target."""

    type: Literal["zonal-energy"] = "zonal-energy"
    variables: Names = ()
    """Variables whose waves are rescaled: prognostic ones, or with `climatology` any predicted ones."""
    lowest: int = Field(default=1, ge=1)
    """Lowest zonal wavenumber that is rescaled."""
    rate: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the difference to the target by which the energy changes in each step."""
    climatology: Periods | None = None
    """Period of the data whose mean energy is the target, such as that of training. Default: the energy before the step."""


def _mean_power(fields: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the mean of |F(x)_k|² over fields (C, H, W), (C, H, K): of each row, over those in which no point is missing.

    Rows are counted one by one, so that the mean of a row is the same on every rank that has it. Raises UserError for a row
    that is never whole.
    """
    total = whole = np.zeros(())
    for x_CHW in fields:
        power_CHK = np.square(np.abs(np.fft.rfft(x_CHW)))
        is_whole = np.isfinite(power_CHK).all(-1, keepdims=True)
        total, whole = total + np.where(is_whole, power_CHK, 0), whole + is_whole
    if not np.all(whole):
        raise UserError(
            "physics.climatology: expected times at which rows have data at all points for zonal-energy, got rows that lack some "
            "at all of those that were read; change the period"
        )
    return np.asarray(total / whole)


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    known = variables.role("prognostic") if config.climatology is None else variables.outputs
    return [channels_of(name, known, "physics.variables") for name in config.variables]


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for a grid that does not cover the full circle of longitude or lacks the waves, and for an empty period."""
    if not config.variables:
        return
    require_circle(config.type, store)
    if (most := store.grid.width // 2) < config.lowest:
        raise UserError(
            f"physics.lowest: expected at most {most} on {store.grid.width} longitudes, which have no shorter waves, "
            f"got {config.lowest}; change it"
        )
    if config.climatology is not None:
        check_period(config.type, config.climatology, store)


def check_mask(config: Config, variables: Variables, mask: NDArray[np.bool_]) -> None:
    """Raise UserError for a variable with points without data."""
    refuse_gaps(config.type, config.variables, find(config, variables), mask)


def measure(
    config: Config, variables: Variables, store: FieldStore, rows: slice = slice(None)
) -> dict[str, NDArray[np.float64]]:
    """Return the mean squares of the waves along each row (n, H, K), if they are the target.

    Raises UserError as `check_data` does.
    """
    check_data(config, store)
    where = find(config, variables)
    if not where or config.climatology is None:
        return {}
    return {"power": _mean_power(states(where, config.climatology, variables, store, rows, times=TIMES))}


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`).

    Raises UserError as `check_data` does, and for variables with points without data.
    """
    import torch

    from credit_like.nn.area import identity
    from credit_like.physics._fix import Fix

    where = find(config, variables)
    check_mask(config, variables, statistics.mask(variables.outputs))
    rows: slice = layout.get("rows", slice(None))
    measured = layout.get("measured") or measure(config, variables, store, rows)
    columns: slice = layout.get("columns", slice(None))
    reduce: Callable[[Tensor], Tensor] = layout.get("reduce", identity)
    whole_rows: Callable[[Tensor], Tensor] = layout.get("whole_rows", identity)
    # The ranks that share rows compute the sums over these rows alike, and `reduce` adds up those of all ranks.
    copies: int = layout.get("column_ranks", 1)
    weights_H1 = store.grid.latitude_weights()[rows, None]

    climate = torch.nn.Module()
    climate.register_buffer("weights", torch.tensor(weights_H1), persistent=False)
    climate.register_buffer("scaled", torch.arange(store.grid.width // 2 + 1) >= config.lowest, persistent=False)
    if "power" in measured:
        energy_CK = on_channels((measured["power"] * weights_H1).sum(-2), where, variables)
        climate.register_buffer("energy", torch.tensor(energy_CK), persistent=False)

    def energy(waves_BCHK: Tensor) -> Tensor:
        squares = torch.view_as_real(waves_BCHK).square().sum(-1)
        return (squares * climate.get_buffer("weights")).sum(-2)

    def correct(after_BCHW: Tensor, before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for channels in where:
            # In float64, because short waves are a small part of a field whose mean may be large.
            x_BCHW = whole_rows(after_BCHW[:, channels]).double()
            waves_BCHK = torch.fft.rfft(x_BCHW)
            mine_BCK = energy(waves_BCHK)
            if config.climatology is None:
                target_BCK = energy(torch.fft.rfft(whole_rows(before_BCHW[:, channels]).double()))
            else:
                target_BCK = climate.get_buffer("energy")[channels].expand_as(mine_BCK)
            mine_BCK, target_BCK = (reduce(torch.stack([mine_BCK, target_BCK])) / copies).unbind()
            ratio_BCK = target_BCK / mine_BCK.clamp(min=TINY)
            factor_BCK = (1 + config.rate * (ratio_BCK - 1)).clamp(1 / MOST, MOST).sqrt()
            factor_BCK = torch.where(climate.get_buffer("scaled"), factor_BCK, 1.0)
            scaled_BCHW = torch.fft.irfft(waves_BCHK * factor_BCK[..., None, :], n=x_BCHW.shape[-1])
            result[:, channels] = scaled_BCHW[..., columns].to(after_BCHW.dtype)
        return result

    changes = dict(zip(config.variables, where, strict=True))
    fix = Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
    fix.climate = climate
    return fix
