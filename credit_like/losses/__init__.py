"""Losses: one file each, with a `Config` and `pointwise`. A plug-in has the attributes of `LossPlugin`.

Errors arrive divided by the channel's scale, so they are of order one; area, variable and batch means are the same for
all losses (`credit_like.losses._mean`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field

from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import Tensor


class LossConfig(Section):
    """What every loss has."""

    latitude_weights: bool = True
    """Weigh rows by their area; otherwise every grid point counts the same."""
    variable_weights: dict[str, float] = Field(default={})
    """Weight per predicted variable, 1 if not named."""
    scale: Literal["change", "state"] = "change"
    """Divide prognostic errors by the standard deviation of the change over a step, or of the state."""


class LossPlugin(Protocol):
    """The module of a loss; `Config` is a `LossConfig` with its `type`."""

    Config: type[Any]

    def pointwise(self, config: Any, error: Tensor) -> Tensor:
        """(B, C, h, W) to the same shape: what each point's error costs.

        h may be a band of rows: a row's cost depends on that row alone, and nothing is divided by a number of rows or
        samples.
        """
