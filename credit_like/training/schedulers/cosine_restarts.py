"""Half cosines one after the other, each after a jump back to the full rate (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from credit_like.schema.base import Section
from credit_like.training.schedulers._lowest import lowest


class Config(Section):
    type: Literal["cosine-restarts"] = "cosine-restarts"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the rate rises linearly from 0."""
    period: int = Field(default=1000, ge=1)
    """Optimiser steps of the first half cosine, which follows the warm-up."""
    factor: int = Field(default=1, ge=1)
    """Length of each half cosine relative to the one before."""
    min_lr: float = Field(default=0.0, ge=0)
    """Lowest learning rate."""


def learning_rate(config: Config, base: float, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step `step` = 0, 1, …: min + (base − min)·(1 + cos(π t/T))/2 at step t of T.

    Raises UserError where min is above base.
    """
    low = lowest(config.min_lr, base)
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    step, period = step - config.warmup_steps, config.period
    if config.factor == 1:
        step %= period
    while step >= period:
        step, period = step - period, period * config.factor
    return low + (base - low) * 0.5 * (1.0 + math.cos(math.pi * step / period))
