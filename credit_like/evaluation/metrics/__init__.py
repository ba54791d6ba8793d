"""Scores, one file each: per time first, averaging over time comes later.

An experiment names its metrics (`evaluation.metrics`); they have no `Config`. What a module has to have, and what it may
leave out, is `Metric`. Definitions are those of WeatherBench2 (Rasp et al. 2024, doi:10.1029/2023MS004019).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from credit_like.evaluation.fields import Array, Fields


class Metric(Protocol):
    """The module of a metric.

    It may also have:

    - `NEEDS`, a frozenset of what has to be there for it: `members`, `climatology`, `precipitation`; nothing by default;
    - `EXTRA`, the name of a further last dimension; None by default;
    - `LABEL`, the text of its axis and column: with one, a metric has curves and a column in the table of scores.
    """

    def per_time(self, fields: Fields) -> dict[str, Array]:
        """Statistics of one forecast, each (leads, levels, regions[, extra]).

        Their mean over initial times is what the score is made from.
        """

    def finish(self, means: dict[str, Array]) -> Array:
        """Return the score from those means: roots and ratios are taken after all averaging."""


def needs(metric: ModuleType) -> frozenset[str]:
    """Return what has to be there for a metric."""
    return frozenset(getattr(metric, "NEEDS", ()))


def extra(metric: ModuleType) -> str | None:
    """Return the name of a metric's further last dimension."""
    name: str | None = getattr(metric, "EXTRA", None)
    return name
