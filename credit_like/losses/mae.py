"""Mean absolute error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


by_point = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["mae"] = "mae"


def pointwise(config: Config, error: Tensor) -> Tensor:
    """Return |e|."""
    return error.abs()
