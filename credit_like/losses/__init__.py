"""Losses: one file each, with a `Config` and `pointwise(config, error) -> error of the same shape`.

Errors arrive divided by the channel's scale, so they are of order one; area, variable and batch means are the same for
all losses (`credit_like.losses._mean`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit_like.schema.base import Section


class LossConfig(Section):
    """What every loss has."""

    latitude_weights: bool = True
    """Weigh rows by their area; otherwise every grid point counts the same."""
    variable_weights: dict[str, float] = Field(default={})
    """Weight per predicted variable, 1 if not named."""
    scale: Literal["change", "state"] = "change"
    """Divide prognostic errors by the standard deviation of the change over a step, or of the state."""
