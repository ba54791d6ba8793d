"""Persistence: the forecast is the last state. It is the baseline that every model must beat."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from credit_like import bands
from credit_like.bands import Level
from credit_like.schema.base import Section

if TYPE_CHECKING:
    from torch import nn


class Config(Section):
    """Persistence has no settings."""

    trains: ClassVar[bool] = False

    type: Literal["persistence"] = "persistence"
    predict: Literal["increment"] = "increment"
    """The change over one step, which is zero."""

    def check(self, height: int, width: int, *, in_channels: int = 1, out_channels: int = 1) -> list[str]:
        """Return no problems, because persistence works on every grid."""
        return []

    def check_parallel(
        self, height: int, width: int, *, tensor: int, domain: int, columns: int = 1
    ) -> list[tuple[str, str]]:
        """Return (degree, problem) pairs; each of the `domain` × `columns` ranks needs at least one row and one column."""
        problems = []
        for axis, (size, degree) in enumerate(((height, domain), (width, columns))):
            if problem := bands.degree_problem(bands.merge([Level(size, why="the image")]), degree, axis):
                problems.append(("domain", problem))
        return problems


def build(config: Config, *, in_channels: int, out_channels: int, frames: int, height: int, width: int) -> nn.Module:
    """Return a model without parameters that predicts no change."""
    from credit_like.models.persistence.model import Persistence

    return Persistence(in_channels=in_channels, out_channels=out_channels, frames=frames, height=height, width=width)
