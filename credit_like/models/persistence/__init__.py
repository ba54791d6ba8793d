"""Persistence: the forecast is the last state. The floor that every model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import nn


class Config(Section):
    """Nothing to choose."""

    type: Literal["persistence"] = "persistence"
    predict: Literal["increment"] = "increment"

    def check(self, height: int, width: int, *, in_channels: int = 1, out_channels: int = 1) -> list[str]:
        """It fits every grid."""
        return []


def build(config: Config, *, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> nn.Module:
    """A model without parameters that predicts no change."""
    from credit_like.models.persistence.model import Persistence

    return Persistence(out_channels)
