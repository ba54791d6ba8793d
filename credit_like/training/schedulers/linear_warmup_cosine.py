"""Linear warm-up, then half a cosine down to `min_lr`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from credit_like.errors import UserError
from credit_like.schema.base import Section
from credit_like.training.schedulers._lowest import lowest


class Config(Section):
    type: Literal["linear-warmup-cosine"] = "linear-warmup-cosine"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the rate rises linearly from 0."""
    min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps until `min_lr`. Default: all steps of the phase."""


def learning_rate(config: Config, base: float, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step `step` = 0, 1, …

    It is base·(step + 1)/warm-up, then min + (base − min)·(1 + cos(π·progress))/2, with progress from 0 at the end of
    the warm-up to 1 at the end of the run. Raises UserError where the warm-up does not end before the run, or min is above base.
    """
    total = config.total_steps or total_steps
    if config.warmup_steps >= total:
        raise UserError(
            f"trainer.scheduler.warmup_steps: expected fewer than the {total} optimiser steps of the run, "
            f"got {config.warmup_steps}; change it or train longer"
        )
    low = lowest(config.min_lr, base)
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / (total - config.warmup_steps))
    return low + (base - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
