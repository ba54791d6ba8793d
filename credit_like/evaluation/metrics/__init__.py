"""Metrics, one module each. Statistics are computed per time; averaging over time comes later.

An experiment lists its metrics in `evaluation.metrics`; they have no `Config`. `Metric` describes the required and
optional attributes of a module. Definitions are those of WeatherBench2 (Rasp et al. 2024, doi:10.1029/2023MS004019).
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from credit_like.evaluation.fields import Array, Fields


class Metric(Protocol):
    """Interface of the module of a metric.

    Optional attributes:

    - `NEEDS`, a frozenset of required inputs: `members` (an ensemble), `ensemble` (forecasts that are one; sources that
    are compared with them may have one member), `climatology`, `precipitation`, `thresholds`, `circles` (a grid of whole
    circles of latitude; on others the metric is left out); empty by default;
    - `EXTRA`, the name of an additional last dimension, or a tuple of the names of several; None by default;
    - `LABEL`, the text of its axis and column; only metrics with a label have curves and a column in the table of
    scores.
    """

    def per_time(self, fields: Fields) -> dict[str, Array]:
        """Return the statistics of one forecast, each (leads, levels, regions[, extra]).

        The score is computed from their means over initial times.
        """

    def finish(self, means: dict[str, Array]) -> Array:
        """Return the score from those means; roots and ratios are taken after all averaging."""


def needs(metric: ModuleType) -> frozenset[str]:
    """Return the inputs that a metric requires."""
    return frozenset(getattr(metric, "NEEDS", ()))


def extra(metric: ModuleType) -> tuple[str, ...]:
    """Return the names of a metric's additional last dimensions; empty for a metric that is one number."""
    names: str | tuple[str, ...] | None = getattr(metric, "EXTRA", None)
    return (names,) if isinstance(names, str) else tuple(names or ())
