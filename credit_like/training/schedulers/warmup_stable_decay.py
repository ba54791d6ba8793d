"""Linear warm-up, a constant rate, and a decay in the last steps (Hägele et al. 2024, arXiv:2405.18392)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from credit_like.errors import UserError
from credit_like.schema.base import Section
from credit_like.training.schedulers._lowest import lowest


class Config(Section):
    type: Literal["warmup-stable-decay"] = "warmup-stable-decay"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the rate rises linearly from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Number of steps at the end in which the rate falls to `min_lr`."""
    shape: Literal["linear", "sqrt"] = "sqrt"
    """How the rate falls with the part x of the decay that is done: as 1 − x or as 1 − √x."""
    min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate."""


def learning_rate(config: Config, base: float, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step `step` = 0, 1, …

    Raises UserError where warm-up and decay take more steps than there are, or `min_lr` is above `base`.
    """
    if config.warmup_steps + config.decay_steps > total_steps:
        raise UserError(
            f"trainer.scheduler.decay_steps: expected warmup_steps + decay_steps of at most the {total_steps} optimiser "
            f"steps of the run, got {config.warmup_steps} + {config.decay_steps}; change them or train longer"
        )
    low = lowest(config.min_lr, base)
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    left = total_steps - step
    if left > config.decay_steps:
        return base
    done = min(1.0, (config.decay_steps - left + 1) / (config.decay_steps + 1))
    return low + (base - low) * (1.0 - (math.sqrt(done) if config.shape == "sqrt" else done))
