"""The sum of several losses, each with a weight: of losses of single forecasts, or of losses of ensembles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from credit_like.errors import UserError
from credit_like.losses import LossConfig
from credit_like.schema.base import Section
from credit_like.schema.plugin import plugin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class Term(Section):
    """One of the losses."""

    weight: float = Field(default=1.0, gt=0)
    """Weight of the loss in the sum."""
    loss: plugin("loss")  # type: ignore[valid-type]
    """The loss, by its `type`, and its own keys; those that all losses share are given once, for the sum."""

    @field_validator("loss", mode="after")
    @classmethod
    def _shares_nothing(cls, value: LossConfig) -> LossConfig:
        for name, shared in LossConfig.model_fields.items():
            if getattr(value, name) != shared.default:
                raise UserError(
                    f"expected {name} beside the terms, for all of them, got it in a term; change its place"
                )
        return value


class Config(LossConfig):
    type: Literal["sum"] = "sum"
    terms: tuple[Term, ...] = Field(default=(Term.model_validate({"loss": {"type": "mse"}}),), min_length=1)
    """The losses and their weights: `[{weight: 1, loss: {type: mse}}, {weight: 0.1, loss: {type: spectral}}]`.
    All or none of them are losses of ensembles."""


takes_valid = True
"""See `credit_like.losses`."""


def rowwise(config: Config, error: Tensor, target: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return Σ wᵢ ℓᵢ."""
    from credit_like.losses._mean import loss_values

    values = [term.weight * loss_values(term.loss, error, target, valid) for term in config.terms]
    return sum(values[1:], values[0])


def of_members(
    config: Config, error_BKCHW: Tensor, others: Iterable[Tensor] = (), valid: Tensor | None = None
) -> Tensor:
    """Return Σ wᵢ ℓᵢ of losses of ensembles. The members of other ranks are kept until the last term is computed."""
    from credit_like.losses._mean import member_values

    shared = tuple(others)
    more = (shared,) if shared else ()
    values = [term.weight * member_values(term.loss, error_BKCHW, more, valid) for term in config.terms]
    return sum(values[1:], values[0])
