"""A constant rate that is reduced whenever the validation loss no longer falls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from credit_like.schema.base import Section
from credit_like.training.patience import stalls
from credit_like.training.schedulers._lowest import lowest


class Config(Section):
    type: Literal["plateau"] = "plateau"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the rate rises linearly from 0."""
    factor: float = Field(default=0.5, gt=0, lt=1)
    """Factor by which the rate is reduced."""
    patience: int = Field(default=5, ge=1)
    """Number of validations in a row without a better loss after which the rate is reduced."""
    min_change: float = Field(default=0.0, ge=0, lt=1)
    """Smallest relative decrease below the best loss so far that counts as an improvement."""
    min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate."""


def learning_rate(config: Config, base: float, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step `step` = 0, 1, … before any validation.

    Raises UserError where `min_lr` is above `base`.
    """
    return learning_rate_after(config, base, step, total_steps, ())


def learning_rate_after(
    config: Config, base: float, step: int, total_steps: int, losses: Sequence[float | None]
) -> float:
    """Return the rate of optimiser step `step` after validations with these losses, the oldest first."""
    reduced = base * config.factor ** stalls(losses, config.patience, config.min_change)
    rate = max(reduced, lowest(config.min_lr, base))
    return rate * min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else rate
