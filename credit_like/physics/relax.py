"""Relaxation of zonal means towards those of the data, similar to the effect of heating and friction.

With [x] the mean of x along a row, over the points that have data, and c the mean of [x] over up to 50 times of `climatology`,

    x ← x + rate · (c − [x])

Deviations from the zonal mean, which are the weather, stay as they are. A deviation of the zonal mean decays by a factor e in
1 / rate steps. The correction does not make a model better: it holds the climate that a long forecast has near that of the data,
and with it what the data would not confirm, such as a trend. The climatology has no seasonal cycle. Source of the form: Held and
Suarez (1994), Bull. Amer. Meteor. Soc. 75, 1825-1830, who force a dynamical core by relaxation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from credit_like.physics._climatology import check_period, climatology, on_channels
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


class Config(Correction):
    """The predicted variables to relax, how fast, and the period whose mean they are relaxed to."""

    type: Literal["relax"] = "relax"
    variables: Names = ()
    """Predicted variables whose zonal means are relaxed."""
    rate: float = Field(default=0.01, gt=0, le=1)
    """Fraction of the deviation of a zonal mean that is removed in each step."""
    climatology: Periods | None = None
    """Period of the data to whose zonal means the forecast is relaxed, such as that of training. Required."""

    @model_validator(mode="after")
    def _period(self) -> Config:
        if self.variables and self.climatology is None:
            raise ValueError("expected a period as climatology of relax, got none; give that of training")
        return self


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    return [channels_of(name, variables.outputs, "physics.variables") for name in config.variables]


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for a grid that is no full circle of longitude, and for a period that the data do not reach over."""
    if not config.variables:
        return
    require_circle(config.type, store)
    check_period(config.type, config.climatology or (), store)


def check_mask(config: Config, variables: Variables, mask: NDArray[np.bool_]) -> None:
    """Raise UserError for a variable with rows without data."""
    refuse_gaps(config.type, config.variables, find(config, variables), mask, rows=True)


def measure(
    config: Config, variables: Variables, store: FieldStore, rows: slice = slice(None)
) -> dict[str, NDArray[np.float64]]:
    """Return the zonal means of the climatology (n, H, 1). Raises UserError as `check_data` does."""
    check_data(config, store)
    where = find(config, variables)
    return {"mean": climatology(where, config.climatology or (), variables, store, rows, zonal=True)} if where else {}


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`).

    Raises UserError as `check_data` does, and where the data do not have some rows of a variable.
    """
    import torch

    from credit_like.nn.area import identity
    from credit_like.physics._fix import Fix

    where, rows = find(config, variables), layout.get("rows", slice(None))
    measured = layout.get("measured") or measure(config, variables, store, rows)
    climate = torch.nn.Module()
    if where:
        mean = on_channels(measured["mean"], where, variables)
        check_mask(config, variables, np.isfinite(mean))
        climate.register_buffer("mean", torch.tensor(mean), persistent=False)
        valid_CHW = torch.tensor(statistics.mask(variables.outputs)[:, rows])
        climate.register_buffer("points", valid_CHW.sum(-1, keepdim=True), persistent=False)
        is_whole = all(bool(valid_CHW[channels].all()) for channels in where)
        climate.register_buffer("valid", valid_CHW[:, :1, :1].clone() if is_whole else valid_CHW, persistent=False)

    whole_rows: Callable[[Tensor], Tensor] = layout.get("whole_rows", identity)

    def correct(after_BCHW: Tensor, _before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for channels in where:
            # In float64, because the change in a step is a small part of a field whose mean may be large.
            x = after_BCHW[:, channels].double()
            total = torch.where(climate.get_buffer("valid")[channels], whole_rows(x), 0).sum(-1, keepdim=True)
            zonal = total / climate.get_buffer("points")[channels]
            pull = config.rate * (climate.get_buffer("mean")[channels] - zonal)
            result[:, channels] = (x + pull).to(after_BCHW.dtype)
        return result

    changes = dict(zip(config.variables, where, strict=True))
    fix = Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
    fix.climate = climate
    return fix
