"""A constant learning rate, after an optional warm-up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit_like.schema.base import Section


class Config(Section):
    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps in which the rate rises linearly from 0."""


def learning_rate(config: Config, base: float, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step `step` = 0, 1, …"""
    return base * min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else base
