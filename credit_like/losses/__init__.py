"""Losses, one module each with a `Config` and `pointwise` or `rowwise`, or `of_members` for an ensemble's score.

A plug-in has the attributes of `LossPlugin` or of `EnsembleLossPlugin`. A row may be judged as a whole: where
`trainer.parallelism.domain` shares columns, a loss gets those of all ranks, and each rank counts its own. A module whose loss
at a point is a function of that point alone says so by `by_point = True` and saves these messages. A module that takes the
keyword `valid`, (C, h, W), where the points of whole rows have data, says so by `takes_valid = True`; `valid` is None where all
have. A row of few points should not count for more or less than its weight in area.

Errors are divided by the channel's scale before they reach the loss, so they are of order one. The means over area,
variables and batch are the same for all losses (`credit_like.losses._mean`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Field

from credit_like.schema.base import Section

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class LossConfig(Section):
    """Options that all losses share."""

    latitude_weights: bool = True
    """Weight rows by their area; otherwise every grid point has the same weight."""
    variable_weights: dict[str, float | tuple[float, ...]] = Field(default={})
    """Weight per predicted variable, 1 by default; of a variable on levels also a list with the weight of each level."""
    level_weights: dict[float, Annotated[float, Field(gt=0)]] = Field(default={})
    """Weight per level, 1 by default; it multiplies that of the variable."""
    scale: Literal["change", "state"] = "change"
    """Divide prognostic errors by the standard deviation of the change over a step, or by that of the state."""
    lead_weights: tuple[float, ...] | None = None
    """Weight per autoregressive step, as many as `forecast_len`. Default: all steps count alike."""


class LossPlugin(Protocol):
    """Interface of the module of a loss; `Config` is a `LossConfig` with its `type`.

    A loss that is no function of the error at each point has `rowwise` instead of `pointwise`.
    """

    Config: type[Any]

    def pointwise(self, config: Any, error: Tensor) -> Tensor:
        """Return the loss at each point, of the same shape (B, C, h, W).

        h may be a band of rows: the loss of a row must depend on that row alone, and must not be divided by a number of
        rows or samples.
        """

    def rowwise(self, config: Any, error: Tensor, target: Tensor) -> Tensor:
        """Return values of the shape of `error` (B, C, h, W), whose mean along a row is the loss of the row.

        `error` is prediction − target; both arguments are divided by the channel's scale, and 0 at points without data.
        h is as in `pointwise`.
        """


class EnsembleLossPlugin(Protocol):
    """Interface of the module of a loss that compares all members of an ensemble with the truth."""

    Config: type[Any]

    def of_members(self, config: Any, error_BKCHW: Tensor, others: Iterable[Tensor] = ()) -> Tensor:
        """Return the loss at each point, (B, C, h, W), from the errors of K members.

        Rows and samples are independent of each other, as in `LossPlugin.pointwise`. With an ensemble over several ranks
        `others` yields the errors of the members of other ranks, (B, k, C, h, W) each and without gradients; all must be
        taken. The result is then a part: the parts of all ranks add up to the loss of all members, and the gradient of a
        part is that of the whole loss with respect to this rank's errors. A plug-in without this argument works on one
        rank of the ensemble.
        """
