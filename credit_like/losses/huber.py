"""Huber's loss: quadratic for small errors, linear beyond `delta` (Huber, Ann. Math. Statist. 35, 73, 1964)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from credit_like.losses import LossConfig

if TYPE_CHECKING:
    from torch import Tensor


by_point = True
"""See `credit_like.losses`."""


class Config(LossConfig):
    type: Literal["huber"] = "huber"
    delta: float = Field(default=1.0, gt=0)
    """Size of the scaled error at which the loss becomes linear."""


def pointwise(config: Config, error: Tensor) -> Tensor:
    """Return e²/2 where |e| ≤ δ, δ(|e| − δ/2) beyond: with m = min(|e|, δ), both are m(|e| − m/2)."""
    size = error.abs()
    inner = size.clamp(max=config.delta)
    return inner * (size - inner / 2)
