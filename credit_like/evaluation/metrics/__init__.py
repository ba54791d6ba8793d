"""Metrics, one module each. Statistics are computed per time; averaging over time comes later.

An experiment lists its metrics in `evaluation.metrics`; they have no `Config`. `Metric` describes the required and
optional attributes of a module. Definitions are those of WeatherBench2 (Rasp et al. 2024, doi:10.1029/2023MS004019).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from credit_like.errors import UserError, own_line, reason
from credit_like.registry import did_you_mean, is_foreign

if TYPE_CHECKING:
    from credit_like.evaluation.fields import Array, Fields

INPUTS = frozenset({"members", "ensemble", "climatology", "precipitation", "thresholds", "circles"})
"""What `NEEDS` of a metric may name."""
_TOLERANCE = 1e-4
"""Largest difference of a statistic relative to the largest value: more than rounding in fp32, in which a metric may compute."""
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What code of others raises where it is wrong."""


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

        The score is computed from their means over initial times. A forecast may come in several calls, each with some of
        its leads, so that the statistics of a lead must depend on that lead alone. All metrics get the same arrays, which
        cannot be written to.
        """

    def finish(self, means: dict[str, Array]) -> Array:
        """Return the score from those means, of their shape; roots and ratios are taken after all averaging.

        Element by element: the means may have another shape, or be single numbers.
        """


def needs(metric: ModuleType) -> frozenset[str]:
    """Return the inputs that a metric requires."""
    return frozenset(getattr(metric, "NEEDS", ()))


def extra(metric: ModuleType) -> tuple[str, ...]:
    """Return the names of a metric's additional last dimensions; empty for a metric that is one number."""
    names: str | tuple[str, ...] | None = getattr(metric, "EXTRA", None)
    return (names,) if isinstance(names, str) else tuple(names or ())


def needs_problem(metric: ModuleType) -> str | None:
    """Return a sentence on `NEEDS` of a metric that are no inputs; None if all are."""
    wanted = getattr(metric, "NEEDS", ())
    expected = f"NEEDS with some of {', '.join(sorted(INPUTS))} in {metric.__file__}"
    if isinstance(wanted, str):
        return f"expected {expected}, got the text {wanted!r}; write {{{wanted!r}}}"
    unknown = sorted(str(one) for one in needs(metric) - INPUTS)
    return f"expected {expected}, got {unknown[0]!r}; change it{did_you_mean(unknown[0], INPUTS)}" if unknown else None


def statistics(name: str, metric: ModuleType, fields: Fields) -> dict[str, Array]:
    """Return the statistics of a metric, as `Metric.per_time` does.

    Raises UserError for a metric of others that raises an error, and for one that returns anything but an array of (leads,
    levels, regions[, extra]) for each statistic.
    """
    with _errors_of(name, metric):
        found = metric.per_time(fields)
    further = extra(metric)
    shape = (*fields.truth.shape[:2], len(fields.regions.names))
    axes = ", ".join(("leads", "levels", "regions", *further))
    expected = f"statistics on ({axes}), beginning with {shape}"
    if not isinstance(found, Mapping) or not all(isinstance(statistic, str) for statistic in found):
        raise _refusal(name, metric, f"a dict of {expected}, by name", _named(found), "change per_time")
    result = {}
    for statistic, values in found.items():
        with _errors_of(name, metric):
            array = np.asarray(values)
        fits = array.ndim == 3 + len(further) and array.shape[:3] == shape
        if not fits or array.dtype.kind not in "fiub":
            cure = "take means over the area with fields.mean, and name further dimensions in EXTRA"
            raise _refusal(name, metric, f"{expected}, of real numbers", f"{_text(values)} for {statistic!r}", cure)
        result[statistic] = array
    return result


def score(name: str, metric: ModuleType, means: dict[str, Array]) -> Array:
    """Return the score of a metric from the means of its statistics, as `Metric.finish` does.

    Raises UserError for a metric of others that raises an error, and for one that returns a score of another shape.
    """
    further = len(extra(metric))
    with _errors_of(name, metric):
        found = np.asarray(metric.finish(means))
    shapes = {np.shape(values)[: np.ndim(values) - further] for values in means.values()}
    if found.shape[: found.ndim - further] not in shapes:
        expected = f"a score of the shape of the means, {' or '.join(map(str, sorted(shapes)))}"
        raise _refusal(name, metric, expected, f"{_text(found)} from finish", "compute it element by element")
    return found


def try_out(name: str, metric: ModuleType, fields: Fields) -> dict[str, Array]:
    """Return the statistics of a metric. Raises UserError if it does not do on these fields what `Metric` asks of it."""
    together = statistics(name, metric, fields)
    _refuse_memory(name, metric, fields, together)
    _refuse_mixing(name, metric, {statistic: values.astype(np.float64) for statistic, values in together.items()})
    return together


def _refuse_memory(name: str, metric: ModuleType, fields: Fields, together: Mapping[str, Array]) -> None:
    """Raise UserError for a metric that gives a lead other statistics beside other leads than alone, or in another call."""
    alone = [statistics(name, metric, fields.at_lead(lead)) for lead in range(len(fields.truth))]
    for statistic, values in together.items():
        parts = [one[statistic] for one in alone if statistic in one and one[statistic].shape[1:] == values.shape[1:]]
        if len(parts) < len(alone) or not _is_close(np.concatenate(parts), values):
            expected = (
                f"statistics of a lead that depend on that lead alone, because leads come in blocks ({statistic!r})"
            )
            cure = "use no other leads, keep nothing between calls, and draw no random numbers"
            raise _refusal(name, metric, expected, "others when each lead was given by itself", cure)


def _refuse_mixing(name: str, metric: ModuleType, means: dict[str, Array]) -> None:
    """Raise UserError for a metric that gives a single mean another score than all of them together.

    With further dimensions, whose scores have no intervals and are not compared, the score of all is computed alone.
    """
    if not means:
        return
    with np.errstate(all="ignore"):  # these means are not those of the evaluation
        together = score(name, metric, means)
        if extra(metric):
            return
        singles = [
            score(name, metric, {statistic: np.asarray(values[at]) for statistic, values in means.items()})
            for at in np.ndindex(together.shape)
        ]
    if not _is_close(np.reshape(singles, together.shape), together):
        expected = "a finish that computes element by element, because it gets resamples and single numbers too"
        cure = "use no mean, largest value or difference of several means"
        raise _refusal(name, metric, expected, "other scores of single numbers than of all together", cure)


def _is_close(values: Array, others: Array) -> bool:
    size = float(np.abs(np.nan_to_num(others, nan=0, posinf=0, neginf=0)).max(initial=0))
    return np.allclose(values, others, rtol=0, atol=_TOLERANCE * size, equal_nan=True)


@contextmanager
def _errors_of(name: str, metric: ModuleType) -> Iterator[None]:
    """Convert errors of a metric of others to UserError."""
    try:
        yield
    except UserError:
        raise
    except _ERRORS as error:
        if not is_foreign(metric.__name__):
            raise
        got = f"{type(error).__name__} at {own_line(error)}: {reason(error)}"
        raise _refusal(name, metric, "a metric without errors", got, "change that line") from error


def _refusal(name: str, metric: ModuleType, expected: str, got: str, cure: str) -> UserError:
    return UserError(f"evaluation.metrics: {name} in {metric.__file__}: expected {expected}, got {got}; {cure}")


def _text(values: object) -> str:
    shape = getattr(values, "shape", None)
    return type(values).__name__ if shape is None else f"{tuple(shape)} of {np.asarray(values).dtype}"


def _named(found: object) -> str:
    return f"the names {', '.join(map(repr, found))}" if isinstance(found, Mapping) else _text(found)
