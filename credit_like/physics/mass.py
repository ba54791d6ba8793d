"""Conservation of the global mass of dry air.

The weight of dry air per area is p_s − g W, with surface pressure p_s and column water W. One constant is added to p_s
everywhere, so that its global mean stays what it was one step before:

    δ = (⟨p_s − g W⟩_before − ⟨p_s − g W⟩_after) / ⟨1 − ∂(g W)/∂p_s⟩,   p_s ← p_s + δ

The denominator is 1 on pressure levels, and 1 − Σ q Δb on hybrid levels, where thicker layers hold more water.
A constant leaves pressure gradients, and so the wind, as they were. Source: Watt-Meyer et al. (2024), arXiv:2411.11268
(ACE2), which corrects surface pressure in this way; Trenberth and Smith (2005), J. Climate 18, 864-875, for the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from credit_like.data.declared import check_units
from credit_like.physics._column import Column, ColumnConfig, channel_of, check_column, make_column

if TYPE_CHECKING:
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables

shares_columns = True
"""See `credit_like.physics`."""


class Config(ColumnConfig):
    """Names of variables, and the positions of the layers."""

    type: Literal["mass"] = "mass"


def find(config: Config, variables: Variables) -> tuple[int, Column]:
    """Return the channels of surface pressure and the column of water; see `credit_like.physics`."""
    pressure = channel_of(config.surface_pressure, variables.role("prognostic"), "physics.surface_pressure")
    return pressure, make_column(config, variables)


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for data in other units than the correction counts on."""
    check_units(store, "physics.surface_pressure", config.surface_pressure, "Pa")
    check_column(config, store)


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`)."""
    from credit_like.physics._fix import Fix

    pressure, column = find(config, variables)

    def correct(after_BCHW: Tensor, before_BCHW: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        dry_before, dry_after = (
            mean(x[:, pressure].double() - column.weight(x, x[:, pressure])) for x in (before_BCHW, after_BCHW)
        )
        delta = (dry_before - dry_after) / mean(1 - column.per_pressure(after_BCHW))
        result = after_BCHW.clone()
        result[:, pressure] = (after_BCHW[:, pressure] + delta).to(after_BCHW.dtype)
        return result

    changes = {config.surface_pressure: slice(pressure, pressure + 1)}
    budget = (*changes.values(), column.water)
    return Fix(correct, variables, store, statistics, config=config, changes=changes, budget=budget, **layout)
