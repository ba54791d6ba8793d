"""Conservation of the global budget of water.

Water that the air loses falls as rain: ⟨P⟩ = ⟨E⟩ − ⟨W_after − W_before⟩ over one step, with evaporation E, precipitation P
(both in kg m⁻² over the step) and column water W. Precipitation is multiplied by one number everywhere, so that dry
places stay dry:

    P ← P · max(0, ⟨E⟩ − ⟨W_after − W_before⟩) / ⟨P⟩

Source: Watt-Meyer et al. (2024), arXiv:2411.11268 (ACE2); Sha et al. (2025), arXiv:2501.05648 (conservation in
WXFormer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from credit_like.data.declared import Scale, check_sums, check_units
from credit_like.physics._column import GRAVITY, Column, ColumnConfig, channel_of, check_column, make_column

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables

shares_columns = True
"""See `credit_like.physics`."""


class Config(ColumnConfig):
    """Names of variables, and the units and sign of their values."""

    type: Literal["moisture"] = "moisture"
    precipitation: str = "total_precipitation"
    """Predicted precipitation, which is corrected."""
    evaporation: str = "evaporation"
    """Predicted evaporation."""
    water_scale: float = 1.0
    """kg m⁻² per unit of precipitation and evaporation: 1000 for metres of water."""
    evaporation_upward: bool = True
    """False where evaporation is counted negative, as in ERA5."""


def find(config: Config, variables: Variables) -> tuple[int, int, Column, int]:
    """See `credit_like.physics`: precipitation, evaporation, the water of the column, surface pressure (0: not needed)."""
    rain = channel_of(config.precipitation, variables.outputs, "physics.precipitation")
    evaporation = channel_of(config.evaporation, variables.outputs, "physics.evaporation")
    column = make_column(config, variables)
    if not any(column.delta_b):
        return rain, evaporation, column, 0
    pressure = channel_of(config.surface_pressure, variables.role("prognostic"), "physics.surface_pressure")
    return rain, evaporation, column, pressure


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for data in other units than the correction counts on."""
    scale = Scale("physics.water_scale", config.water_scale)
    for key, name in (("precipitation", config.precipitation), ("evaporation", config.evaporation)):
        check_units(store, f"physics.{key}", name, "kg m-2", scale, rate="kg m-2 s-1")
        check_sums(store, f"physics.{key}", name, "kg m-2 s-1")
    check_column(config, store)


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`)."""
    from credit_like.physics._fix import Fix

    rain, evaporation, column, pressure = find(config, variables)
    to_water = config.water_scale
    upward = 1.0 if config.evaporation_upward else -1.0

    def correct(after_BCHW: Tensor, before_BCHW: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        water_before, water_after = (
            mean(column.weight(x, x[:, pressure])) / GRAVITY for x in (before_BCHW, after_BCHW)
        )
        gained = upward * to_water * mean(after_BCHW[:, evaporation])
        falls = (gained - (water_after - water_before)).clamp(min=0)
        predicted = to_water * mean(after_BCHW[:, rain])
        # Where no precipitation is predicted there is nothing to scale; the budget then stays open, and nothing is
        # divided by zero.
        factor = (falls / predicted.clamp(min=1e-12)).where(predicted > 1e-12, 1.0)
        result = after_BCHW.clone()
        result[:, rain] = (after_BCHW[:, rain] * factor).to(after_BCHW.dtype)
        return result

    changes = {config.precipitation: slice(rain, rain + 1)}
    surface = (rain, evaporation, *([pressure] if any(column.delta_b) else []))
    budget = (column.water, *(slice(channel, channel + 1) for channel in surface))
    return Fix(correct, variables, store, statistics, config=config, changes=changes, budget=budget, **layout)
