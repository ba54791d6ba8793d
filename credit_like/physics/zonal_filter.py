"""Zonal filter: waves along a row that are shorter than those of the data are removed.

The fields of a spectral model have no waves above its truncation, but a network on the grid predicts some. With F the Fourier
transform along a row, x ← x − F⁻¹(F(x)_k for k > `highest`). Rows keep their means, and rows are independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from credit_like.errors import UserError
from credit_like.physics._column import channels_of
from credit_like.physics._correction import Correction, Names, require_circle
from credit_like.physics._gaps import refuse_gaps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from credit_like.data.statistics import Statistics
    from credit_like.data.store import FieldStore
    from credit_like.variables import Variables

shares_columns = True
"""See `credit_like.physics`."""


class Config(Correction):
    """The predicted variables to filter, and the highest zonal wavenumber that remains."""

    type: Literal["zonal-filter"] = "zonal-filter"
    variables: Names = ()
    """Predicted variables to filter."""
    highest: int = Field(default=21, ge=1)
    """Highest zonal wavenumber that remains."""


def find(config: Config, variables: Variables) -> list[slice]:
    """See `credit_like.physics`."""
    return [channels_of(name, variables.outputs, "physics.variables") for name in config.variables]


def check_data(config: Config, store: FieldStore) -> None:
    """Raise UserError for a grid that does not cover the full circle of longitude or has no shorter waves."""
    if not config.variables:
        return
    require_circle(config.type, store)
    if (most := store.grid.width // 2 - 1) < config.highest:
        raise UserError(
            f"physics.highest: expected at most {most} on {store.grid.width} longitudes, where there are no shorter waves, "
            f"got {config.highest}; change it"
        )


def check_mask(config: Config, variables: Variables, mask: NDArray[np.bool_]) -> None:
    """Raise UserError for a variable with points without data."""
    refuse_gaps(config.type, config.variables, find(config, variables), mask)


def build(config: Config, variables: Variables, store: FieldStore, statistics: Statistics, **layout: Any) -> nn.Module:
    """Build the correction; the arguments are those of every kind (see `credit_like.physics`).

    Raises UserError for a grid that `check_data` refuses, and for variables with points without data.
    """
    import torch

    from credit_like.nn.area import identity
    from credit_like.physics._fix import Fix

    where = find(config, variables)
    check_data(config, store)
    check_mask(config, variables, statistics.mask(variables.outputs))

    columns: slice = layout.get("columns", slice(None))
    whole_rows: Callable[[Tensor], Tensor] = layout.get("whole_rows", identity)

    def correct(after_BCHW: Tensor, _before_BCHW: Tensor, _mean: Callable[[Tensor], Tensor]) -> Tensor:
        result = after_BCHW.clone()
        for channels in where:
            x = whole_rows(after_BCHW[:, channels])
            # The mean of a row is orders of magnitude larger than its short waves and would cost their accuracy.
            waves = torch.fft.rfft(x - x.mean(-1, keepdim=True))
            short = torch.cat(
                [torch.zeros_like(waves[..., : config.highest + 1]), waves[..., config.highest + 1 :]], -1
            )
            result[:, channels] = (x - torch.fft.irfft(short, n=x.shape[-1]))[..., columns]
        return result

    changes = dict(zip(config.variables, where, strict=True))
    return Fix(correct, variables, store, statistics, config=config, changes=changes, **layout)
